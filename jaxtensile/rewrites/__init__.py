"""Changes to a program other than recomputation, one file per kind."""
