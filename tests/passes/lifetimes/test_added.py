"""`passes.added`: products that are added to what is there already."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jaxtensile.ir.fuser import CPU, Fuser
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.trace import trace_jaxpr

N = 64
SQUARE = N * N * 4


def product(x, y):
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())))


ADDED = {
    "added": lambda c, x, y: c + product(x, y),
    "taken off": lambda c, x, y: c - 0.1 * product(x, y),
    "in steps": lambda c, x, y: jnp.tanh(c * product(x, y)) + 1,
}
APART = {
    "read twice": lambda c, x, y: (lambda d: (c + d, d * 2))(product(x, y)),
    "to what is computed": lambda c, x, y: jnp.sort(c) + product(x, y),
    "to its own operand": lambda c, x, y: x + product(x, y),
    "of nothing else": lambda c, x, y: jnp.tanh(product(x, y)),
    "turned": lambda c, x, y: c.T[:, None] + product(x, y)[None],
}


def graph(fun):
    return trace_jaxpr(jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct((N, N), jnp.float32)] * 3)).graph


@pytest.mark.parametrize("name", ADDED)
def test_a_product_that_is_added_to_what_is_given_takes_no_memory(name):
    g = graph(ADDED[name])
    assert len(fuse(g).added) == 1
    assert live_ranges(g).temp == 0
    assert live_ranges(g, fuse(g, by=CPU)).temp == SQUARE


@pytest.mark.parametrize("name", APART)
def test_others_are_stored(name):
    g = graph(APART[name])
    assert not fuse(g).added


def test_a_library_adds_one_array_alone():
    old = Fuser(products=False)
    found = {name: len(fuse(g, by=old).added) for name, fun in ADDED.items() for g in (graph(fun),)}
    assert found == {"added": 1, "taken off": 0, "in steps": 0}


def test_what_it_is_added_up_to_is_there_from_the_product_on():
    def fun(c, x, y):
        d = product(x, y)
        z = jnp.sort(jnp.sort(y) * 2)
        return jnp.sort(c + d), z

    g = graph(fun)
    made, summed = (next(op for op in g.ops if op.primitive == name) for name in ("dot_general", "add"))
    assert made.id < summed.id - 1
    assert {r.value: r.start for r in live_ranges(g).ranges}[summed.results[0]] == made.id


@pytest.mark.cuda_aot
@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-v100-16gb"])
def test_what_a_loop_adds_up_is_there_once(target):
    def step(w, xs, ys):
        total = lax.scan(lambda c, p: (c + product(*p), None), jnp.zeros_like(w), (xs, ys))[0]
        return w - 0.1 * total

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 1024), (8, 64, 4096), (8, 64, 1024))]
    static, exact = (
        jaxtensile.estimate(step, *shapes, target=target, donate_argnums=0, exact=flag) for flag in (False, True)
    )
    assert static.device == pytest.approx(exact.device, rel=0.15)


JOINED = {
    "added": lambda x, y, z: product(x, y) + product(z, z),
    "of three": lambda x, y, z: x @ x + y @ y - z @ z,
    "in steps": lambda x, y, z: jnp.tanh(x @ y) * jnp.exp(z @ z) + 1,
    "turned": lambda x, y, z: (x @ y).T + product(z, z),
    "beside an input": lambda x, y, z: (x @ y + z @ z) * z,
}
ALONE = {
    "to what is computed": lambda x, y, z: product(x, y) + jnp.sort(z),
    "to what two are computed to": lambda x, y, z: product(x, y) * (lambda d: d * jnp.sin(d))(jnp.sort(product(x, z))),
    "in other places": lambda x, y, z: x @ y + (z @ z).reshape(-1)[::-1].reshape(N, N),
    "wider": lambda x, y, z: (x @ y)[None] + (z @ z)[:, None],
    "of the same matrix, and small": lambda x, y, z: x @ y + x @ z,
    "of the same matrix at other sides": lambda x, y, z: product(x, y) + product(y, z),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_product_that_is_added_to_another_is_not_stored(name):
    g = graph(lambda *args: jnp.sort(jnp.sin(JOINED[name](*args))))
    ours, before = (fuse(g, by=Fuser(joins=joins)) for joins in (True, False))
    assert len(ours.joined) == 1
    assert live_ranges(g, ours).temp == live_ranges(g, before).temp - SQUARE


@pytest.mark.parametrize("name", ALONE)
def test_other_products_are_stored(name):
    assert not fuse(graph(ALONE[name]), by=Fuser(joins=True)).joined


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", ["of three", "in steps", list(ALONE)[-2]])
def test_the_compiler_joins_products_since_jaxlib_0_12(name):
    def fun(*args):
        return jnp.sin((JOINED | ALONE)[name](*args)).sum()

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 3
    static, exact = (jaxtensile.estimate(fun, *args, target="nvidia-h200", exact=flag) for flag in (False, True))
    assert static.temp == pytest.approx(exact.temp, rel=0.01)


WORDS = 8192


def entropy(w, x, label):
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, label[:, None], 1)[:, 0])


def log_softmax(w, x, label):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), label[:, None], 1))


@pytest.mark.parametrize("loss", [entropy, log_softmax])
@pytest.mark.parametrize("of", [0, (0, 1)])
def test_the_gradient_of_a_cross_entropy_is_scattered_into_the_softmax(loss, of):
    """On a CPU too the zeros that JAX scatters into are never there, and what it adds up to is made late."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, WORDS), (512, 64))]
    args.append(jax.ShapeDtypeStruct((512,), jnp.int32))
    fun = jax.value_and_grad(loss, of)
    use = jaxtensile.estimate(fun, *args, exact=True)
    assert jaxtensile.estimate(fun, *args).device == pytest.approx(use.device, rel=0.01)
