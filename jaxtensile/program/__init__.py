"""Between jaxprs and programs: trace, change, and evaluate planned ones."""
