"""Random cases: a sharded program, a budget, what each process has measured of its device, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FAULTS: Final = ("budget", "options", "program", "order", "absent", "late", "interrupt", "objective")
"""What one of the processes does otherwise than the rest."""
DEVICES: Final = 4
"""Of all processes together."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``rates``: by process, how much faster its device was measured than published (0: it was not measured).

    ``victim``: the process that does otherwise, or is killed ``after`` so many seconds.
    """

    number: int
    processes: int
    program: str
    width: int
    rows: int
    layers: int
    share: float
    objective: str
    rates: tuple[float, ...]
    fault: str = ""
    victim: int = 0
    after: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def case(number: int, processes: int, *, killed: bool = False) -> Case:
    """The case of that number."""
    rng = random.Random(f"{number} {processes} {killed}")
    fault = "kill" if killed else rng.choice(FAULTS) if rng.random() < 0.25 else ""
    return Case(
        number=number,
        processes=processes,
        program=rng.choice(tuple(PROGRAMS)),
        width=rng.choice((32, 48, 64)),
        rows=rng.choice((128, 256, 512)),
        layers=rng.randint(2, 3),
        share=round(rng.uniform(0.45, 1.05), 2),
        objective=rng.choice(("flops", "flops", "time")),
        rates=tuple(rng.choice((0.0, round(2 ** rng.uniform(-3, 3), 3))) for _ in range(processes)),
        fault=fault,
        victim=rng.randrange(processes),
        after=round(rng.uniform(0.0, 6.0), 2),
    )


# ---- programs ------------------------------------------------------------------------------------


def _layer(y: Any, ws: Any) -> Any:
    a, b = ws
    y = y + jax.nn.gelu(jnp.sin(y @ a) * 2) @ b
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)


def _forward(ws: Any, x: Any) -> Any:
    for w in ws:
        x = _layer(x, w)
    return (x * x).mean()


def _scanned(ws: Any, x: Any) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    return (jax.lax.scan(lambda y, w: (_layer(y, w), None), x, stacked)[0] ** 2).mean()


def _remat(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(_layer)(x, w)
    return (x * x).mean()


def _branched(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.lax.cond(x.sum() > 0, _layer, lambda y, w: y - jnp.cos(y @ w[0]) @ w[1], x, w)
    return (x * x).mean()


def _step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(ws: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, d: w - 0.1 * d, ws, slopes), value

    return step


def _by_hand(mesh: Mesh) -> Callable[..., Any]:
    def step(ws: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(_forward)(ws, x)
        slopes = jax.lax.pmean(slopes, "x")
        return jax.tree.map(lambda w, d: w - 0.1 * d, ws, slopes), jax.lax.pmean(value, "x")

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P()))


PROGRAMS: Final[dict[str, tuple[Callable[[Mesh], Callable[..., Any]], P, AxisType]]] = {
    "weights divided": (lambda _: _step(_forward), P("x"), AxisType.Auto),
    "columns divided": (lambda _: _step(_forward), P(None, "x"), AxisType.Auto),
    "weights everywhere": (lambda _: _step(_forward), P(), AxisType.Auto),
    "explicit axes": (lambda _: _step(_forward), P(), AxisType.Explicit),
    "a loop": (lambda _: _step(_scanned), P("x"), AxisType.Auto),
    "an explicit loop": (lambda _: _step(_scanned), P(), AxisType.Explicit),
    "checkpoints": (lambda _: _step(_remat), P("x"), AxisType.Auto),
    "branches": (lambda _: _step(_branched), P(), AxisType.Auto),
    "shard_map": (_by_hand, P(), AxisType.Auto),
}
"""Of a mesh: the step, how its weights are divided, and the kind of the mesh's axis."""


def built(case: Case) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    """The step of a case, and what makes its arguments, with the same values in every process."""
    make, spec, kind = PROGRAMS[case.program]
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",), axis_types=(kind,))
    rng = np.random.default_rng(case.number)
    shapes = (case.width, 4 * case.width), (4 * case.width, case.width)
    ws = [tuple(rng.normal(size=s, scale=0.05).astype("f") for s in shapes) for _ in range(case.layers)]
    x = rng.normal(size=(case.rows, case.width)).astype("f")

    def put(array: Any, spec: P) -> Any:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda i: array[i])

    return make(mesh), lambda: (jax.tree.map(lambda w: put(w, spec), ws), put(x, P("x")))
