"""Nobody can tell ``jaxtensile.jit`` from ``jax.jit``: every habit of a jit, planned and not."""

import functools
import inspect
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.api import jit as api
from jaxtensile.planner import pipeline
from programs import FAST, chain_args, close, fit_by_force, same, squeezed, step

ROOM = {"budget": "1TiB", "compiler_options": FAST}


@pytest.fixture(params=["as it is", "rewritten"])
def way(request, monkeypatch):
    """Once with programs that fit as they are, once with every program rewritten by force."""
    if request.param == "rewritten":
        monkeypatch.setattr(pipeline, "fit", fit_by_force)
    return request.param


def pair(fun, **options):
    return jaxtensile.jit(fun, **ROOM, **options), jax.jit(fun, compiler_options=FAST, **options)


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A registered node with static data."""

    def __init__(self, value, label):
        self.value, self.label = value, label

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.label

    def tree_flatten(self):
        return (self.value,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)

    def __eq__(self, other):
        return isinstance(other, Box) and (self.value, self.label) == (other.value, other.label)


class Static:
    """Hashable, no array: for static arguments."""

    def __init__(self, n):
        self.n = n

    def __hash__(self):
        return hash(self.n)

    def __eq__(self, other):
        return isinstance(other, Static) and self.n == other.n


CLOSED_OVER = np.arange(6.0, dtype=np.float32)
V = np.linspace(-1, 1, 6, dtype=np.float32)
KEY = functools.partial(jax.random.key, 0)

CASES = {
    "scalars": (lambda x, n: x * n + 1, (V, 3), {}, {}),
    "a bool, a complex, a big int": (lambda a, b, c: (a, b * 2, c + 1), (True, 1 + 2j, 7), {}, {}),
    "weak results": (lambda x: (x, 2 * x, jnp.sin(x)), (1.5,), {}, {}),
    "weak and strong inputs": (lambda x, y: (x + y, x, y), (2.0, np.float32(3)), {}, {}),
    "half precision": (lambda x: jnp.exp(x) @ x, (V.astype(jnp.bfloat16),), {}, {}),
    "no arguments": (lambda: jnp.arange(3) * 2, (), {}, {}),
    "no arguments, constants": (lambda: (1, 2.0, CLOSED_OVER), (), {}, {}),
    "no results": (lambda x: None, (V,), {}, {}),
    "empty results": (lambda x: ((), [], {}, None), (V,), {}, {}),
    "None among arguments": (lambda x, y: {"a": x, "b": y}, (None, V), {}, {}),
    "dict, tuple, list": (lambda d: {"s": [d["b"] + 1, (d["a"],)]}, ({"a": V, "b": V[:2]},), {}, {}),
    "named tuple": (lambda p: Point(p.y, p.x), (Point(V, 2 * V),), {}, {}),
    "registered node": (lambda b: Box(b.value * 2, "out"), (Box(V, "in"),), {}, {}),
    "keywords": (lambda a, *, b, c=2.0: a * b + c, (V,), {"b": V}, {}),
    "positional by keyword": (lambda a, b: a - b, (), {"b": V, "a": 2 * V}, {}),
    "varargs": (lambda *xs, **kw: sum(xs) + kw["z"], (V, V, V), {"z": V}, {}),
    "closure": (lambda x: x + CLOSED_OVER + jnp.asarray(CLOSED_OVER), (V,), {}, {}),
    "results are arguments": (lambda x, y: (y, x, y, x + 0), (V, 2 * V), {}, {}),
    "results are constants": (lambda x: (jnp.zeros(3), 7, x.shape[0]), (V,), {}, {}),
    "duplicates": (lambda x: (lambda y: (y, y, {"y": y}))(jnp.sin(x)), (V,), {}, {}),
    "zero size": (lambda x: (x, x.sum(), x * 2), (np.zeros((0, 3), np.float32),), {}, {}),
    "static by number": (lambda x, n: x.reshape(n, -1), (V, 2), {}, {"static_argnums": 1}),
    "static by negative number": (lambda x, n: x.reshape(n, -1), (V, 2), {}, {"static_argnums": -1}),
    "static by name": (lambda x, n: x[:n], (V,), {"n": 3}, {"static_argnames": "n"}),
    "static by name, given by position": (lambda x, n: x[:n], (V, 3), {}, {"static_argnames": ("n",)}),
    "static object": (lambda s, x: x * s.n, (Static(3), V), {}, {"static_argnums": (0,)}),
    "static array-like": (lambda s, x: x * s[1], ((1, np.float32(4)), V), {}, {"static_argnums": (0,)}),
    "unused arguments kept": (lambda x, y: x + 1, (V, V), {}, {"keep_unused": True}),
    "typed keys": (lambda k: (jax.random.split(k), jax.random.normal(k, (3,))), (jax.random.key(0),), {}, {}),
    "raw keys": (lambda k: jax.random.bernoulli(k, 0.5, (8,)), (jax.random.PRNGKey(3),), {}, {}),
    "a key closed over": (lambda x: x + jax.random.uniform(KEY(), x.shape), (V,), {}, {}),
    "loops and branches": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jax.lax.cond(i > 1, jnp.sin, jnp.cos, c), x),
        (V,),
        {},
        {},
    ),
    "while": (lambda x: jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2, x), (V + 2,), {}, {}),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), 0.0, x), (V,), {}, {}),
    "inner jits": (lambda x: jax.jit(jnp.sin)(x) + jaxtensile.jit(jnp.cos, budget=1)(x), (V,), {}, {}),
    "custom rules": (lambda x: jax.nn.relu(x) + jax.nn.silu(jax.nn.logsumexp(x)), (V,), {}, {}),
    "a gradient": (lambda x: jax.value_and_grad(lambda x: jnp.tanh(x @ x))(x), (V,), {}, {}),
    "checkpoint": (jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())), (V,), {}, {}),
    "a pure callback": (
        lambda x: jax.pure_callback(lambda a: np.sin(a), jax.ShapeDtypeStruct((6,), jnp.float32), x),
        (V,),
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_structure_and_types_are_those_of_jax_jit(way, name):
    fun, args, kwargs, options = CASES[name]
    ours, theirs = pair(fun, **options)
    expected = theirs(*args, **kwargs)
    same(ours(*args, **kwargs), expected)
    same(ours(*args, **kwargs), expected)
    assert ours._cache_size() == theirs._cache_size() == 1
    assert jax.tree.map(str, ours.eval_shape(*args, **kwargs)) == jax.tree.map(str, theirs.eval_shape(*args, **kwargs))
    same(ours.lower(*args, **kwargs).compile()(*_dynamic(args, options), **_dynamic_kw(kwargs, options)), expected)


def _dynamic(args, options):
    numbers = options.get("static_argnums", ())
    static = {n % len(args) for n in ((numbers,) if isinstance(numbers, int) else numbers)}
    if "static_argnames" in options:
        static = {1}
    return [a for i, a in enumerate(args) if i not in static]


def _dynamic_kw(kwargs, options):
    return {k: v for k, v in kwargs.items() if k not in options.get("static_argnames", ())}


# ---- what it looks like ---------------------------------------------------------------------------


def test_decorator_with_and_without_parentheses():
    @jaxtensile.jit
    def bare(x):
        """Doc of bare."""
        return x + 1

    @jaxtensile.jit(budget="1GiB", static_argnames="n")
    def with_options(x, n=2):
        return x * n

    @functools.partial(jaxtensile.jit, static_argnums=1)
    def with_partial(x, n):
        return x * n

    assert (bare(1), with_options(2), with_options(2, n=5), with_partial(2, 4)) == (2, 4, 10, 8)
    assert bare.__name__ == "bare" and bare.__doc__ == "Doc of bare." and bare.__wrapped__(1) == 2
    assert inspect.signature(with_options) == inspect.signature(with_options.__wrapped__)
    assert "with_options" in repr(with_options) and "1GiB" in repr(with_options)


def test_it_has_what_a_jit_has():
    ours, theirs = pair(lambda x: x)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= set(dir(ours))
    assert isinstance(ours, jax.stages.Wrapped) == isinstance(theirs, jax.stages.Wrapped)


def test_partial_objects_and_callables():
    class Model:
        def __call__(self, x):
            return x * 3

    assert jaxtensile.jit(functools.partial(lambda n, x: n * x, 4), **ROOM)(2) == 8
    assert jaxtensile.jit(Model(), **ROOM)(2) == 6
    assert functools.partial(jaxtensile.jit(lambda a, b: a - b, **ROOM), 5)(2) == 3
    assert jaxtensile.jit(jax.jit(lambda x: x + 1), **ROOM)(1) == 2
    assert jaxtensile.jit(jaxtensile.jit(lambda x: x + 1, budget="1TiB"), **ROOM)(1) == 2


def test_methods(way):
    class Model:
        def __init__(self, n):
            self.n = n

        @functools.partial(jaxtensile.jit, static_argnums=0, **ROOM)
        def scale(self, x):
            return x * self.n

        @staticmethod
        @jaxtensile.jit
        def still(x):
            return x + 1

        @classmethod
        @functools.partial(jaxtensile.jit, static_argnums=0)
        def of_class(cls, x):
            return x + len(cls.__name__)

    two, three = Model(2), Model(3)
    assert (two.scale(V)[0], three.scale(V)[0], two.still(1), Model.of_class(1)) == (-2, -3, 2, 6)
    assert Model.scale(two, V)[0] == -2
    assert two.scale.plan(V).fits
    assert two.scale.lower(V).compile()(V)[0] == -2
    assert "mul" in str(two.scale.trace(V).jaxpr)
    assert two.scale.eval_shape(V).shape == (6,)
    assert two.scale.__name__ == "scale" and two.scale.__wrapped__(three, 1) == 3
    assert two.scale == two.scale and two.scale != three.scale and len({two.scale, two.scale}) == 1
    assert "scale" in repr(two.scale)
    assert Model.scale._cache_size() == two.scale._cache_size() == 2


# ---- signatures, caches, contexts -----------------------------------------------------------------


def counting(fun):
    def counted(*args, **kwargs):
        counted.traces += 1
        return fun(*args, **kwargs)

    counted.traces = 0
    return counted


def test_a_signature_is_traced_once_and_dispatched_in_cpp_from_then_on(way, monkeypatch):
    fun = counting(lambda x: x * 2)
    ours = jaxtensile.jit(fun, **ROOM)
    arguments = [V, V[:3], 2.0, 2, V.astype(np.float16), np.stack([V, V])]
    for x in arguments:
        same(ours(x), jax.jit(fun.__wrapped__ if hasattr(fun, "__wrapped__") else lambda x: x * 2)(x))
    assert fun.traces == ours._cache_size() == len(arguments)
    monkeypatch.setattr(api._compat, "under_trace", None)  # Python, which asks that first, is not asked
    for x in arguments * 2:
        ours(x)
    assert fun.traces == len(arguments)


def test_alternating_between_a_planned_and_an_unchanged_signature():
    small, large = chain_args(rows=2), chain_args()
    planned, report = squeezed(step, *large)
    assert not report.unchanged and planned.plan(*small).unchanged
    expected = jax.jit(step)(*small), jax.jit(step)(*large)
    for _ in range(3):
        jax.tree.map(close, (planned(*small), planned(*large)), expected)
    assert planned._cache_size() == 2


def test_clear_cache_forgets_everything(way):
    fun = counting(lambda x: x + 1)
    ours = jaxtensile.jit(fun, **ROOM)
    assert ours(1) == 2 and ours._cache_size() == 1
    ours.clear_cache()
    assert ours._cache_size() == 0
    assert ours(1) == 2 and (fun.traces, ours._cache_size()) == (2, 1)
    jax.clear_caches()
    assert ours(1) == 2 and (fun.traces, ours._cache_size()) == (3, 1)


def test_plans_die_with_the_trace_they_were_made_for():
    ours = jaxtensile.jit(lambda x: x + 1, **ROOM)
    for _ in range(3):
        ours(1)
        jax.clear_caches()
    ours(1)
    assert len(ours._entries) == 1


def test_jax_jit_of_the_same_function_shares_nothing(monkeypatch):
    def fun(x):
        return x + 1

    assert jax.jit(fun)(1) == 2
    ours = jaxtensile.jit(fun, **ROOM)
    monkeypatch.setattr(pipeline, "fit", fit_by_force)
    assert ours(1) == 2 and "optimization_barrier" in str(ours.trace(1).jaxpr)
    assert "optimization_barrier" not in str(jax.jit(fun).trace(1).jaxpr)


def test_configuration_is_part_of_the_signature(way):
    fun = counting(lambda x: x @ x.T)
    ours, x = jaxtensile.jit(fun, **ROOM), np.ones((3, 3))
    assert ours(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert ours(x).dtype == jnp.float64
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(ours.trace(x).jaxpr)
        assert "HIGHEST" in ours.lower(x).as_text()
        ours(x)
    assert "HIGHEST" not in str(ours.trace(x).jaxpr)
    traced = fun.traces
    assert ours(x).dtype == jnp.float32 and fun.traces == traced


@pytest.mark.parametrize(
    "context", [functools.partial(jax.check_tracer_leaks, True), functools.partial(jax.enable_checks, True)]
)
def test_under_jax_own_checks(way, context):
    with context():
        ours, theirs = pair(lambda d, x: {"y": d["w"] @ jnp.tanh(x), "n": 2})
        args = ({"w": np.eye(3, dtype=np.float32)}, V[:3])
        same(ours(*args), theirs(*args))


def test_debug_nans_names_the_culprit(way):
    ours, theirs = pair(lambda x: jnp.log(x) + 1)
    with jax.debug_nans(True):
        assert ours(V + 2).shape == (6,)
        with pytest.raises(FloatingPointError) as expected:
            theirs(V)
        with pytest.raises(FloatingPointError) as got:
            ours(V)
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]
    assert np.isnan(ours(V)[0])


def test_disable_jit_runs_the_function_itself(way):
    seen = []
    ours = jaxtensile.jit(lambda x: seen.append(x) or x + 1, **ROOM)
    with jax.disable_jit():
        assert ours(1) == 2
    assert seen == [1] and ours._cache_size() == 0


# ---- transformations ------------------------------------------------------------------------------


def loss(w, x):
    return jnp.tanh(x @ w).sum()


W, X = np.eye(3, dtype=np.float32), np.ones((4, 3), np.float32)

TRANSFORMS = {
    "grad": lambda f: jax.grad(f)(W, X),
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=(0, 1))(W, X),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0))(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), (W, X)),
    "vjp": lambda f: jax.vjp(f, W, X)[1](jnp.float32(1)),
    "linearize": lambda f: jax.linearize(f, W, X)[1](W, X),
    "hessian": lambda f: jax.hessian(f)(W, X),
    "jit": lambda f: jax.jit(lambda w, x: f(w, x) * 2)(W, X),
    "jaxtensile.jit": lambda f: jaxtensile.jit(lambda w, x: f(w, x) * 2, budget="1GiB")(W, X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(W, x), c), 0.0, X),
    "cond": lambda f: jax.lax.cond(X[0, 0] > 0, f, f, W, X),
    "make_jaxpr": lambda f: jnp.asarray(len(jax.make_jaxpr(f)(W, X).jaxpr.outvars)),
    "eval_shape": lambda f: jnp.zeros(jax.eval_shape(f, W, X).shape),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "a constant under a trace": lambda f: jax.jit(lambda x: x + f(W, X))(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_a_transformation_it_is_jax_jit(name):
    """A budget of one byte: nothing is planned there, so nothing fails."""
    ours = jaxtensile.jit(loss, budget=1, compiler_options={})
    jax.tree.map(np.testing.assert_array_equal, TRANSFORMS[name](ours), TRANSFORMS[name](jax.jit(loss)))
    with pytest.raises(jaxtensile.BudgetError):
        ours(W, X)


def test_a_planned_function_still_differentiates():
    args = chain_args()
    planned, _ = squeezed(step, *args)
    planned(*args)
    total = lambda f: lambda w: sum(x.sum() for x in f(w, args[1]))  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, jax.grad(total(planned))(args[0]), jax.grad(total(step))(args[0]))


# ---- effects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_run_once_per_call(way, ordered, capfd):
    seen = []

    def fun(x):
        y = jnp.sin(x)
        jax.debug.print("got {}", y[0], ordered=ordered)
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, y[0], ordered=ordered)
        z = jax.experimental.io_callback(lambda v: np.float32(v + 1), jax.ShapeDtypeStruct((), jnp.float32), y[1])
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, z, ordered=ordered)
        return y * z

    ours, theirs = pair(fun)
    results = []
    for f in (ours, theirs):
        seen.clear()
        for _ in range(3):
            out = f(V)
        jax.effects_barrier()
        results.append((out, sorted(seen) if not ordered else list(seen)))
        assert len(seen) == 6
        assert capfd.readouterr().out.count("got") == 3
    same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert ours._cache_size() == theirs._cache_size()


def test_an_exception_in_a_callback_comes_through(way):
    def angry(v):
        raise RuntimeError("the callback's own words")

    ours = jaxtensile.jit(lambda x: jax.pure_callback(angry, jax.ShapeDtypeStruct((), jnp.float32), x), **ROOM)
    with pytest.raises(Exception, match="the callback's own words"):
        jax.block_until_ready(ours(1.0))


def test_references(way):
    if not hasattr(jax, "new_ref"):
        pytest.skip("no references")

    def run(jit):
        counter, other = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.ones(3))

        def bump(ref, x):
            ref[...] += x
            counter[...] += 2 * x
            return ref[...] * 2

        f = jit(bump)
        return [f(other, V[:3]) for _ in range(3)], other[...], counter[...]

    jax.tree.map(np.testing.assert_array_equal, run(functools.partial(jaxtensile.jit, **ROOM)), run(jax.jit))


# ---- donation -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    "options", [{"donate_argnums": (0,)}, {"donate_argnames": "b"}, {"donate_argnums": (0, 1)}, {}], ids=str
)
@pytest.mark.parametrize("keep", [False, True])
def test_donation_deletes_what_jax_jit_deletes(way, options, keep):
    def fun(a, b, c):
        return a["w"] * 2, jnp.zeros(3)

    deleted = []
    for f in pair(fun, keep_unused=keep, **options):
        args = {"w": jnp.ones(4)}, jnp.ones(3), jnp.ones(2)
        f.lower(*args).compile()
        if f is not None and hasattr(f, "plan"):
            f.plan(*args)
            assert not any(x.is_deleted() for x in jax.tree.leaves(args))
        f(*args)
        deleted.append([x.is_deleted() for x in jax.tree.leaves(args)])
    assert deleted[0] == deleted[1]


def test_a_donated_argument_cannot_be_used_twice(way):
    ours, theirs = pair(lambda x: x + 1, donate_argnums=0)
    for f in (ours, theirs):
        x = jnp.ones(4)
        f(x)
        with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
            f(x)
    assert ours(jnp.ones(4))[0] == 2


# ---- errors of the function's own -----------------------------------------------------------------


class Angry(Exception):
    pass


def test_exceptions_come_through_and_the_next_call_works(way):
    def fun(x):
        if x.shape[0] > 3:
            raise Angry("too long")
        return x + 1

    ours = jaxtensile.jit(fun, **ROOM)
    for _ in range(2):
        for attempt in (ours, ours.lower, ours.trace, ours.plan, ours.eval_shape):
            with pytest.raises(Angry) as info:
                attempt(V)
            assert str(info.value) == "too long"
        assert ours(V[:3])[0] == 0


@pytest.mark.parametrize(
    "fun, args, options",
    [
        (lambda x: x if x > 0 else -x, (1.0,), {}),
        (lambda x: np.asarray(x), (V,), {}),
        (lambda x: x[jnp.zeros(3) > 0], (V,), {}),
        (lambda x: x @ jnp.ones((2, 2)), (V,), {}),
        (lambda x: x, ("text",), {}),
        (lambda x: x, (object(),), {}),
        (lambda x: x, ({"a": V, "b": print},), {}),
        (lambda x: "text", (V,), {}),
        (lambda x, n: x, (V, [1, 2]), {"static_argnums": 1}),
        (lambda x, n: x, (V, np.ones(2)), {"static_argnames": "n"}),
        (lambda x, y: x, (V,), {}),
        (lambda x: x, (V, V), {}),
        (lambda x: x, (V,), {"static_argnums": 3}),
        (lambda x: x, (V,), {"static_argnames": "nobody"}),
        (lambda x: x, (V,), {"donate_argnames": "nobody"}),
        (lambda x: x, (V,), {"donate_argnums": 0, "static_argnums": 0}),
        (lambda x: x, (V,), {"compiler_options": {"no_such_option": 1}}),
        (lambda x: x, (2**70,), {}),
        (3, (V,), {}),
    ],
)
def test_errors_are_those_of_jax_jit(way, fun, args, options):
    with pytest.raises(Exception) as expected:
        jax.jit(fun, **options)(*args)
    with pytest.raises(type(expected.value)) as got:
        jaxtensile.jit(fun, budget="1TiB", **options)(*args)
    assert _first_line(got) == _first_line(expected)


def _first_line(info):
    return str(info.value).splitlines()[0].replace("jaxtensile.api.jit.", "").replace("jit()", "")


def test_a_leaked_tracer_is_refused_as_by_jax(way):
    leaked = []
    jax.jit(lambda x: leaked.append(x) or x)(1.0)
    ours, theirs = pair(lambda x: x + 1)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        theirs(leaked[0])
    with pytest.raises(jax.errors.UnexpectedTracerError):
        ours(leaked[0])


# ---- planned programs -----------------------------------------------------------------------------


def test_trace_and_lower_show_what_runs():
    args = chain_args()
    planned, report = squeezed(step, *args)
    plain = jax.jit(step)
    rewritten = planned.trace(*args).jaxpr
    assert "optimization_barrier" in str(rewritten)
    assert len(rewritten.eqns) > len(plain.trace(*args).jaxpr.eqns)
    compiled = planned.lower(*args).compile()
    use = compiled.memory_analysis()
    device = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes
    assert device == report.compiled.device <= report.budget < report.baseline.device
    expected = plain(*args)
    jax.tree.map(close, compiled(*args), expected)
    jax.tree.map(close, planned(*args), expected)


def test_a_program_that_fits_is_the_plain_one():
    def fun(x):
        return jnp.tanh(x @ x.T)

    ours, plain = jaxtensile.jit(fun, budget="1GiB"), jax.jit(fun)
    x = jnp.ones((8, 8))
    ours(x)
    assert ours.trace(x).jaxpr is plain.trace(x).jaxpr
    assert ours.lower(x).as_text() == plain.lower(x).as_text()
    assert ours.plan(x).unchanged


def test_plan_after_a_call_keeps_the_executable(way, monkeypatch):
    ours = jaxtensile.jit(lambda x: x * 2, **ROOM)
    ours(V)
    entry = next(iter(next(iter(ours._entries.values())).values()))
    jitted = entry.fitted.jitted
    monkeypatch.setattr(pipeline, "fit", None)  # nothing is planned again
    assert ours.plan(V).baseline.exact and ours.plan(V).compiled.exact
    assert entry.fitted.jitted is jitted


def test_plan_takes_abstract_arguments(way):
    ours = jaxtensile.jit(lambda s, n: {"a": s["a"] * n}, **ROOM)
    shape = {"a": jax.ShapeDtypeStruct((1 << 20, 1 << 10), jnp.float32)}
    report = ours.plan(shape, 2.0)
    assert report.compiled.argument >= 1 << 32 and report.fits
    assert ours._cache_size() == 0


# ---- threads --------------------------------------------------------------------------------------


def test_first_calls_from_many_threads_plan_once(way, monkeypatch):
    ours, theirs = pair(lambda x: jnp.tanh(x) * 2)
    planned, fit = [], pipeline.fit
    monkeypatch.setattr(pipeline, "fit", lambda job, **options: planned.append(job.name) or fit(job, **options))
    start, outs = threading.Barrier(8), [None] * 8

    def work(i):
        start.wait()
        outs[i] = (ours(V), ours(V[: 2 + i % 2]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(planned) == 3
    for i, out in enumerate(outs):
        same(out, (theirs(V), theirs(V[: 2 + i % 2])))


# ---- a jax that has changed -----------------------------------------------------------------------


def test_without_the_cpp_dispatcher_everything_still_works(way, monkeypatch):
    """What happens on a jax whose jit objects cannot be rebuilt."""
    monkeypatch.setattr(api._compat, "dispatcher", lambda fun, options, choose: api._compat._Slow(fun, choose))
    ours, theirs = pair(lambda d, x, n: {"y": d["w"] * x[:n]}, static_argnums=2, donate_argnums=0)
    for _ in range(2):
        results = [f({"w": jnp.ones(3)}, V, 3) for f in (ours, theirs)]
        same(*results)
    inside = jaxtensile.jit(loss, budget=1)
    np.testing.assert_array_equal(jax.grad(inside)(W, X), jax.grad(jax.jit(loss))(W, X))
    with jax.disable_jit():
        assert ours({"w": jnp.ones(3)}, V, 3)["y"].shape == (3,)
    ours.clear_cache()
    assert ours._cache_size() == 0
