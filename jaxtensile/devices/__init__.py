"""What a device is: its memory and speed, what this machine has, what was measured of it. No JAX."""
