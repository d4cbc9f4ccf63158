"""Checks that derive results again in the obvious way and share nothing with the solvers."""
