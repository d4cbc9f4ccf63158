"""The data of a report.

Invariant: XLA's figures are marked as compiled, our own as predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtensile.ir.plan import NOTHING_AGAIN, Action, CompiledTime, Leaf, MemoryUse, Recomputed
from jaxtensile.ir.timeline import Timeline
from jaxtensile.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One residual's decision in the user's words.

    ``stored``: live at the plain program's peak. Other recomputed values are intermediate or short-lived. ``again``:
    seconds of its op once more, by the model; None for values of loops that were rewritten.
    """

    kind: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Bytes
    source: str
    stored: bool = True
    again: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a function, its value as text, and its source.

    ``source``: ``"code"``, ``"default"``, ``"job"`` (its lease), or file and line of the config; ``table`` is its table
    there.
    """

    name: str
    value: str
    source: str
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The outcome of one plan. Bytes are device bytes, times predicted seconds unless said otherwise.

    Memory. ``baseline``: the unchanged program (``.exact`` if compiled). ``predicted``: the planned one by our model.
    ``compiled``: the planned one by XLA. ``lower_bound``: no plan needs less. ``timeline``: the model's bytes while
    each op runs.

    Cost. ``overhead``: extra seconds of a step. ``overhead_ratio``: ``overhead`` relative to the step. ``wait``: the
    part of ``overhead`` that waits for copies. ``flops``: of the program as written, so ``recompute_flops`` and
    ``overhead`` are negative if a checkpoint recomputed more than the budget needs. ``xla``: XLA's own recomputation in
    what runs, included in ``overhead`` and ``recompute_flops``. ``step``: predicted seconds of a step. ``measured``:
    median seconds of a few first calls (None until there are enough, and for an unchanged program). ``renewed``: how
    often those led to another plan. ``kernels``: the step by its compiled kernels, None if the device's kernels are not
    known. ``plain_kernels``: the same of the unchanged program, None also if that was not compiled.

    Plan. ``solver``: its maker. ``gap``: share of its recomputation that another plan around the same boundary might
    save, by the model (0.0: none, proven; None: not known). ``offload_bytes``: bytes copied to the host per step.
    ``state``: arguments on the host between steps, by name. ``undone``: runs without the user's ``jax.checkpoint``s.
    ``rewritten``: its loops, branches or large products are changed. ``parts``: number of parts of its batch.
    ``rounds``: compiles of planned programs. ``seconds``: wall time per pipeline step. ``settings``: the options and
    their sources.
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
        """Whether XLA's allocation is within the budget; False if XLA does not tell it."""
        return self.compiled.exact and self.compiled.device <= self.budget

    @property
    def unchanged(self) -> bool:
        """Whether the program runs as written."""
        return not (self.actions or self.undone or self.state or self.rewritten)
