"""Claim: on a real GPU, plans hold their bytes, their values and their predicted times."""
