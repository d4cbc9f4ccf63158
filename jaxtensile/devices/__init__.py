"""Devices: memory and speed, this machine's hardware, measured rates. No JAX."""
