"""How a target's compiler fuses: by which rules lifetimes are told. ``xla.compilers`` has one for each target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fuser:
    """How a target's compiler fuses.

    ``twice``: whether a value with several readers is computed in each kernel if that is cheaper; the CPU's compiler
    does so only for ops that take no time. ``products``: whether products compute their operands; their generator needs
    compute capability 8.0. ``joins``: whether a product is computed where it is added to another. ``outer``: whether
    outer products are computed where they are read. ``scatters``: whether scatters compute their operands.
    ``exponentials``: whether a softmax in f32 of 16-bit scores and its gradient share stored exponentials; else each is
    one kernel. ``calls``: whether convolutions, and products that are not generated, are calls of a library, which
    return a tuple. ``work``: time of arithmetic relative to memory traffic, in that of an H200.
    """

    twice: bool = True
    products: bool = True
    joins: bool = False
    outer: bool = True
    scatters: bool = True
    exponentials: bool = True
    calls: bool = True
    work: float = 1.0


H200: Final = Fuser()
CPU: Final = Fuser(twice=False, products=False, outer=False, scatters=False, exponentials=False, calls=False)
