"""Training steps of a small decoder over the devices of a mesh, in the ways that people divide them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Spec = Callable[[str, tuple[int, ...]], P]
"""From a weight's name and shape to how it is divided."""
Constrain = Callable[[jax.Array, str], jax.Array]


@dataclass(frozen=True)
class Sizes:
    """``gated``: three matrices in the hidden layer, as in Llama; else two, as in GPT."""

    width: int = 256
    hidden: int = 1024
    heads: int = 4
    layers: int = 3
    vocab: int = 1024
    batch: int = 16
    length: int = 128
    gated: bool = False
    dtype: Any = jnp.float32


@dataclass(frozen=True)
class Program:
    """A step and its arguments; ``mesh``: in force while it is traced, None: none."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: {"donate_argnums": (0, 1)})
    mesh: Any = None

    def within(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


# ---- the model --------------------------------------------------------------------------------------


def shapes_of(c: Sizes) -> dict[str, tuple[int, ...]]:
    """Of one layer's weights."""
    per = c.width // c.heads
    shapes: dict[str, tuple[int, ...]] = {"scale_a": (c.width,), "scale_b": (c.width,)}
    shapes |= dict.fromkeys(("query", "key", "value"), (c.width, c.heads, per))
    shapes |= {"out": (c.heads, per, c.width), "up": (c.width, c.hidden), "down": (c.hidden, c.width)}
    return shapes | ({"gate": (c.width, c.hidden)} if c.gated else {})


def weights_of(c: Sizes, place: Callable[[str, tuple[int, ...]], Any], stacked: bool = False) -> dict[str, Any]:
    """All weights; ``place``: a leaf by its name and shape."""
    shapes = shapes_of(c)
    if stacked:
        layers: Any = {name: place(f"stacked {name}", (c.layers, *shape)) for name, shape in shapes.items()}
    else:
        layers = [{name: place(name, shape) for name, shape in shapes.items()} for _ in range(c.layers)]
    return {"embed": place("embed", (c.vocab, c.width)), "layers": layers, "head": place("head", (c.width, c.vocab))}


def normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), v)


def layer(x: jax.Array, w: Mapping[str, jax.Array], constrain: Constrain, attend: Any = attention) -> jax.Array:
    y = normal(x, w["scale_a"])
    q, k, v = (constrain(jnp.einsum("bsw,whd->bshd", y, w[n]), "heads") for n in ("query", "key", "value"))
    x = constrain(x + jnp.einsum("bshd,hdw->bsw", attend(q, k, v), w["out"]), "stream")
    y = normal(x, w["scale_b"])
    up = constrain(y @ w["up"], "hidden")
    up = jax.nn.silu(constrain(y @ w["gate"], "hidden")) * up if "gate" in w else jax.nn.gelu(up)
    return constrain(x + up @ w["down"], "stream")


def free(x: jax.Array, _: str) -> jax.Array:
    return x


def loss_of(
    weights: Mapping[str, Any],
    tokens: jax.Array,
    *,
    constrain: Constrain = free,
    policy: Any = None,
    layer: Callable[..., jax.Array] = layer,
    embed: Callable[..., jax.Array] = lambda e, t: e[t],
) -> jax.Array:
    """``policy``: of a ``jax.checkpoint`` around each layer, None: none."""
    x = constrain(embed(weights["embed"], tokens), "stream")
    each = functools.partial(layer, constrain=constrain)
    if policy is not None:
        each = jax.checkpoint(each, policy=policy)
    if isinstance(weights["layers"], dict):
        x, _ = lax.scan(lambda x, w: (each(x, w), None), x, weights["layers"])
    else:
        for w in weights["layers"]:
            x = each(x, w)
    logits = constrain(x @ weights["head"], "logits").astype(jnp.float32)
    wanted = jax.nn.one_hot(jnp.roll(tokens, -1, 1), logits.shape[-1])
    return (jax.nn.logsumexp(logits, -1) - (logits * wanted).sum(-1)).mean()


def stepped(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradient descent with momentum."""

    def step(weights: Any, momentum: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
        value, slopes = jax.value_and_grad(loss)(weights, tokens)
        momentum = jax.tree.map(lambda m, d: (0.9 * m + d).astype(m.dtype), momentum, slopes)
        return jax.tree.map(lambda w, m: (w - 0.1 * m).astype(w.dtype), weights, momentum), momentum, value

    return step


# ---- how it is divided ------------------------------------------------------------------------------


def mesh_of(devices: Sequence[Any], shape: tuple[int, ...], names: tuple[str, ...], kind: Any = AxisType.Auto) -> Mesh:
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), names, axis_types=(kind,) * len(names))


def whole(_: str, __: tuple[int, ...]) -> P:
    return P()


def first_that_divides(axis: str, count: int) -> Spec:
    """FSDP: along the first dimension of a weight that the axis divides; never along the layers of a stack."""

    def spec(name: str, shape: tuple[int, ...]) -> P:
        start = int(name.startswith("stacked "))
        at = next((i for i in range(start, len(shape)) if shape[i] % count == 0), None)
        return P() if at is None else P(*(None,) * at, axis)

    return spec


def by_heads(axis: str, other: str | None = None) -> Spec:
    """Tensor parallel: heads and the hidden layer over ``axis``; over ``other`` the dimension that is summed over."""
    known = {
        **dict.fromkeys(("query", "key", "value"), P(other, axis)),
        "out": P(axis, None, other),
        **dict.fromkeys(("up", "gate"), P(other, axis)),
        "down": P(axis, other),
        "embed": P(None, other),
        "head": P(other, axis),
    }

    def spec(name: str, _: tuple[int, ...]) -> P:
        found = known.get(name.removeprefix("stacked "), P())
        return P(None, *found) if name.startswith("stacked ") else found

    return spec


def arguments(c: Sizes, mesh: Mesh, spec: Spec, batch: P, stacked: bool = False) -> tuple[Any, ...]:
    def place(name: str, shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, c.dtype, sharding=NamedSharding(mesh, spec(name, shape)))

    tokens = jax.ShapeDtypeStruct((c.batch, c.length), jnp.int32, sharding=NamedSharding(mesh, batch))
    weights = weights_of(c, place, stacked)
    return weights, weights, tokens


def constrained(mesh: Mesh, kinds: Mapping[str, P]) -> Constrain:
    return lambda x, kind: lax.with_sharding_constraint(x, NamedSharding(mesh, kinds[kind]))


SAVE_NOTHING = jax.checkpoint_policies.nothing_saveable
SAVE_PRODUCTS = jax.checkpoint_policies.dots_saveable
ALONG_BATCH = dict.fromkeys(("stream", "heads", "hidden", "logits"), P("batch"))
BOTH = {
    "stream": P("batch"),
    "heads": P("batch", None, "model"),
    "hidden": P("batch", None, "model"),
    "logits": P("batch", None, "model"),
}
WHOLE = dict.fromkeys(ALONG_BATCH, P())


def by_hand(loss: Callable[..., Any], mesh: Mesh, spec: Spec, c: Sizes) -> Callable[..., Any]:
    """A loss of shards in a ``shard_map``, differentiated from outside."""

    def outer(weights: Any, tokens: jax.Array) -> jax.Array:
        specs = weights_of(c, spec)
        return jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("batch")), out_specs=P())(weights, tokens)

    return outer


def mapped_steps(found: dict[str, Callable[[], Program]], line: Mesh, c: Sizes) -> None:
    """The whole step of data parallelism in one ``shard_map``, gradients and update included; layers in a list, and in
    a scan."""

    def step_of(policy: Any, stacked: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def step(weights: Any, momentum: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
            def loss(w: Any, t: jax.Array) -> jax.Array:
                return lax.pmean(loss_of(w, t, policy=policy), "batch")

            return stepped(loss)(weights, momentum, tokens)

        specs = weights_of(c, whole, stacked)
        mapped = jax.shard_map(step, mesh=line, in_specs=(specs, specs, P("batch")), out_specs=(specs, specs, P()))
        return mapped, arguments(c, line, whole, P("batch"), stacked)

    for stacked, name in ((False, "DP, step in shard_map"), (True, "DP, scan, step in shard_map")):
        for policy, said in ((None, ""), (SAVE_PRODUCTS, ", dots"), (SAVE_NOTHING, ", nothing")):

            def program(name: str = name + said, policy: Any = policy, stacked: bool = stacked) -> Program:
                step, args = step_of(policy, stacked)
                return Program(name, step, args)

            found[name + said] = program


def programs(devices: Sequence[Any], c: Sizes = Sizes()) -> dict[str, Callable[[], Program]]:
    """Every program by its name, made on demand; ``devices``: eight."""
    n = len(devices)
    line = mesh_of(devices, (n,), ("batch",))
    grid = mesh_of(devices, (2, n // 2), ("batch", "model"))
    fsdp = first_that_divides("batch", n)
    found: dict[str, Callable[[], Program]] = {}

    def add(name: str, make: Callable[[], tuple[Any, ...]], mesh: Any = None, **options: Any) -> None:
        def program() -> Program:
            loss, args = make()
            return Program(name, stepped(loss), args, {"donate_argnums": (0, 1), **options}, mesh)

        found[name] = program

    def plainly(name: str, mesh: Mesh, spec: Spec, kinds: Mapping[str, P] | None = None, stacked: bool = False) -> None:
        constrain = free if kinds is None else constrained(mesh, kinds)
        batch = P() if kinds is WHOLE else P("batch")
        for policy, said in ((None, ""), (SAVE_PRODUCTS, ", dots"), (SAVE_NOTHING, ", nothing")):
            loss = functools.partial(loss_of, constrain=constrain, policy=policy)
            add(f"{name}{said}", lambda loss=loss: (loss, arguments(c, mesh, spec, batch, stacked)))

    plainly("DP", line, whole)
    plainly("FSDP", line, fsdp)
    plainly("FSDP, constrained", line, fsdp, ALONG_BATCH)
    plainly("FSDP, scan", line, fsdp, ALONG_BATCH, stacked=True)
    plainly("FSDP, scan, free", line, fsdp, stacked=True)
    plainly("TP", grid, by_heads("model"), BOTH)
    plainly("TP, scan", grid, by_heads("model"), BOTH, stacked=True)
    plainly("FSDP+TP", grid, by_heads("model", "batch"), BOTH)
    plainly("whole batch", line, fsdp, WHOLE)

    def with_policies(name: str, make: Callable[[Any], tuple[Any, ...]], mesh: Any = None) -> None:
        for policy, said in ((None, ""), (SAVE_PRODUCTS, ", dots"), (SAVE_NOTHING, ", nothing")):
            add(f"{name}{said}", functools.partial(make, policy), mesh)

    def in_force(policy: Any) -> tuple[Any, ...]:
        loss = functools.partial(
            loss_of,
            constrain=lambda x, kind: lax.with_sharding_constraint(x, ALONG_BATCH[kind]),
            policy=policy,
        )
        return loss, arguments(c, line, fsdp, P("batch"))

    with_policies("FSDP, set_mesh", in_force, line)

    typed = mesh_of(devices, (n,), ("batch",), AxisType.Explicit)

    def explicit(policy: Any) -> tuple[Any, ...]:
        def gathered(w: Any) -> Any:
            return jax.tree.map(lambda x: jax.sharding.reshard(x, P()), w)

        loss = functools.partial(
            loss_of,
            policy=policy,
            layer=lambda x, w, constrain: layer(x, gathered(w), constrain),
            embed=lambda e, t: gathered(e).at[t].get(out_sharding=P("batch")),
        )
        return (lambda w, t: loss({**w, "head": gathered(w["head"])}, t)), arguments(c, typed, fsdp, P("batch"))

    with_policies("FSDP, explicit", explicit, typed)

    def mapped_dp(policy: Any) -> tuple[Any, ...]:
        loss = by_hand(lambda w, t: lax.pmean(loss_of(w, t, policy=policy), "batch"), line, whole, c)
        return loss, arguments(c, line, whole, P("batch"))

    with_policies("DP, shard_map", mapped_dp)

    def mapped_fsdp(policy: Any) -> tuple[Any, ...]:
        specs = weights_of(c, fsdp)

        def gather(x: jax.Array, spec: P) -> jax.Array:
            at = [i for i, axis in enumerate(spec) if axis]
            return lax.all_gather(x, "batch", axis=at[0], tiled=True) if at else x

        def one(x: jax.Array, w: Any, constrain: Constrain) -> jax.Array:
            return layer(x, jax.tree.map(gather, w, specs["layers"][0]), constrain)

        def loss(w: Any, t: jax.Array) -> jax.Array:
            w = {**w, "head": gather(w["head"], specs["head"])}
            found = loss_of(w, t, layer=one, embed=lambda e, t: gather(e, specs["embed"])[t], policy=policy)
            return lax.pmean(found, "batch")

        return by_hand(loss, line, fsdp, c), arguments(c, line, fsdp, P("batch"))

    with_policies("FSDP, shard_map", mapped_fsdp)

    def mixed(policy: Any) -> tuple[Any, ...]:
        local = jax.shard_map(attention, mesh=line, in_specs=(P("batch"),) * 3, out_specs=P("batch"))
        loss = functools.partial(loss_of, layer=functools.partial(layer, attend=local), policy=policy)
        return loss, arguments(c, line, fsdp, P("batch"))

    with_policies("FSDP, attention in shard_map", mixed)
    mapped_steps(found, line, c)
    return found


__all__ = ["Program", "Sizes", "programs"]
