"""Buffers of a program after XLA's fusion, and their lifetimes."""
