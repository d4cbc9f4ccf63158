"""What each model of XLA's behaviour and each refinement of a search is worth: one turned off at a time."""
