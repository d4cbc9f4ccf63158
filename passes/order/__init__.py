"""The order of a program, and how XLA is kept in it."""
