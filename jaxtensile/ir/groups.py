"""A step as several executables that run one after another: node groups."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.ir.ir import OpId, ValueId


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One executable: ops of a program, what they read of earlier groups, and what later ones read of them.

    ``ops``: in schedule order. Ops that only hand on what a kernel computes inside itself are in each group that reads
    them. ``inputs``: values from the program's inputs and from earlier groups. ``outputs``: what later groups or the
    program's results are made of, each once. ``donated``: the first so many inputs, which nobody reads later; the
    outputs of the same places have the same types and may take over their memory. ``same``: results of a barrier of an
    earlier group, and the inputs that they equal.
    """

    ops: tuple[OpId, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donated: int = 0
    same: tuple[tuple[ValueId, ValueId], ...] = ()
