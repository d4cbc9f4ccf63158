"""Matrix and convolution FLOPs of a compiled program, for benchmarks."""

from jaxtensile.hlo import hlo_flops

__all__ = ["hlo_flops"]
