"""Matrix and convolution FLOPs of a compiled program, for benchmarks."""

from jaxtensile.xla.hlo import hlo_flops

__all__ = ["hlo_flops"]
