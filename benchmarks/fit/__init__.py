"""Claim: a real train step fits a byte budget, with no more FLOPs than hand-placed policies."""
