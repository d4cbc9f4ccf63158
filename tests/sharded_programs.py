"""Seeded training steps over eight devices, divided in the ways that people divide them, and what a plan makes of them.

A step is data (``Step``), so that a failing one prints as what it is. Its layers are in a list, in a scan or in a scan
of scans; in or around a ``shard_map`` over all axes or some of them, or divided by constraints or by types.

    python tests/sharded_programs.py SEED ...        the steps of these seeds, a line each
"""

import contextlib
import dataclasses
import functools
import random
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile

CLOSE = 3e-5
"""Part of an array's largest number by which results may differ: XLA adds up in another order in another program."""
BATCH, LENGTH, WIDTH, HIDDEN = 64, 16, 32, 128
MESHES = {
    "line": (("data", 8),),
    "grid": (("data", 2), ("model", 4)),
    "cube": (("data", 2), ("seq", 2), ("model", 2)),
}
DIVIDED = ("constrained", "explicit", "loss mapped", "step mapped", "layer mapped", "partly mapped", "nested maps")
STACKS = ("list", "scan", "scan of scans")
POLICIES = {
    "": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}
MIXES = ("", "dropout", "rule", "while", "permute", "exchange", "scatter", "cond")


@dataclasses.dataclass(frozen=True)
class Step:
    """``mixes``: what a layer does besides its products; in a scan all layers do all of them."""

    mesh: str
    divided: str
    stack: str
    layers: int
    weights: str
    mixes: tuple[str, ...]
    policy: str
    donate: bool
    chunk: bool | str
    share: float

    @classmethod
    def of(cls, seed):
        """The step of a seed."""
        pick = random.Random(seed)
        mesh = pick.choice([*MESHES])
        divided = pick.choice([d for d in DIVIDED if mesh != "line" or d not in ("partly mapped", "nested maps")])
        kinds = ("fsdp",) if mesh == "line" else ("fsdp", "tp", "both")
        return cls(
            mesh,
            divided,
            pick.choice(STACKS),
            pick.choice((2, 4, 6)),
            pick.choice(kinds),
            tuple(pick.sample(MIXES, 2)),
            pick.choice([*POLICIES]),
            pick.random() < 0.5,
            pick.choice((False, True, "auto")),
            pick.choice((0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
        )


@jax.custom_vjp
def bent(x):
    return x * jax.nn.sigmoid(x)


bent.defvjp(lambda x: (bent(x), (x, jax.nn.sigmoid(x))), lambda r, g: (g * (r[1] + r[0] * r[1] * (1 - r[1])),))


def nested(fun, parts):
    """``fun`` of a stream and two weights in a ``shard_map`` over ``model``, whose gradient is one of its own: JAX
    cannot lower residuals of nested maps."""

    def mapped(fun, ins, outs):
        return jax.shard_map(fun, in_specs=ins, out_specs=outs, axis_names={"model"})

    @jax.custom_vjp
    def whole(x, up, down):
        return mapped(fun, (P(), *parts), P())(x, up, down)

    def back(read, slope):
        return mapped(lambda g, *read: jax.vjp(fun, *read)[1](g), (P(), P(), *parts), (P(), *parts))(slope, *read)

    whole.defvjp(lambda *read: (whole(*read), read), back)
    return whole


class Made:
    """A step made runnable: ``step``, ``args()``, ``options``, ``within()``."""

    def __init__(self, s, devices=None):
        self.s = s
        kind = AxisType.Explicit if s.divided == "explicit" else AxisType.Auto
        names, sizes = zip(*MESHES[s.mesh], strict=True)
        self.mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=devices)
        self.axes = dict(MESHES[s.mesh])
        self.seq = "seq" if "seq" in self.axes else None
        rows, columns = ("data" if s.weights != "tp" else None), ("model" if s.weights != "fsdp" else None)
        self.specs = {"up": P(rows, columns), "down": P(columns, rows), "scale": P()}
        self.batch = P("data", self.seq)
        """Of the stream, in the program of all devices."""
        self.manual = {
            "loss mapped": tuple(names),
            "step mapped": tuple(names),
            "layer mapped": tuple(names),
            "partly mapped": ("data",),
            "nested maps": ("data",) if self.seq is None else ("data", "seq"),
        }.get(s.divided, ())
        """The axes over which layers are written for one device; in nested maps, the outer one's."""
        self.options = {"donate_argnums": (0, 1) if s.donate else ()}

    def within(self):
        return jax.set_mesh(self.mesh) if self.s.divided in ("explicit", "partly mapped") else contextlib.nullcontext()

    def args(self):
        """Fresh arguments, the same at each call."""
        rng = np.random.default_rng(1)
        shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "scale": (WIDTH,)}

        def placed(x, spec):
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        def weight(name, stacked):
            shape = (*stacked, *shapes[name])
            x = rng.normal(size=shape).astype("f") * (0.0 if name == "scale" else 0.15) + (name == "scale")
            return placed(x, P(*(None,) * len(stacked), *self.specs[name]))

        stacked = {"list": (), "scan": (self.s.layers,), "scan of scans": (2, self.s.layers // 2)}[self.s.stack]
        count = self.s.layers if self.s.stack == "list" else 1
        weights = [{name: weight(name, stacked) for name in shapes} for _ in range(count)]
        weights = weights if self.s.stack == "list" else weights[0]
        momentum = jax.tree.map(lambda x: placed(np.zeros(x.shape, "f"), x.sharding.spec), weights)
        x = placed(rng.normal(size=(BATCH, LENGTH, WIDTH)).astype("f"), self.batch)
        return weights, momentum, x, placed(jax.random.key(7), P())

    # ---- a layer ------------------------------------------------------------------------------------

    def has(self, axis):
        return axis in self.manual

    def stream(self, x):
        """Constrain a stream where the program is one of all devices."""
        if self.s.divided == "constrained":
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.batch))
        return jax.sharding.reshard(x, self.batch) if self.s.divided == "explicit" else x

    def gathered(self, w, name):
        """A weight without its division along ``data``."""
        spec = self.specs[name]
        at = [i for i, a in enumerate(spec) if a == "data"]
        if not at:
            return w
        if self.has("data"):
            return lax.all_gather(w, "data", axis=at[0], tiled=True)
        if self.s.divided == "explicit":
            return jax.sharding.reshard(w, P(*(a if a != "data" else None for a in spec)))
        return w

    def products(self, x, w):
        """The two products, and the sum over ``model`` between devices that have parts of the hidden layer."""
        up, down = self.gathered(w["up"], "up"), self.gathered(w["down"], "down")
        over = self.s.weights != "fsdp" and self.has("model")

        def both(x, up, down, over):
            h = checkpoint_name(x @ up, "hidden")
            h = bent(h) if "rule" in self.s.mixes else jax.nn.gelu(h)
            if self.s.divided == "explicit":
                return jnp.einsum("bsh,hw->bsw", h, down, out_sharding=self.batch)
            y = h @ down
            if over and "scatter" in self.s.mixes:
                y = lax.psum_scatter(y, "model", scatter_dimension=2, tiled=True)
                return lax.pmean(lax.all_gather(jnp.tanh(y), "model", axis=2, tiled=True), "model")
            return lax.psum(y, "model") if over else y

        if self.s.divided == "nested maps":
            parts = tuple(P(*("model" if a == "model" else None for a in self.specs[n])) for n in ("up", "down"))
            return nested(functools.partial(both, over=self.s.weights != "fsdp"), parts)(x, up, down)
        return both(x, up, down, over)

    def mixed(self, mix, x, key):
        axis = self.seq if self.seq and self.has(self.seq) else "data" if self.has("data") else None
        if mix == "dropout":
            if axis:
                key = jax.random.fold_in(key, lax.axis_index(axis))
            return x * self.stream(jax.random.bernoulli(key, 0.8, x.shape).astype("f"))
        if mix == "while":
            return x + lax.stop_gradient(self.counted(x, axis))
        if mix == "permute":
            if axis:
                n = self.axes[axis]
                return x + 0.3 * lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
            return x + 0.3 * jnp.roll(x, 1, 2 if self.s.divided == "explicit" else 0)
        if mix == "exchange":
            if axis:
                y = jnp.tanh(lax.all_to_all(x, axis, 2, 1, tiled=True))
                return x + lax.all_to_all(y, axis, 1, 2, tiled=True)
            return x + jnp.tanh(x)
        if mix == "scatter" and axis:
            y = lax.psum_scatter(x, axis, scatter_dimension=2, tiled=True)
            return x + 0.1 * jnp.sin(lax.all_gather(y, axis, axis=2, tiled=True)) * x
        if mix == "cond":
            wanted = jax.random.bernoulli(key)
            return lax.cond(wanted, lambda x: jnp.sin(x) * x, lambda x: x + 1.0, x)
        return x

    def counted(self, x, axis):
        """A loop that ends sooner on some devices than on others."""
        limit = lax.axis_index(axis) % 3 + 1 if axis else jnp.int32(2)
        return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, jnp.cos(c[1])), (limit * 0, 0.1 * x))[1]

    def layer(self, x, w, key):
        y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * w["scale"]
        for i, mix in enumerate(self.s.mixes):
            y = self.mixed(mix, y, jax.random.fold_in(key, i))
        return self.stream(x + self.products(y, w))

    # ---- the step -----------------------------------------------------------------------------------

    def loss(self, weights, x, key):
        each = self.layer
        if self.s.divided == "layer mapped":
            specs = (self.batch, self.specs, P())
            each = jax.shard_map(each, mesh=self.mesh, in_specs=specs, out_specs=self.batch)
        if self.s.policy:
            each = jax.checkpoint(each, policy=POLICIES[self.s.policy])

        def body(carry, w):
            x, key = carry
            key, now = jax.random.split(key)
            return (each(x, w, now), key), None

        carry = (x, key)
        if self.s.stack == "list":
            for w in weights:
                carry, _ = body(carry, w)
        elif self.s.stack == "scan":
            carry, _ = lax.scan(body, carry, weights)
        else:
            carry, _ = lax.scan(lambda c, w: lax.scan(body, c, w), carry, weights)
        return (carry[0] ** 2).mean()

    def whole_loss(self, weights, x, key):
        """The loss of all devices, from outside of a ``shard_map``."""
        s = self.s
        if s.divided not in ("loss mapped", "partly mapped", "nested maps"):
            return self.loss(weights, x, key)
        return self.map(lambda w, x, k: self.mean(self.loss(w, x, k)), (*self.ins(weights),), P())(weights, x, key)

    def mean(self, loss):
        over = tuple(a for a in self.manual if a in ("data", "seq"))
        return lax.pmean(loss, over)

    def map(self, fun, ins, outs):
        return jax.shard_map(fun, mesh=self.mesh, in_specs=ins, out_specs=outs, axis_names={*self.manual})

    def ins(self, weights):
        def own(spec):
            return P(*(a if a in self.manual else None for a in spec))

        depth = {"list": 0, "scan": 1, "scan of scans": 2}[self.s.stack]
        one = {name: P(*(None,) * depth, *own(spec)) for name, spec in self.specs.items()}
        return ([one] * self.s.layers if self.s.stack == "list" else one), own(self.batch), P()

    def step(self, weights, momentum, x, key):
        def one(weights, momentum, x, key):
            mapped = self.s.divided == "step mapped"
            loss = (lambda w, x, k: self.mean(self.loss(w, x, k))) if mapped else self.whole_loss
            value, slopes = jax.value_and_grad(loss)(weights, x, key)
            momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, slopes)
            return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value

        if self.s.divided != "step mapped":
            return one(weights, momentum, x, key)
        w, batch, k = self.ins(weights)
        return self.map(one, (w, w, batch, k), (w, w, P()))(weights, momentum, x, key)


def bytes_of(executable):
    m = executable.memory_analysis()
    temp, alias = m.temp_size_in_bytes, m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.output_size_in_bytes + temp - alias, temp


def apart(expected, got):
    """The largest difference of two results, relative to the largest number of their array; infinite where they are
    divided otherwise or one is not finite."""
    worst = 0.0
    for e, g in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        if not g.sharding.is_equivalent_to(e.sharding, e.ndim) or e.dtype != g.dtype or g.shape != e.shape:
            return float("inf")
        a, b = np.asarray(e, np.float64), np.asarray(g, np.float64)
        if not np.isfinite(b).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)))
    return worst


def outcome(s, devices=None):
    """What a plan makes of a step, in words, and how far its results are from those of ``jax.jit``; infinite: not
    the same at all. A budget that is refused is tried again with what the refusal says it needs."""
    made = Made(s, devices)
    with made.within():
        try:
            compiled = jax.jit(made.step, **made.options).lower(*made.args()).compile()
        except Exception as error:
            return f"jax.jit raises {type(error).__name__}", 0.0
        total, temp = bytes_of(compiled)
        expected = compiled(*made.args())
        budget = total - int((1 - s.share) * temp)
        said = ""
        for _ in range(2):
            planned = jaxtensile.jit(made.step, budget=budget, chunk=s.chunk, **made.options)
            try:
                report = planned.plan(*made.args())
            except jaxtensile.BudgetError as error:
                if said:
                    return f"{said} and refused again: {error}", float("inf")
                if error.needs >= total:
                    return f"refused: needs {error.needs} of {total}", 0.0
                said = f"refused {budget}, needs {error.needs} of {total}; "
                budget = error.needs
                continue
            args = made.args()
            got = planned(*args)
            far = apart(expected, got)
            if s.donate != all(x.is_deleted() for x in jax.tree.leaves(args[:2])):
                return f"{said}donation differs", float("inf")
            if report.compiled.device > budget:
                return f"{said}{report.compiled.device} bytes for {budget}", float("inf")
            notes = " ".join(report.notes)
            ratio = (report.flops + report.recompute_flops) / max(report.flops, 1)
            return f"{said}{report.compiled.device}/{total}, rounds {report.rounds}, flops {ratio:.3f} {notes}", far
    raise AssertionError("two tries")


def main(seeds):
    """A line for each seed; whether all results were right."""
    right = True
    for seed in seeds:
        s, started = Step.of(seed), time.perf_counter()
        try:
            text, far = outcome(s)
        except Exception:
            text, far = traceback.format_exc(limit=-8)[:3000], float("inf")
        right &= far < CLOSE
        mark = "right" if far < CLOSE else "WRONG"
        print(f"{mark} {seed} {far:.1e} {time.perf_counter() - started:.0f}s {s}\n    {text}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(not main(map(int, sys.argv[1:])))
