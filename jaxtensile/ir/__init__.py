"""What a program and a plan are, as plain data: no JAX, no decisions."""
