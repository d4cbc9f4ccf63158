"""Graphs as a compiler rewrites them before it fuses: ops that become others, and what they take of their own."""
