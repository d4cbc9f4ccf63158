"""The rewritten program is the user's own: same equations, same lines, same bits; only repeated and fenced."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtensile.ir.plan import Program
from jaxtensile.program import emit as rewriting
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from programs import bits, doubled

V = np.linspace(-1, 1, 8, dtype=np.float32)
TABLE = jnp.arange(24.0).reshape(8, 3)


def traced(fun, *args):
    return trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)


def program_of(evaluate, *flat):
    """The equations that an evaluation makes."""
    return jax.make_jaxpr(lambda *xs: evaluate(xs))(*flat)


def equations(closed):
    return list(getattr(closed, "jaxpr", closed).eqns)


def scaled(x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(x) * 2.0


def pooled(x):
    """Overlapping windows, and ties within them."""
    y = jnp.maximum(x.reshape(1, 2, 4, 1), 0.0)
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME").sum()


ZOO = {
    "elementwise": (lambda x: jnp.tanh(x) * x + 1, (V,)),
    "results are arguments, literals and twins": (lambda x, y: (x, y, 3.0, jnp.sin(x), y), (V, 2 * V)),
    "nothing": (lambda: (), ()),
    "only constants": (lambda: (1.5, jnp.zeros(3)), ()),
    "a table closed over": (lambda x: TABLE[jnp.argsort(x)] @ jnp.ones(3), (V,)),
    "keys": (lambda k: jax.random.normal(jax.random.split(k)[0], (3,)), (jax.random.key(1),)),
    "loops": (lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c), 0.0, x), (V,)),
    "branches": (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (V,)),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x), (V,)),
    "gradient": (jax.grad(lambda x: jnp.tanh(x * x) @ x), (V,)),
    "a max pool": (jax.grad(pooled), (V,)),
    "a max pool of one value": (jax.grad(pooled), (0 * V,)),
    "a max pool in half precision": (jax.grad(pooled), (V.astype(jnp.bfloat16),)),
    "remat": (jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()), (V,)),
    "custom rules": (lambda x: jax.nn.relu(jax.nn.silu(x)), (V,)),
    "half precision": (lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32), (V,)),
    "integers and bools": (lambda x: (jnp.argmax(x), x > 0, jnp.where(x > 0, 1, 2)), (V,)),
    "sorting, several results": (lambda x: lax.sort((x, jnp.arange(8)), num_keys=1), (V,)),
}


@pytest.mark.parametrize("schedule", [Program.unchanged, doubled], ids=["unchanged", "doubled"])
@pytest.mark.parametrize("name", ZOO)
def test_bits_and_types(name, schedule):
    fun, args = ZOO[name]
    program = traced(fun, *args)
    flat = jax.tree.leaves(args)
    ours = emit(program, schedule(program.graph))(flat)
    unchanged = emit(program, Program.unchanged(program.graph))(flat)
    expected = jax.tree.leaves(fun(*args))
    assert len(ours) == len(unchanged) == len(expected)
    for a, b, c in zip(ours, unchanged, expected, strict=True):
        np.testing.assert_array_equal(bits(jnp.asarray(a)), bits(jnp.asarray(b)))
        np.testing.assert_allclose(bits_or_floats(a), bits_or_floats(c), rtol=5e-3 if "half" in name else 1e-6)
    if not args or jax.dtypes.issubdtype(jnp.asarray(flat[0]).dtype, jax.dtypes.prng_key):
        return
    before, after = jax.make_jaxpr(fun)(*args), program_of(emit(program, schedule(program.graph)), *flat)
    assert [v.aval for v in getattr(after, "jaxpr", after).outvars] == [
        v.aval for v in getattr(before, "jaxpr", before).outvars
    ]


def bits_or_floats(x):
    x = jnp.asarray(x)
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, np.float64)


def test_an_unchanged_schedule_is_the_same_list_of_equations():
    def fun(x, w):
        y = jnp.tanh(x @ w)
        return (y * y).sum(), jnp.where(x > 0, x, y)

    args = V[:4].reshape(2, 2), np.ones((2, 2), np.float32)
    program = traced(fun, *args)
    made = equations(program_of(emit(program, Program.unchanged(program.graph)), *args))
    assert [e.primitive for e in made] == [e.eqn.primitive for e in program.equations]
    for a, b in zip(made, program.equations, strict=True):
        assert str(a.params) == str(b.eqn.params)


def test_lines_and_scopes_are_the_users():
    program = traced(scaled, V)
    evaluate = emit(program, doubled(program.graph))
    made = [e for e in equations(program_of(evaluate, V)) if e.primitive.name in ("sin", "mul")]
    assert len(made) == 4
    for e in made:
        assert str(e.source_info.name_stack) == "outer/inner"
        assert any(f.function_name == "scaled" for f in e.source_info.traceback.frames)
    text = jax.jit(lambda x: evaluate([x])).lower(V).as_text(debug_info=True)
    assert "outer/inner/sin" in text and "test_emit.py" in text


def test_equations_keep_the_configuration_they_were_traced_under():
    def fun(x):
        with jax.default_matmul_precision("highest"):
            y = x @ x.T
        with jax.enable_x64(True):
            return y, jnp.asarray(1, jnp.float64) * 2

    x = V.reshape(2, 4)
    program = traced(fun, x)
    made = program_of(emit(program, doubled(program.graph)), x)
    assert "HIGHEST" in str(made) and "f64" in str(made)


def test_barriers_stand_where_the_schedule_says():
    program = traced(lambda x, y: jnp.sin(x) * jnp.cos(y), V, V)
    schedule = doubled(program.graph)
    made = equations(program_of(emit(program, schedule), V, V))
    names = [e.primitive.name for e in made]
    assert names == ["sin", "cos", "mul", "optimization_barrier", "sin", "cos", "mul"]
    barrier, again = made[3], made[4:]
    assert [len(barrier.invars), len(barrier.outvars)] == [2, 2]
    assert set(again[0].invars) | set(again[1].invars) == set(barrier.outvars), "the clones read behind the barrier"


def test_a_max_pool_adds_to_zeros_of_its_own():
    """A constant would be shared with every relu of that shape, and live from the forward pass on."""
    closed = program_of(emit(t := traced(jax.grad(pooled), V), Program.unchanged(t.graph)), V)
    made = {v: e for e in equations(closed) for v in e.outvars}
    (pool,) = (e for e in equations(closed) if e.primitive.name == "select_and_scatter")
    source, zero = pool.invars[1:]
    assert made[zero].primitive.name == made[source].primitive.name == "optimization_barrier"
    assert zero.aval.shape == () and zero.aval.dtype == V.dtype


def looked_up(table):
    return jnp.tanh(table[jnp.array([1, 1, 3])]).sum()


def pair():
    """Two constants of no operands."""
    kind = jax.ShapeDtypeStruct((8,), np.float32)
    return jax.pure_callback(lambda: (np.zeros(8, np.float32), np.ones(8, np.float32)), (kind, kind))


INTO = {
    "a lookup": (jax.grad(looked_up), (V,), True),
    "a lookup in half precision": (jax.grad(looked_up), (V.astype(jnp.bfloat16),), True),
    "several lookups": (jax.grad(lambda t: looked_up(t) * looked_up(t[::-1])), (V,), True),
    "a slice": (lambda x: lax.dynamic_update_slice(jnp.zeros(8), jnp.sin(x[:3]), (2,)), (V,), True),
    "a scalar": (lambda x: jnp.full(8, 2.0, jnp.float32).at[3].add(jnp.sum(x)), (V,), True),
    "integers": (lambda x: jnp.zeros(8, int).at[jnp.argmax(x)].max(jnp.argmin(x)), (V,), True),
    "literals": (lambda x: jnp.zeros(8).at[3].set(1.0) * x, (V,), False),
    "literals where it says": (lambda x: jnp.zeros(8).at[jnp.argmax(x)].set(1.0), (V,), True),
    "what others read": (lambda x: (z := jnp.zeros(8), z.at[3].add(x[0])), (V,), False),
    "the second of two": (lambda x: pair()[1].at[jnp.argmax(x)].add(x[1]), (V,), False),
    "what counts": (lambda x: jnp.arange(8.0).at[jnp.argmax(x)].add(x[1]), (V,), False),
    "an output": (lambda x: (z := lax.full((8,), 0.0)) + z.at[jnp.argmax(x)].set(x[1]), (V,), False),
}


@pytest.mark.parametrize("name", INTO)
def test_what_is_written_into_a_constant_has_it_made_late(monkeypatch, name):
    """XLA makes a constant when it likes, as nothing has to come before it."""
    monkeypatch.setattr(rewriting, "_LARGE", 1)
    fun, given, late = INTO[name]
    program = traced(fun, *given)
    evaluate = emit(program, Program.unchanged(program.graph), apart=True)
    made = program_of(evaluate, *given)
    constants = [e for e in equations(made) if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.size == 8]
    behind = [e for e in constants if not hasattr(e.invars[0], "val")]
    assert bool(behind) == late
    by = {v: e.primitive.name for e in equations(made) for v in e.outvars}
    assert all(by[e.invars[0]] == "optimization_barrier" for e in behind)
    want = [bits(x) for x in jax.tree.leaves(jax.jit(fun)(*given))]
    got = [bits(x) for x in jax.jit(evaluate)(given)]
    assert [(a.dtype, a.tolist()) for a in got] == [(a.dtype, a.tolist()) for a in want]


def test_a_value_is_forgotten_after_its_last_use(monkeypatch):
    def fun(x):
        for _ in range(20):
            x = jnp.sin(x)
        return x

    program = traced(fun, V)
    real, alive = rewriting.bind, []

    def counting(equation, operands):
        alive.append(len(jax.live_arrays()))
        return real(equation, operands)

    monkeypatch.setattr(rewriting, "bind", counting)
    gc.collect()
    emit(program, Program.unchanged(program.graph))([jnp.asarray(V)])
    assert max(alive) - alive[0] <= 2


def test_constants_are_the_same_objects():
    program = traced(lambda x: x @ TABLE + TABLE[0], V)
    assert any(c is TABLE for c in program.consts.values())
    made = program_of(emit(program, Program.unchanged(program.graph)), V)
    assert sum(c is TABLE for c in made.consts) == 1


def test_the_wrong_number_of_arguments_is_an_error():
    program = traced(lambda x: x + 1, V)
    with pytest.raises(ValueError, match="longer than"):
        emit(program, Program.unchanged(program.graph))([V, V])
