"""Does ``jaxtensile.jit`` undo no more of the user's own ``jax.checkpoint`` than there is room for?"""
