"""Programs and plans as plain data: no JAX, no decisions."""
