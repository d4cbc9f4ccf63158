"""Small programs that compile in seconds, so that estimates can be checked on every target: ``programs()``.

Ordinary train steps of a few layers, single operations and their derivatives, and the suite's workloads at small sizes.
All arguments are abstract. Programs of one ``family`` are variations of each other and lie in one half; families
alternate in the order in which they are written here, which was fixed before any was estimated.
"""

# ruff: noqa: E731, E741
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

CALIBRATION: Final = "calibration"
REPORT: Final = "report"
EXAMINED: Final = frozenset(
    (
        "shifts",
        "mlp with biases",
        "conv",
        "conv net",
        "attention",
        "transformer",
        "complex",
        "products",
        "svd",
        "solve",
        "fft",
        "cholesky",
        "qr",
        "ragged_dot",
    )
)
"""Families whose compiled programs have been looked into, for rules that hold for all: they calibrate, too."""
S = jax.ShapeDtypeStruct
F32, BF16, F16, C64, I32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32


@dataclass(frozen=True)
class Program:
    """A function and its arguments; ``options``: of ``jax.jit``."""

    name: str
    family: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@cache
def programs() -> dict[str, Program]:
    """All by their names."""
    made = (_perceptrons, _loops, _convolutions, _attention, _losses, _norms, _tables, _recurrent, _derivatives)
    single = (_products, _complex, _decompositions, _transforms, _orders, _elementwise, _reductions, _random, _shifts)
    return {p.name: p for make in (*made, *single, _suite) for p in make()}


def halves() -> dict[str, str]:
    """Which half each family is in."""
    families = dict.fromkeys(p.family for p in programs().values())
    return {f: CALIBRATION if f in EXAMINED else (CALIBRATION, REPORT)[i % 2] for i, f in enumerate(families)}


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def train_step(weights: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, grads), value

    return train_step


def adam(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of Adam, whose moments are in f32."""

    def train_step(state: Any, *batch: Any) -> Any:
        weights, mean, square = state
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(F32), mean, grads)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * jnp.square(g.astype(F32)), square, grads)
        new = jax.tree.map(lambda w, m, s: w - (1e-3 * m / (jnp.sqrt(s) + 1e-8)).astype(w.dtype), weights, mean, square)
        return (new, mean, square), value

    return train_step


def _step(name: str, family: str, loss: Callable[..., Any], weights: Any, *batch: Any, by: Any = sgd) -> Program:
    if by is adam:
        moments = jax.tree.map(lambda w: S(w.shape, F32), weights)
        weights = weights, moments, moments
    return Program(name, family, by(loss), (weights, *batch), {"donate_argnums": 0})


def _perceptrons() -> Iterator[Program]:
    def residual(act: Callable[..., Any]) -> Callable[..., Any]:
        def loss(ws: Any, x: Any) -> Any:
            for w in ws:
                x = x + act(x @ w)
            return jnp.mean(x**2)

        return loss

    def plain(act: Callable[..., Any], compute: Any = None) -> Callable[..., Any]:
        def loss(ws: Any, x: Any) -> Any:
            for w, b in ws:
                x = act(x.astype(compute or x.dtype) @ w.astype(compute or w.dtype) + b.astype(compute or b.dtype))
            return jnp.mean(x.astype(F32) ** 2)

        return loss

    def square(n: int, width: int, dtype: Any) -> list[Any]:
        return [S((width, width), dtype)] * n

    def biased(n: int, width: int, dtype: Any) -> list[Any]:
        return [(S((width, width), dtype), S((width,), dtype))] * n

    gelu = residual(jax.nn.gelu)
    yield _step("mlp, 4 x 512, batch 1024", "mlp", gelu, square(4, 512, F32), S((1024, 512), F32))
    yield _step("mlp, 8 x 1024, batch 8192", "mlp", gelu, square(8, 1024, F32), S((8192, 1024), F32))
    yield _step("mlp, bf16", "mlp", gelu, square(8, 1024, BF16), S((8192, 1024), BF16))
    yield _step("mlp, f16", "mlp", gelu, square(4, 1024, F16), S((4096, 1024), F16))
    yield Program("mlp, forward", "mlp", gelu, (square(8, 1024, F32), S((8192, 1024), F32)))
    yield Program("mlp, forward, bf16", "mlp", gelu, (square(8, 1024, BF16), S((8192, 1024), BF16)))
    relu, silu, tanh = plain(jax.nn.relu), plain(jax.nn.silu), plain(jnp.tanh)
    yield _step("relu mlp, Adam", "mlp with biases", relu, biased(6, 1024, F32), S((4096, 1024), F32), by=adam)
    yield _step("silu mlp, bf16", "mlp with biases", silu, biased(6, 1024, BF16), S((8192, 1024), BF16))
    yield _step("tanh mlp, small batch", "mlp with biases", tanh, biased(6, 1024, F32), S((64, 1024), F32), by=adam)
    mixed = plain(jax.nn.gelu, BF16)
    yield _step("gelu mlp, mixed", "mlp with biases", mixed, biased(6, 1024, F32), S((8192, 1024), F32), by=adam)
    yield Program("relu mlp, forward", "mlp with biases", relu, (biased(6, 1024, F32), S((8192, 1024), F32)))


def _loops() -> Iterator[Program]:
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def scan(body: Any) -> Callable[..., Any]:
        return lambda ws, x: jnp.mean(lax.scan(body, x, ws)[0] ** 2)

    def stack(dtype: Any) -> dict[str, Any]:
        return {"up": S((12, 256, 1024), dtype), "down": S((12, 1024, 256), dtype)}

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        x = S((8, 256, 256), dtype)
        yield _step(f"scan{mark}", "scan", scan(layer), stack(dtype), x)
        yield _step(f"scan, checkpoint{mark}", "scan", scan(jax.checkpoint(layer)), stack(dtype), x)
    yield Program("scan, forward", "scan", scan(layer), (stack(F32), S((8, 256, 256), F32)))
    damped = lambda x, _: (lax.fori_loop(0, 20, lambda i, x: x + 0.1 * jnp.roll(x, 1, 0) * jnp.sin(x), x), None)
    yield Program("loop in a loop", "while", lambda x: lax.scan(damped, x, None, 5)[0].sum(), (S((1024, 2048), F32),))
    until = lambda a, x: lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.tanh(a @ x), x)
    yield Program("while", "while", until, (S((2048, 2048), F32), S((2048, 1024), F32)))


def _convolutions() -> Iterator[Program]:
    def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def plain(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jax.nn.relu(conv(x, w))
        return jnp.mean(x.astype(F32) ** 2)

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        args = [S((3, 3, 64, 64), dtype)] * 6, S((16, 64, 64, 64), dtype)
        yield _step(f"conv{mark}", "conv", plain, *args)
        if dtype == F32:
            yield Program("conv, forward", "conv", plain, args)

    def normed(ws: Any, x: Any) -> Any:
        for k, (w, scale, bias) in enumerate(ws):
            x = conv(x, w, 1 + k % 2)
            x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale + bias
            x = jax.nn.relu(x)
        return jnp.mean(x.astype(F32) ** 2)

    def residual(ws: Any, x: Any) -> Any:
        for w, d in ws:
            x = x + conv(jax.nn.silu(conv(x, d, groups=64)), w)
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(pooled**2)

    weights = [(S((3, 3, 32 * 2**k, 64 * 2**k), F32), *[S((64 * 2**k,), F32)] * 2) for k in range(3)]
    yield _step("conv, batch norm", "conv net", normed, weights, S((32, 64, 64, 32), F32))
    weights = [(S((1, 1, 64, 64), F32), S((5, 5, 1, 64), F32))] * 3
    yield _step("conv, depthwise and pooled", "conv net", residual, weights, S((16, 64, 64, 64), F32))


def _attention() -> Iterator[Program]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
        keep = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        shares = jax.nn.softmax(jnp.where(keep, scores, -1e9).astype(F32)).astype(q.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v)

    def normal(x: Any, scale: Any) -> Any:
        wide = x.astype(F32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def block(x: Any, w: Any) -> Any:
        h = normal(x, w["n1"])
        heads = [(h @ w[k]).reshape(*x.shape[:2], -1, 64) for k in ("q", "k", "v")]
        x = x + attend(*heads).reshape(x.shape) @ w["o"]
        return x + jax.nn.gelu(normal(x, w["n2"]) @ w["up"]) @ w["down"]

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = block(x, w)
        return jnp.mean(x.astype(F32) ** 2)

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        d = 512
        one = {k: S((d, d), dtype) for k in "qkvo"} | {k: S((d,), dtype) for k in ("n1", "n2")}
        weights = [one | {"up": S((d, 4 * d), dtype), "down": S((4 * d, d), dtype)}] * 3
        yield _step(f"transformer blocks{mark}", "transformer", loss, weights, S((8, 512, d), dtype), by=adam)
        alone = [S((8, 512, 8, 64), dtype)] * 3
        yield Program(f"attention{mark}", "attention", attend, tuple(alone))
        grad = jax.grad(lambda *a: attend(*a).astype(F32).sum(), (0, 1, 2))
        yield Program(f"gradient of attention{mark}", "attention", grad, tuple(alone))


def _losses() -> Iterator[Program]:
    def entropy(w: Any, x: Any, label: Any) -> Any:
        logits = (x @ w).astype(F32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, label[:, None], 1)[:, 0])

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        args = S((512, 16384), dtype), S((4096, 512), dtype), S((4096,), I32)
        yield _step(f"cross entropy{mark}", "cross entropy", entropy, *args)

    def contrast(w: Any, a: Any, b: Any) -> Any:
        a, b = (x @ w / jnp.linalg.norm(x @ w, axis=-1, keepdims=True) for x in (a, b))
        scores = a @ b.T / 0.07
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)) + jnp.diag(jax.nn.log_softmax(scores, 0)))

    yield _step("contrastive loss", "contrastive", contrast, S((512, 256), F32), *[S((4096, 512), F32)] * 2)
    pairs = lambda x, y: jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)).sum()
    points = S((2048, 16), F32), S((2048, 16), F32)
    yield Program("kernel of pairs", "pairs", pairs, points)
    yield Program("gradient of a kernel of pairs", "pairs", jax.grad(pairs), points)


def _norms() -> Iterator[Program]:
    def layers(ws: Any, x: Any) -> Any:
        for scale, bias in ws:
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias
            x = x * jax.nn.sigmoid(x)
        return jnp.mean(x.astype(F32) ** 2)

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        weights = [(S((1024,), dtype), S((1024,), dtype))] * 2
        yield _step(f"layer norms{mark}", "norms", layers, weights, S((8192, 1024), dtype))


def _tables() -> Iterator[Program]:
    def loss(ws: Any, rows: Any) -> Any:
        h = jnp.take(ws["table"], rows, 0).mean(1)
        return jnp.mean((jax.nn.relu(h @ ws["w"]) @ ws["v"]) ** 2)

    weights = {"table": S((100_000, 128), F32), "w": S((128, 512), F32), "v": S((512, 1), F32)}
    yield _step("embedding", "table", loss, weights, S((4096, 16), I32))
    yield _step("embedding, Adam", "table", loss, weights, S((4096, 16), I32), by=adam)
    nodes = S((50_000, 64), F32), S((400_000, 2), I32)
    passed = lambda w, x, e: jnp.mean(jax.ops.segment_sum(jax.nn.relu(x @ w)[e[:, 0]], e[:, 1], 50_000) ** 2)
    yield _step("messages on a graph", "graph", passed, S((64, 64), F32), *nodes)


def _recurrent() -> Iterator[Program]:
    def loss(ws: Any, x: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ ws["x"] + h @ ws["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[1], ws["h"].shape[0]), x.dtype)
        return jnp.mean(lax.scan(cell, (zero, zero), x)[1].astype(F32) ** 2)

    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        weights = {"x": S((256, 2048), dtype), "h": S((512, 2048), dtype)}
        yield _step(f"lstm{mark}", "recurrent", loss, weights, S((64, 128, 256), dtype))
    linear = lambda a, x: lax.associative_scan(lambda l, r: (l[0] * r[0], l[1] * r[0] + r[1]), (a, x))[1]
    args = S((1024, 4096), F32), S((1024, 4096), F32)
    yield Program("linear recurrence", "associative scan", linear, args)
    summed = lambda a, x: jnp.sum(linear(a, x) ** 2)
    yield Program("gradient of a linear recurrence", "associative scan", jax.grad(summed, (0, 1)), args)


def _derivatives() -> Iterator[Program]:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    ws, x = [S((512, 512), F32)] * 4, S((8192, 512), F32)
    yield Program(
        "hessian by vector",
        "second order",
        lambda w, v, x: jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (v,))[1],
        (ws, ws, x),
    )
    yield Program("jvp", "second order", lambda w, v, x: jax.jvp(lambda w: loss(w, x), (w,), (v,)), (ws, ws, x))
    field_ = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"])
    laplace = lambda w, x: jnp.mean(jax.vmap(lambda p: jnp.trace(jax.hessian(lambda q: field_(w, q))(p)))(x) ** 2)
    weights = {"a": S((3, 256), F32), "b": S((256, 256), F32), "c": S((256, 1), F32)}
    yield _step("Laplacian of a network", "second order", laplace, weights, S((4096, 3), F32))
    each = jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w[0]) @ w[1])), (None, 0))
    yield Program(
        "gradients of each sample",
        "per sample",
        lambda w, x: jax.tree.map(lambda g: jnp.sum(g / (1 + jnp.linalg.norm(g)), 0), each(w, x)),
        (([S((256, 256), F32)] * 2), S((256, 256), F32)),
    )


def _products() -> Iterator[Program]:
    for groups in (8, 32):
        args = S((groups, 1024, 2048), BF16), S((8192, 1024), BF16), S((groups,), I32)
        yield Program(f"ragged_dot, {groups} groups", "ragged_dot", lambda w, x, s: lax.ragged_dot(x, w, s), args)
        loss = lambda w, x, s: jnp.sum(lax.ragged_dot(x, w, s).astype(F32) ** 2)
        yield Program(f"gradient of ragged_dot, {groups} groups", "ragged_dot", jax.grad(loss), args)
    for dtype, mark in ((F32, ""), (BF16, ", bf16")):
        batched = S((32, 512, 1024), dtype), S((32, 1024, 512), dtype)
        loss = lambda a, b: jnp.sum(jnp.tanh(a @ b).astype(F32) ** 2)
        yield Program(f"gradient of batched products{mark}", "products", jax.grad(loss, (0, 1)), batched)
    chain = lambda a, b, c: jnp.einsum("abc,bd,ce->ade", a, b, c)
    yield Program(
        "einsum of three", "products", chain, (S((64, 256, 512), F32), S((256, 256), F32), S((512, 512), F32))
    )
    gated = lambda w, x: jnp.mean(jnp.einsum("gnd,gdh->gnh", jax.nn.silu(jnp.einsum("gnd,gdh->gnh", x, w)), w) ** 2)
    yield _step("products by experts", "products", gated, S((16, 512, 512), F32), S((16, 2048, 512), F32))


def _complex() -> Iterator[Program]:
    for dtype, mark in ((F32, ""), (C64, ", c64")):
        args = S((128, 512), dtype), S((50_000, 128), dtype)
        yield Program(
            f"gradient of log cosh{mark}",
            "complex" if mark else "log cosh",
            jax.grad(lambda w, x: jnp.real(jnp.log(jnp.cosh(x @ w))).sum()),
            args,
        )
        yield Program(
            f"gradient of two tanh layers{mark}",
            "complex" if mark else "log cosh",
            jax.grad(lambda w, x: (jnp.real(jnp.tanh(jnp.tanh(x @ w) @ w.T)) ** 2).sum()),
            args,
        )
    turned = lambda x, t: (x * jnp.exp(1j * t)).real
    yield Program("rotation", "complex", turned, (S((4096, 1024), C64), S((4096, 1024), F32)))
    yield Program("complex product", "complex", lambda a, b: a @ b, (S((2048, 2048), C64), S((2048, 2048), C64)))
    gates = lambda psi, u: sum(
        jnp.abs(jnp.einsum("ij,ajb->aib", u[k], psi.reshape(2**k, 2, -1))).sum() for k in range(3)
    )
    yield Program("gates on a state", "complex", gates, (S((2**20,), C64), S((3, 2, 2), C64)))


def _decompositions() -> Iterator[Program]:
    square, tall, right = S((2048, 2048), F32), S((4096, 1024), F32), S((2048, 16), F32)
    yield Program("eigh", "eigh", jnp.linalg.eigh, (square,))
    yield Program("gradient of eigh", "eigh", jax.grad(lambda x: jnp.sum(jnp.linalg.eigh(x + x.T)[1] ** 3)), (square,))
    yield Program("svd", "svd", lambda x: jnp.linalg.svd(x, full_matrices=False), (tall,))
    yield Program("svd, batched", "svd", lambda x: jnp.linalg.svd(x, full_matrices=False), (S((64, 256, 128), F32),))
    yield Program("qr", "qr", jnp.linalg.qr, (tall,))
    yield Program("gradient of qr", "qr", jax.grad(lambda x: jnp.sum(jnp.linalg.qr(x)[0] ** 3)), (tall,))
    yield Program("solve", "solve", jnp.linalg.solve, (square, right))
    yield Program("gradient of solve", "solve", jax.grad(lambda a, b: jnp.linalg.solve(a, b).sum()), (square, right))
    solved = lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b).sum()
    yield Program("cholesky", "cholesky", jnp.linalg.cholesky, (square,))
    yield Program("gradient of cho_solve", "cholesky", jax.grad(solved), (square, right))
    yield Program(
        "gradient of batched cho_solve",
        "cholesky",
        jax.grad(lambda a, b: jax.vmap(solved)(a, b).sum()),
        (S((64, 256, 256), F32), S((64, 256, 4), F32)),
    )
    yield Program(
        "determinant and inverse", "solve", lambda a: (jnp.linalg.slogdet(a)[1], jnp.linalg.inv(a)), (square,)
    )


def _transforms() -> Iterator[Program]:
    images = S((16, 512, 512), F32)
    yield Program("FFT there and back", "fft", lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x) ** 2), (images,))
    yield Program(
        "gradient of an FFT convolution",
        "fft",
        jax.grad(lambda x, k: jnp.fft.irfft2(jnp.fft.rfft2(x) * jnp.fft.rfft2(k)).var(), argnums=(0, 1)),
        (images, images),
    )
    wave = lambda x: jnp.fft.ifftn(jnp.fft.fftn(x, axes=(-3, -2, -1)) * 0.5, axes=(-3, -2, -1))
    yield Program("FFT in 3 D", "fft", wave, (S((4, 64, 128, 128), C64),))
    steps = lambda x: lax.fori_loop(
        0, 8, lambda i, x: jnp.fft.ifft2(jnp.fft.fft2(x) * 0.9) * jnp.exp(-1j * jnp.abs(x)), x
    )
    yield Program("split steps", "fft", steps, (S((2048, 2048), C64),))


def _orders() -> Iterator[Program]:
    rows = S((4096, 4096), F32)
    yield Program("gradient of sort", "sort", jax.grad(lambda x: (jnp.sort(x, -1) * jnp.arange(4096.0)).sum()), (rows,))
    yield Program("argsort", "sort", lambda x: jnp.argsort(x, -1), (rows,))
    yield Program("top_k", "sort", lambda x: lax.top_k(x, 16), (rows,))
    yield Program("gradient of cumprod", "cumulative", jax.grad(lambda x: jnp.cumprod(x, axis=1).sum()), (rows,))
    yield Program(
        "gradient of cumlogsumexp", "cumulative", jax.grad(lambda x: lax.cumlogsumexp(x, axis=1).sum()), (rows,)
    )
    yield Program("cumsum", "cumulative", lambda x: jnp.cumsum(x, 0) - jnp.cumsum(x, 1), (rows,))


def _elementwise() -> Iterator[Program]:
    rows = S((4096, 4096), F32)
    yield Program("elementwise", "elementwise", lambda x, y: jnp.sin(x) * y + jnp.exp(-y), (rows, rows))
    moved = lambda x, y: jnp.concatenate([x.T, jnp.flip(y, 0)], 1)[:, ::2] + jnp.pad(x, ((0, 0), (0, 0)))
    yield Program("moves", "moves", moved, (rows, rows))
    stencil = lambda x: x[1:-1, 1:-1] + 0.1 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2])
    twice = lambda x: jnp.tanh(stencil(jnp.tanh(stencil(jnp.tanh(stencil(x))))))
    yield Program("stencils", "moves", twice, (rows,))
    yield Program("gradient of stencils", "moves", jax.grad(lambda x: twice(x).sum()), (rows,))
    masked = lambda x, m: jnp.where(m, x, 0).astype(BF16).T
    yield Program("mask and transpose", "moves", masked, (rows, S((4096, 4096), jnp.bool_)))


def _shifts() -> Iterator[Program]:
    rows, half = S((2048, 4096), F32), S((2048, 2048), F32)
    longest = lambda x: lax.associative_scan(jnp.maximum, x, axis=1)
    yield Program("running maximum", "shifts", longest, (rows,))
    decayed = lambda a, x: lax.associative_scan(lambda l, r: (l[0] * r[0], l[1] * r[0] + r[1]), (a, x), axis=1)[1]
    yield Program(
        "gradient of decayed sums", "shifts", jax.grad(lambda a, x: decayed(a, x).sum(), (0, 1)), (half, half)
    )
    halves = lambda x: jnp.stack([x[:, ::2] + x[:, 1::2], x[:, ::2] - x[:, 1::2]], 1).reshape(x.shape)
    yield Program("wavelets", "shifts", lambda x: halves(halves(halves(x).T)), (rows,))
    smooth = lambda x: (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1)) / 4
    rolled = lambda x: jnp.sin(smooth(jnp.sin(smooth(jnp.sin(smooth(x))))))
    yield Program("rolls", "shifts", rolled, (rows,))
    yield Program("gradient of rolls", "shifts", jax.grad(lambda x: rolled(x).sum()), (rows,))
    yield Program(
        "tiles", "shifts", lambda x, y: jnp.tile(x, (1, 2)) * jnp.repeat(y, 2, 1) + jnp.hstack([y, x]), (rows, rows)
    )


def _reductions() -> Iterator[Program]:
    rows = S((8192, 4096), F32)
    standard = lambda x: (x - x.mean(0)) / x.std(0)
    yield Program("standardize", "reductions", standard, (rows,))
    yield Program("softmax", "reductions", lambda x: jax.nn.softmax(x), (rows,))
    yield Program("softmax, bf16", "reductions", lambda x: jax.nn.softmax(x), (S((8192, 4096), BF16),))
    yield Program("covariance", "reductions", lambda x: jnp.cov(x, rowvar=False), (S((8192, 1024), F32),))


def _random() -> Iterator[Program]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    draw = lambda key, w: jnp.mean(jnp.tanh(jax.random.normal(key, (4096, 1024)) @ w))
    yield Program("samples", "random", draw, (key, S((1024, 1024), F32)))

    def dropped(ws: Any, x: Any, key: Any) -> Any:
        for i, w in enumerate(ws):
            x = jax.nn.relu(x @ w)
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape), x / 0.9, 0)
        return jnp.mean(x**2)

    yield _step("dropout", "random", dropped, [S((1024, 1024), F32)] * 4, S((4096, 1024), F32), key)


SUITE: Final = {
    "gpt2_small": {"layers": 2, "batch": 2, "context": 512, "vocab": 8192},
    "llama": {"layers": 2, "batch": 1, "seq": 512, "dim": 512, "heads": 8, "kv_heads": 2, "ffn": 1408, "vocab": 8192},
    "vit_b": {"layers": 2, "batch": 8},
    "resnet50": {"stages": (1, 1), "batch": 8, "image": 64},
    "unet": {"batch": 16, "width": 32, "multipliers": (1, 2), "res_blocks": 1, "groups": 8},
    "bert_base": {"layers": 2, "batch": 4, "seq": 128, "predictions": 19, "vocab": 8192},
    "moe": {"layers": 2, "batch": 2, "seq": 256, "vocab": 8192},
    "lstm": {"batch": 16, "seq": 64, "hidden": 512},
    "mixer": {"layers": 2, "batch": 16},
    "ode": {"steps": 20, "grid": 128},
    "dlrm": {"batch": 2048, "max_rows": 10_000},
    "vgg16": {"stages": (1, 1, 2), "batch": 8, "image": 64, "width": 32, "dense": 512},
    "densenet121": {"blocks": (2, 2), "batch": 8, "image": 64},
}
"""Sizes at which the suite's workloads compile in seconds."""


def _suite() -> Iterator[Program]:
    from benchmarks import workloads

    for name, sizes in SUITE.items():
        work = workloads.workload(name, **sizes)
        yield Program(f"suite/{name}", f"suite/{name}", work.fun, work.args, dict(work.jit_options))
