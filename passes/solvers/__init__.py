"""Solvers: one file each."""
