"""Claim: of the user's own ``jax.checkpoint``s no more is recomputed than the budget needs."""
