"""Claim: a planned call costs what a ``jax.jit`` call costs, and the first one little more."""
