"""Many jobs on many machines: how full they are, and what becomes of the jobs when something is killed."""
