"""Pure decisions on a Graph: no JAX, no XLA, no I/O."""
