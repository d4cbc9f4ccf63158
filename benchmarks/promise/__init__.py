"""Claim: what is returned fits its budget, and uses it."""
