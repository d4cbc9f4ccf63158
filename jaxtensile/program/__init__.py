"""Between jaxprs and programs: trace one, change one, evaluate a planned one."""
