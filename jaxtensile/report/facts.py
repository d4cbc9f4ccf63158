"""What is told of a plan: the data.

Invariant: a figure that XLA gave is marked as compiled, a figure of our own as predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtensile.ir.plan import NOTHING_AGAIN, Action, CompiledTime, Leaf, MemoryUse, Recomputed
from jaxtensile.ir.timeline import Timeline
from jaxtensile.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One kept or recomputed residual in the user's words.

    ``stored``: the plain program has it in memory where it needs most. What is recomputed and is not is a step on the
    way to others, or in memory for a moment alone.
    """

    kind: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Bytes
    source: str
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a function, its value as text, and who says so.

    ``source``: ``"code"``, ``"default"``, ``"job"`` (its lease), or file and line of the config, whose ``table`` it is.
    """

    name: str
    value: str
    source: str
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The outcome of one plan. Bytes are device bytes, times predicted seconds unless said otherwise.

    ``baseline``: the unchanged program (``.exact`` when it was compiled); ``predicted``: the
    planned one by our model; ``compiled``: the planned one by XLA; ``lower_bound``: no plan can
    need less; ``overhead``: extra seconds of a step, ``overhead_ratio`` relative to the step;
    ``rounds``: compiles of planned programs; ``seconds``: wall time per pipeline step;
    ``timeline``: the model's bytes while each op runs; ``undone``: runs without the user's own
    ``jax.checkpoint``s; ``solver``: which made the plan, and ``gap``: what share of its recomputation
    another plan around the same boundary might spare, by the model (0.0: none, proven; None: not known);
    ``offload_bytes``: what leaves for the host in a step, ``state``: the arguments that wait there between steps, by
    their names, ``wait``: the part of ``overhead`` that is waiting for copies.
    ``rewritten``: its loops, branches or large products are made in another way; ``parts``: in so many its batch is
    worked on;
    ``step``: predicted seconds of a step of what runs, ``measured``: median seconds of a few of its first calls (None
    until there were enough, and where it runs unchanged), ``renewed``: how often those led to another plan.
    ``kernels``: a step of what runs by its compiled kernels, ``plain_kernels`` of the unchanged program where that was
    compiled; None where a device's kernels are not known;
    ``settings``: the options that it was planned by, and where each is from; ``xla``: what XLA recomputes by itself in
    what runs, which ``overhead`` and ``recompute_flops`` hold too.
    ``flops`` are those of the program as written, so ``recompute_flops`` and ``overhead`` are negative
    where a checkpoint recomputed more than the budget needs.
    """

    name: str
    target: str
    budget: Bytes
    baseline: MemoryUse
    predicted: MemoryUse
    compiled: MemoryUse
    lower_bound: Bytes
    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...] = field(repr=False)
    flops: Flops
    recompute_flops: Flops
    offload_bytes: Bytes = 0
    overhead: Seconds
    overhead_ratio: float
    stages: int
    rounds: int
    unknown_primitives: tuple[str, ...]
    solver: str
    gap: float | None = None
    notes: tuple[str, ...]
    seconds: Mapping[str, Seconds]
    timeline: Timeline | None = field(default=None, repr=False)
    undone: bool = False
    rewritten: bool = False
    parts: int = 1
    wait: Seconds = 0.0
    state: tuple[Leaf, ...] = ()
    step: Seconds = 0.0
    measured: Seconds | None = None
    renewed: int = 0
    settings: tuple[Setting, ...] = ()
    xla: Recomputed = NOTHING_AGAIN
    kernels: CompiledTime | None = None
    plain_kernels: CompiledTime | None = None

    @property
    def fits(self) -> bool:
        """Whether XLA's allocation is within the budget; False where XLA cannot tell it."""
        return self.compiled.exact and self.compiled.device <= self.budget

    @property
    def unchanged(self) -> bool:
        """Whether the program runs as the user wrote it."""
        return not (self.actions or self.undone or self.state or self.rewritten)
