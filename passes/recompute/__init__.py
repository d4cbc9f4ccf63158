"""Recomputation: stages, cuts, bounds, and the schedule of a decision."""
