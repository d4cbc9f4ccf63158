"""From a problem to a plan: one file for each solver."""
