"""How target compilers differ, for static estimates.

Invariant: each rule is about a platform or a compute capability, never about one program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Final

from jaxtensile import _compat
from jaxtensile.devices.backends import CPU, CUDA, TPU
from jaxtensile.devices.gpu_description import FACTS
from jaxtensile.devices.profiles import DeviceProfile, profile
from jaxtensile.ir.fuser import CPU as FUSES_CPU
from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.ir.ir import Graph, Op, ValueId
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.lowering.convolutions import LAST_BEFORE_8, LAST_FROM_8, LAST_FROM_9
from jaxtensile.passes.lowering.expanded import expanded
from jaxtensile.passes.lowering.expanded_draws import expanded_draws
from jaxtensile.passes.lowering.expanded_pools import expanded_pools
from jaxtensile.passes.lowering.lowered import Lowered, lowered
from jaxtensile.passes.lowering.split_products import BLACKWELL, HOPPER, OLDER, Weights
from jaxtensile.passes.lowering.widened import BEFORE_8, BEFORE_9, ON_CPU, Wide, widened
from jaxtensile.units import Bytes

_TRITON: Final = (8, 0)
"""Compute capability from which XLA:GPU generates products itself: Ampere's, as Triton requires."""
_BF16: Final = (9, 0)
"""Compute capability from which XLA:GPU computes bf16 natively: Hopper's."""
_NEW_GPU: Final = "GPU from 9.0"
_GPU: Final = "GPU from 8.0"
_OLD_GPU: Final = "older GPU"
_WIDE: Final = {_GPU: BEFORE_9, _OLD_GPU: BEFORE_8}
_LIKE_H200: Final = FACTS["nvidia-h200"].multiprocessors


@dataclass(frozen=True, slots=True)
class Margin:
    """A share of the temporaries plus copies of the largest stored array."""

    share: float
    copies: float

    def of(self, temp: Bytes, largest: Bytes) -> Bytes:
        """The margin in bytes."""
        return int(self.share * temp + self.copies * largest)


MARGINS: Final = {
    _NEW_GPU: (Margin(0.08, 4), Margin(0.21, 2.5)),
    _GPU: (Margin(0.08, 4), Margin(0.21, 2.5)),
    _OLD_GPU: (Margin(0.21, 2.5), Margin(0.21, 2.5)),
    CPU.name: (Margin(0.08, 3), Margin(0.3, 8)),
    TPU.name: (Margin(1.0, 0), Margin(0.21, 1)),
}
"""Below and above, by kind of compiler: the larger over its versions of jax in ``benchmarks/estimate/targets.py``,
calibration half. A TPU keeps small arrays on the chip, uncounted, so it may need no temporaries."""
UNKNOWN: Final = Margin(1.0, 0), Margin(0.5, 8)
"""Margins of a compiler that was not measured: the widest of all."""


_CHANNELS_LAST: Final = {_NEW_GPU: LAST_FROM_9, _GPU: LAST_FROM_8, _OLD_GPU: LAST_BEFORE_8}
_JOINS: Final = _compat.JAX_VERSION >= (0, 12)
_DEAR: Final = 0.85
"""Arithmetic's time, relative to an H200's, from which exponentials are stored; 0.7 is too little. Between: a guess."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A target's compiler. ``fuser``: fusion rules. ``wide``: what it computes in f32. ``processors``: of a GPU.
    ``kind``: key into ``MARGINS``. ``weights``: by which it splits products, None if it does not."""

    fuser: Fuser = H200
    wide: Wide | None = None
    processors: int = _LIKE_H200
    kind: str = _NEW_GPU
    weights: Weights | None = HOPPER

    @property
    def low(self) -> Margin:
        """How far XLA's figure may be below the static one."""
        return MARGINS.get(self.kind, UNKNOWN)[0]

    @property
    def high(self) -> Margin:
        """How far XLA's figure may be above the static one."""
        return MARGINS.get(self.kind, UNKNOWN)[1]

    @property
    def planned(self) -> Fuser:
        """The rules by which programs are planned: an H200's, the best known in programs that are planned, but for what
        a GPU stores of a softmax, and a TPU's calls no library. A CPU's own come before (``planner/by_rules``)."""
        own = self.fuser
        return replace(H200, exponentials=own.exponentials, calls=own.calls, joins=own.joins) if own.twice else H200

    @property
    def spreads(self) -> bool:
        """Whether it turns products by groups into one product."""
        return self.kind != TPU.name

    def lowered(self, graph: Graph) -> Lowered:
        """The graph as this compiler fuses it."""
        found = expanded(graph, self.processors, groups=self.spreads, weights=self.weights)
        if self.wide is not None:
            found = _then(found, widened(found.graph, self.wide))
        if self.fuser != FUSES_CPU:
            return _then(found, lowered(found.graph, _CHANNELS_LAST.get(self.kind)))
        found = _then(found, expanded_pools(found.graph))
        return _then(found, expanded_draws(found.graph))

    def as_written(self, graph: Graph) -> Graph:
        """A graph with workspaces, with the copies that its products by groups share if nothing separates them."""
        return self.lowered(graph).graph if _shares(graph) else graph

    def with_workspaces(self, graph: Graph) -> Graph:
        """The graph with a workspace on each product by groups, and on a CPU on each gradient of a max pool; the same
        object if there are none."""
        ops = tuple(map(partial(self._with_workspace, graph), graph.ops))
        return graph if all(map(is_, ops, graph.ops)) else replace(graph, ops=ops)

    def _expands(self, op: Op) -> bool:
        """Whether it makes an index array per axis for the gradient of a max pool (``expanded_pools``)."""
        return op.primitive == "select_and_scatter_add" and self.kind == CPU.name

    def _with_workspace(self, graph: Graph, op: Op) -> Op:
        bodies = tuple(map(self.with_workspaces, op.bodies))
        if not all(map(is_, bodies, op.bodies)):
            return replace(op, bodies=bodies)
        if not (self._expands(op) or (op.groups and self.spreads)):
            return op
        ids = {v: ValueId(n) for n, v in enumerate(dict.fromkeys((*op.operands, *op.results)))}
        operands, results = (tuple(ids[v] for v in of) for of in (op.operands, op.results))
        values = tuple(replace(graph.values[v], id=n) for v, n in ids.items())
        inputs = tuple(dict.fromkeys(operands))
        alone = self.lowered(Graph(values=values, ops=(op.on(0, operands, results),), inputs=inputs, outputs=results))
        return replace(op, workspace=live_ranges(alone.graph, fuse(alone.graph, by=self.fuser)).temp)


def _shares(graph: Graph) -> bool:
    return any(op.workspace or any(map(_shares, op.bodies)) for op in graph.ops)


def _then(first: Lowered, second: Lowered) -> Lowered:
    return Lowered(second.graph, tuple(first.origin[i] for i in second.origin))


def kind_of(device: DeviceProfile) -> str:
    """The kind of compiler for a device; an unknown GPU counts as new."""
    if device.backend is not CUDA or device.name not in FACTS:
        return _NEW_GPU if device.backend is CUDA else device.platform
    capability = FACTS[device.name].compute_capability
    return _NEW_GPU if capability >= _BF16 else _GPU if capability >= _TRITON else _OLD_GPU


def compiler_of(device: DeviceProfile) -> Compiler:
    """The compiler for a device."""
    kind = kind_of(device)
    if kind == CPU.name:
        return Compiler(FUSES_CPU, ON_CPU, 0, kind)
    if kind == TPU.name:
        return Compiler(replace(H200, calls=False), kind=kind, weights=None)
    if device.name not in FACTS:
        return Compiler(replace(H200, joins=_JOINS), kind=kind)
    work = _work(device) / _work(profile("nvidia-h200"))
    generated = kind != _OLD_GPU
    exponentials = kind == _NEW_GPU and work >= _DEAR
    fuser = Fuser(products=generated, joins=generated and _JOINS, exponentials=exponentials, work=work)
    return Compiler(fuser, _WIDE.get(kind), FACTS[device.name].multiprocessors, kind, _weights(device, kind))


def _weights(device: DeviceProfile, kind: str) -> Weights | None:
    """By which a GPU's products are split; None if they are the library's."""
    if kind == _OLD_GPU:
        return None
    capability = FACTS[device.name].compute_capability
    return BLACKWELL if capability >= (10, 0) else HOPPER if capability >= (9, 0) else OLDER


def _work(device: DeviceProfile) -> float:
    """Time of arithmetic relative to memory traffic, as in XLA's cost model."""
    gpu = FACTS[device.name]
    return device.memory_bandwidth / (gpu.multiprocessors * gpu.fpus * gpu.clock_ghz * 1e9)
