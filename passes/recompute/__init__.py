"""What to keep and what to run again: stages, cuts, bounds, and the schedule of a decision."""
