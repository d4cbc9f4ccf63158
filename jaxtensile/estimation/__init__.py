"""The bytes that a job needs, before it runs and without its device."""
