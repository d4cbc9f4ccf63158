"""Random small JAX programs whose control flow is nested: a train step over (rows, width) activations.

A program is data: a tree of ``Node``s, names with numbers and blocks of nodes inside, so that a failing one
prints as what it is and shrinks node by node. Every rule maps an activation to one of the same shape and
type; those of ``CONTROL`` run their blocks in loops, branches, calls and transformations. Nothing turns a rounding
difference into a large one: branches, indices and trip counts come from integers and keys, and activations stay
within a few units.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ROWS, WIDTH = 32, 8
LENGTHS = (3, 1, 5, 2, 0, 7)


@dataclass(frozen=True)
class Node:
    """``name`` of a rule below, ``pick``: a number it may use to choose among things, ``blocks`` of nodes inside."""

    name: str
    pick: int
    blocks: tuple[tuple["Node", ...], ...] = ()

    @property
    def depth(self) -> int:
        """How deep control flow is nested."""
        return (self.name in CONTROL) + max((n.depth for b in self.blocks for n in b), default=0)

    @property
    def names(self) -> set[str]:
        """The rules used here and inside."""
        return {self.name}.union(*(n.names for b in self.blocks for n in b))


class Env(NamedTuple):
    """What a rule may read beside its activation: weights, an activation of before, a key, an integer."""

    w: Any
    old: Any
    key: Any
    i: Any

    def inner(self, **changes: Any) -> "Env":
        return self._replace(**changes)


def run(block, x, env):
    """The nodes of a block one after the other."""
    for k, node in enumerate(block):
        y = RULES[node.name](x, env, node).astype(x.dtype)
        x, env = y, env.inner(old=x, i=env.i + k)
    return x


def product(x, w):
    return jnp.tanh(x @ w.astype(x.dtype))


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 0.1)


@jax.custom_vjp
def gated(x):
    return x * jax.nn.sigmoid(x)


gated.defvjp(lambda x: (gated(x), (x, jax.nn.sigmoid(x))), lambda r, g: (g * (r[1] + r[0] * r[1] * (1 - r[1])),))


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(x))


smooth.defjvp(lambda p, t: (smooth(*p), t[0] * jax.nn.sigmoid(p[0])))


def window(x, env, node):
    """Half of the rows, from one that is known at run time, exchanged."""
    half = max(x.shape[0] // 2, 1)
    start = (env.i * 3 + node.pick) % (x.shape[0] - half + 1)
    part = lax.dynamic_slice(x, (start, 0), (half, x.shape[1]))
    return lax.dynamic_update_slice(x, jnp.sin(part) * 0.9, (start, 0))


def mask(x, env, node):
    """Integers and booleans among the residuals."""
    which = (lax.broadcasted_iota(jnp.int32, x.shape, 0) + env.i) % (2 + node.pick % 3) == 0
    return jnp.where(which, jnp.sin(x) * x, x * jnp.asarray(0.8, x.dtype))


LEAVES = {
    "dense": lambda x, env, node: product(x, env.w),
    "dense_sin": lambda x, env, node: jnp.sin(x @ env.w.astype(x.dtype)) * x,
    "tanh": lambda x, env, node: jnp.tanh(x) * jnp.exp(-x * x),
    "gelu": lambda x, env, node: jax.nn.gelu(product(x, env.w)),
    "times": lambda x, env, node: x * jnp.tanh(env.old),
    "skip": lambda x, env, node: jnp.tanh(x + env.old),
    "softmax": lambda x, env, node: jax.nn.softmax(x) * x,
    "layer_norm": lambda x, env, node: layer_norm(x) * 0.7,
    "attend": lambda x, env, node: jax.nn.softmax(x @ x.T / 8) @ product(x, env.w),
    "mean": lambda x, env, node: x - jnp.tanh(x).mean(0),
    "custom_vjp": lambda x, env, node: gated(x),
    "custom_jvp": lambda x, env, node: smooth(x) - 1,
    "named": lambda x, env, node: checkpoint_name(product(x, env.w), "mid") * x,
    "window": window,
    "mask": mask,
    "pick_row": lambda x, env, node: x.at[(env.i + node.pick) % x.shape[0]].add(jnp.sin(x[0])) * 0.9,
    "dropout": lambda x, env, node: jnp.where(jax.random.bernoulli(env.key, 0.8, x.shape), x, 0),
    "noise": lambda x, env, node: x + 0.1 * jax.random.normal(jax.random.fold_in(env.key, env.i), x.shape, x.dtype),
    "bfloat16": lambda x, env, node: jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype) + x * 0.5,
    "complex": lambda x, env, node: (jnp.exp(1j * x.astype(jnp.float32)) * x.astype(jnp.float32)).real,
    "cumsum": lambda x, env, node: jnp.tanh(jnp.cumsum(x, axis=1)),
    "empty": lambda x, env, node: jnp.concatenate([jnp.sin(x), x[:0]]) + x[:0].sum(),
    "weak": lambda x, env, node: 0.5 * x + jnp.where(env.i % 2 == 0, 0.25, 0.75),
}

DENSE = ("dense", "dense_sin", "gelu", "named")
"""What leaves residuals worth planning."""

# ---- control flow ----


def scan(x, env, node):
    """Inputs, outputs and a carry of several kinds, some of them nothing; forwards and backwards."""
    n, more = LENGTHS[node.pick % 6], node.pick // 6
    rows = {"w": env.w[:n] if more & 1 else None, "i": jnp.arange(n) if more & 2 else None}

    def body(carry, row):
        y, count, _ = carry
        i = count if row["i"] is None else row["i"]
        z = y if row["w"] is None else y + 0.1 * row["w"].astype(y.dtype)
        y = run(node.blocks[0], z, env.inner(i=i, old=y))
        return (y, count + 1, ()), {"mean": None if more & 1 else y.mean(0), "count": count, "nothing": None}

    unroll = (1, 2, 1, max(n, 1))[node.pick % 4]
    (y, count, _), ys = lax.scan(body, (x, 0, ()), rows, length=n, reverse=bool(node.pick & 1), unroll=unroll)
    y = y + 0.01 * count if ys["mean"] is None else y + 0.1 * ys["mean"].sum(0)
    return y + 0.01 * ys["count"].sum() if more & 2 else y


def scan_keys(x, env, node):
    """The key moves on in the carry; activations are stacked."""
    n = LENGTHS[node.pick % 4]

    def body(carry, _):
        key, now = jax.random.split(carry["key"])
        y = run(node.blocks[0], carry["y"], env.inner(key=now, old=x))
        return {"key": key, "y": y}, jnp.sin(y)

    out, ys = lax.scan(body, {"key": env.key, "y": x}, None, length=n, reverse=bool(node.pick & 8))
    return out["y"] * 0.5 + ys.sum(0)


def scan_rows(x, env, node):
    """Groups of rows go in and come out; the carry is small."""
    g = parts_of(x, node)

    def body(carry, y):
        y = run(node.blocks[0], y + carry, env.inner(old=y))
        return 0.3 * y[-1], y

    return lax.scan(body, jnp.zeros_like(x[0]), grouped(x, g), reverse=bool(node.pick & 2))[1].reshape(x.shape)


def fori(x, env, node):
    """Bounds that are known: a scan. The index is the integer."""
    return lax.fori_loop(
        node.pick % 2, 2 + node.pick % 4, lambda i, y: run(node.blocks[0], y, env.inner(i=i, old=x)), x
    )


def bounded(x, env, node):
    """A loop that would end early, as a scan of branches: differentiable."""
    until = 1 + (env.i + node.pick) % 4

    def body(carry, i):
        def more(y):
            return run(node.blocks[0], y, env.inner(i=i, old=x))

        return lax.cond(i < until, more, lambda y: y, carry), None

    return lax.scan(body, x, jnp.arange(4))[0]


def while_loop(x, env, node):
    """Trips that only the device knows; no gradient passes."""
    start = lax.stop_gradient((x, env.w, env.old))

    def body(carry):
        count, y = carry
        return count + 1, run(node.blocks[0], y, env.inner(i=count, w=start[1], old=start[2]))

    count, y = lax.while_loop(lambda c: c[0] < 1 + (env.i + node.pick) % 4, body, (0, start[0]))
    return x + 0.1 * y + 0.01 * count


def dynamic_fori(x, env, node):
    """Descent within a loop of trips that only the device knows: gradients inside, none passes."""
    w, old = lax.stop_gradient((env.w, env.old))
    inner = env.inner(w=w, old=old)

    def body(i, y):
        return y - 0.1 * jax.grad(lambda z: energy(run(node.blocks[0], z, inner.inner(i=i))))(y)

    return x + 0.1 * lax.fori_loop(0, 1 + (env.i + node.pick) % 3, body, lax.stop_gradient(x))


def energy(y):
    return (y.astype(jnp.float32) ** 2).mean()


def descent(x, env, node):
    """A gradient step inside the program: differentiated twice."""
    return x - 0.5 * jax.grad(lambda y: energy(run(node.blocks[0], y, env)))(x)


def cond(x, env, node):
    by_key = node.pick % 3 == 0
    which = jax.random.bernoulli(env.key) if by_key else (env.i + node.pick) % 2 == 0
    return lax.cond(which, *(partial(run, block) for block in node.blocks[:2]), x, env)


def switch(x, env, node):
    branches = [*(partial(run, block) for block in node.blocks), lambda y, inner: jnp.sin(y)]
    return lax.switch((env.i + node.pick) % 4, branches, x, env)


def grouped(x, parts):
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def parts_of(x, node):
    return next(g for g in ((4, 2, 1) if node.pick % 2 else (2, 1)) if x.shape[0] % g == 0)


def mapped(x, env, node):
    """lax.map over groups of rows, one by one or in batches."""
    g = parts_of(x, node)
    size = (None, None, 2, 3)[node.pick % 4]

    def one(given):
        y, old, i = given
        return run(node.blocks[0], y, env.inner(old=old, i=i))

    return lax.map(one, (grouped(x, g), grouped(env.old, g), jnp.arange(g)), batch_size=size).reshape(x.shape)


def vmapped(x, env, node):
    """Branches become selections, trips of loops differ, keys are split."""
    g = parts_of(x, node)
    keys = jax.random.split(env.key, g) if node.pick % 3 == 0 else None

    def one(y, old, i, key):
        return run(node.blocks[0], y, env.inner(old=old, i=i, key=env.key if key is None else key))

    in_axes = (0, 0, 0, None if keys is None else 0)
    return jax.vmap(one, in_axes)(grouped(x, g), grouped(env.old, g), jnp.arange(g), keys).reshape(x.shape)


def associative(x, env, node):
    """A linear recurrence over groups of rows."""
    y = run(node.blocks[0], x, env)
    g = parts_of(x, node)

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    start = grouped(jax.nn.sigmoid(y), g), grouped(x * 0.5, g)
    return lax.associative_scan(combine, start, reverse=bool(node.pick & 1))[1].reshape(x.shape)


def called(x, env, node):
    """jax.jit inside, with a keyword."""
    return jax.jit(lambda y, *, inner: run(node.blocks[0], y, inner), inline=bool(node.pick & 1))(x, inner=env)


POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("mid"),
    jax.checkpoint_policies.everything_saveable,
)


def checkpoint(x, env, node):
    """The user's own recomputation."""
    inside = jax.checkpoint(
        lambda y, w: run(node.blocks[0], y, env.inner(w=w)),
        policy=POLICIES[node.pick % 6],
        prevent_cse=node.pick % 4 != 3,
    )
    return inside(x, env.w)


def own_vjp(x, env, node):
    """A custom rule around control flow; its residuals are whatever the rule inside keeps."""
    inside = partial(run, node.blocks[0])

    def forward(y, inner):
        z, pull = jax.vjp(lambda y, w, old: inside(y, inner.inner(w=w, old=old)), y, inner.w, inner.old)
        return z, (pull, inner.i)

    def backward(kept, g):
        pull, i = kept
        dy, dw, dold = pull(g)
        return dy * 0.9, Env(dw, dold, None, np.zeros(jnp.shape(i), jax.dtypes.float0))

    f = jax.custom_vjp(inside)
    f.defvjp(forward, backward)
    return f(x, env)


def own_jvp(x, env, node):
    """A custom rule for derivatives forwards, around control flow."""
    inside = partial(run, node.blocks[0])
    f = jax.custom_jvp(inside)

    @f.defjvp
    def _(primals, tangents):
        y, inner = primals
        return jax.jvp(lambda y, w: inside(y, inner.inner(w=w)), (y, inner.w), (tangents[0] * 0.9, tangents[1].w))

    return f(x, env)


def residual(x, env, node):
    return 0.5 * x + run(node.blocks[0], x, env)


CONTROL = {
    "scan": scan,
    "scan_keys": scan_keys,
    "scan_rows": scan_rows,
    "fori": fori,
    "bounded": bounded,
    "while": while_loop,
    "dynamic_fori": dynamic_fori,
    "descent": descent,
    "cond": cond,
    "switch": switch,
    "map": mapped,
    "vmap": vmapped,
    "associative": associative,
    "jit": called,
    "checkpoint": checkpoint,
    "own_vjp": own_vjp,
    "own_jvp": own_jvp,
    "residual": residual,
}
RULES = LEAVES | CONTROL
BLOCKS = {"cond": 2, "switch": 3}
"""Blocks of the rules that have several."""
RANDOM = {"dropout", "noise", "scan_keys"}
KINDS = ("update", "update", "product", "groups", "steps", "integers")


@dataclass(frozen=True)
class Program:
    """``block`` with a weight for each of its nodes; ``dtype`` of the activations; ``kind`` of derivative.

    ``raw``: keys are integers, as before JAX had types for them; ``donate``: the state is donated.
    """

    block: tuple[Node, ...]
    dtype: str = "float32"
    kind: str = "update"
    raw: bool = False
    donate: bool = False
    rows: int = ROWS

    @property
    def depth(self) -> int:
        return max(node.depth for node in self.block)

    @property
    def names(self) -> set[str]:
        return set().union(*(node.names for node in self.block))

    @property
    def coarse(self) -> str:
        """The coarsest type in it."""
        return "bfloat16" if "bfloat16" in self.names else self.dtype

    def loss(self, weights, x, key):
        x = old = x.astype(self.dtype)
        for k, (node, w) in enumerate(zip(self.block, weights, strict=True)):
            x, old = run((node,), x, Env(w, old, key, k)), x
        return energy(x), {"last": x[0], "most": abs(x).max(), "nothing": None}

    def step(self, state, x):
        """One step, or a few; the key moves on, and the count is weakly typed."""
        return getattr(self, f"_{self.kind}")(state, x)

    def _update(self, state, x):
        (loss, aux), grads = jax.value_and_grad(self.loss, has_aux=True)(state["weights"], x, state["key"])
        return self._moved(state, grads), loss, aux

    def _moved(self, state, grads):
        weights = [w - 0.1 * g for w, g in zip(state["weights"], grads, strict=True)]
        key = jax.random.split(state["key"])[0] if self.names & RANDOM else state["key"]
        return {**state, "weights": weights, "key": key, "count": state["count"] + 1}

    def _product(self, state, x):
        """A Hessian's product with the weights."""
        grad = jax.grad(lambda weights: self.loss(weights, x, state["key"])[0])
        grads, product = jax.jvp(grad, (state["weights"],), (state["weights"],))
        return self._moved(state, grads), product

    def _groups(self, state, x):
        """A gradient for each group of rows."""
        grad = jax.grad(lambda weights, y: self.loss(weights, y, state["key"])[0])
        grads = jax.vmap(grad, (None, 0))(state["weights"], grouped(x, 2))
        return self._moved(state, jax.tree.map(lambda g: g.mean(0), grads)), grads

    def _steps(self, state, x):
        """Steps of training in a loop."""

        def body(state, y):
            state, loss, aux = self._update(state, y)
            return state, (loss, aux["most"])

        return lax.scan(body, {**state, "count": jnp.asarray(0)}, grouped(x, 2))

    def _integers(self, state, x):
        """Gradients with respect to all of the state and of the input: those of integers have no bytes."""

        def loss(state, x):
            return self.loss(state["weights"], x * (1 + state["count"]), state["key"])[0]

        grads, slope = jax.grad(loss, argnums=(0, 1), allow_int=True)({**state, "key": state["key"]}, x)
        return self._moved(state, grads["weights"]), grads["count"], slope

    def args(self):
        """Fresh arguments of ``step``."""
        key = jax.random.PRNGKey(7) if self.raw else jax.random.key(7)
        rng = np.random.default_rng(len(self.block))
        weights = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 3, jnp.float32) for _ in self.block]
        x = jnp.asarray(rng.normal(size=(self.rows, WIDTH)), jnp.float32)
        return {"weights": weights, "key": key, "count": 0, "nothing": None, "empty": ()}, x


def nodes(depth, *, controls=tuple(CONTROL), leaves=tuple(LEAVES)):
    """Nodes whose control flow is nested ``depth`` deep; what else there is in their blocks is less deep."""
    leaf = st.builds(Node, st.sampled_from(leaves), st.integers(0, 23))
    if not depth:
        return leaf

    inside = dense() if depth == 1 else nodes(depth - 1, controls=controls, leaves=leaves)

    @st.composite
    def node(draw):
        name = draw(st.sampled_from(controls))
        # A leaf beside what is inside, always in the innermost block.
        first = (*draw(st.lists(leaf, min_size=1, max_size=1) if depth == 1 else seldom(leaf)), draw(inside))
        first = first[:: draw(st.sampled_from((1, -1)))]
        others = [(draw(leaf),) for _ in range(BLOCKS.get(name, 1) - 1)]
        where = draw(st.integers(0, len(others)))
        return Node(name, draw(st.integers(0, 23)), (*others[:where], first, *others[where:]))

    return node()


def dense():
    """Leaves that leave something to plan."""
    return st.builds(Node, st.sampled_from(DENSE), st.integers(0, 23))


def seldom(leaf):
    """One in three times a leaf."""
    return st.one_of(st.just([]), st.just([]), st.lists(leaf, min_size=1, max_size=1))


def is_jax(program):
    """Whether ``jax.jit`` can do it: a rule for backwards alone has no derivative forwards in a loop, and
    checkpoints with a policy keep no complex numbers."""
    forwards = program.kind == "product" or "own_jvp" in program.names
    backwards = program.names & {"custom_vjp", "own_vjp"}
    return not (forwards and backwards) and not {"complex", "checkpoint"} <= program.names


@st.composite
def _programs(draw, depth=3, *, kinds=KINDS, dtypes=("float32",), rows=ROWS, **rules):
    leaf = nodes(0, **rules)
    block = (draw(leaf), draw(dense()), draw(nodes(depth, **rules)), *draw(seldom(leaf)))
    kind, dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(dtypes))
    return Program(block, dtype, kind, draw(st.booleans()), draw(st.booleans()), rows)


def programs(depth=3, **choices):
    """Programs with control flow nested ``depth`` deep in one place at least."""
    return _programs(depth, **choices).filter(is_jax)
