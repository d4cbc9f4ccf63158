"""What one device holds of every value: as XLA divides it, and by one ratio where JAX says nothing."""

import json

import pytest

from four_devices import on_four_devices

pytestmark = pytest.mark.xdist_group("local_shapes")  # one process: its programs are compiled once

PROGRAM = """
import json, random
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxtensile import _compat
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.spmd.local_shapes import divided, local_shapes, sharded

N = 16
DEVICES = np.array(jax.devices()).reshape(2, 2)
mesh = Mesh(DEVICES, ("a", "b"))
SPECS = [P(), P("a"), P("b"), P(None, "a"), P("a", "b"), P(("a", "b")), P("b", "a"), P(None, ("a", "b"))]

def by_hand(x, y):
    return jax.shard_map(lambda x, y: jnp.tanh(x) @ y, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))(x, y)

# Without branches, which XLA:CPU changes before it divides anything.
STEPS = [
    lambda x, y: x @ y,
    lambda x, y: x @ y.T,
    lambda x, y: jnp.tanh(x),
    lambda x, y: x + y,
    lambda x, y: x.T,
    lambda x, y: jnp.broadcast_to(x.sum(0), x.shape),
    lambda x, y: lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("a"))),
    lambda x, y: lax.scan(lambda c, row: (jnp.tanh(c @ y), row + 1), x, x)[0],
    lambda x, y: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ y) + x, x),
    lambda x, y: lax.optimization_barrier((x, y))[1],
    lambda x, y: jnp.where(x > 0, x, y),
    lambda x, y: x.reshape(4, 4, N).swapaxes(0, 1).reshape(N, N),
    by_hand,
    lambda x, y: jnp.concatenate([x[8:], y[:8]]),
    lambda x, y: x.at[3].set(y[0]),
]

def generated(seed):
    rng = random.Random(seed)
    specs = rng.choices(SPECS, k=rng.randint(2, 4))
    steps = [(rng.choice(STEPS), rng.random(), rng.random()) for _ in range(rng.randint(5, 9))]

    def fun(*args):
        values = list(args)
        for step, i, j in steps:
            values.append(step(values[int(i * len(values))], values[int(j * len(values))]))
        return values[len(args):]

    return fun, [jax.ShapeDtypeStruct((N, N), "float32", sharding=NamedSharding(mesh, s)) for s in specs]

def shapes(traced, args, **options):
    program = trace_jaxpr(traced.jaxpr)
    where = sharded(traced, args, {}, (frozenset(), frozenset()), 4)
    return program, where, local_shapes(program, where)

told = {"generated": []}
for seed in range(8):
    fun, args = generated(seed)
    traced = jax.jit(fun).trace(*args)
    program, where, found = shapes(traced, args)
    compiled = traced.lower().compile(compiler_options={"xla_backend_optimization_level": 0})
    told["generated"].append({
        "xla": [s.shard_shape((N, N)) for s in compiled.output_shardings],
        "ours": [[N // n for n in parts] for parts in found.outputs],
    })

def step(w, x):
    y, each = lax.scan(lambda x, w: (jnp.tanh(x @ w), (x * x).sum(1)), x, w)
    return jax.shard_map(lambda y: lax.psum(y, "b"), mesh=mesh, in_specs=P(None, "b"), out_specs=P())(y), each

def placed(shape, spec, kind=mesh):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(kind, spec))

args = [placed((3, N, N), P(None, None, "b")), placed((64, N), P("a"))]
program, where, found = shapes(jax.jit(step).trace(*args), args)
told["divided"] = divided(where)

def parts_of(op, shapes, graph):
    return [[op.primitive, *graph.values[r].shape, *shapes.parts[r]] for r in op.results]

(loop,) = [op.id for op in program.graph.ops if op.bodies and op.primitive == "scan"]
inside = program.graph.ops[loop].bodies[0]
told["inside"] = [line for op in inside.ops for line in parts_of(op, found.bodies[loop, 0], inside)]
told["around"] = [found.parts[r] for r in program.graph.ops[loop].results]

explicit = Mesh(DEVICES, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
args = [placed((N, N), P(None, "b"), explicit), placed((64, N), P("a"), explicit)]
traced = jax.jit(lambda w, x: jnp.tanh(x @ w).sum(0)).trace(*args)
program, where, found = shapes(traced, args)
told["explicit"] = [found.parts[r] for op in program.graph.ops for r in op.results]

def summed(w, x):
    parts = jnp.einsum("xy,yz->xz", x, w, out_sharding=P("a", None, unreduced={"b"}))
    return jnp.tanh(jax.sharding.reshard(parts + parts, P("a", None)))

with jax.set_mesh(explicit):
    args = [placed((N, N), P("b"), explicit), placed((64, N), P("a", "b"), explicit)]
    program, where, found = shapes(jax.jit(summed).trace(*args), args)
    told["unreduced"] = [found.parts[r] for op in program.graph.ops for r in op.results]

reference = jax.new_ref(jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P())))
args = [placed((64, N), P("a"))]
held = shapes(jax.jit(lambda x: jnp.tanh(x * reference[...][:, None]).sum(1)).trace(*args), args)[2]
told["a reference"] = [held.guessed, held.outputs]

qr = jax.jit(lambda w, x: jnp.linalg.qr(x)[1] @ w)  # a call with several results, which Shardy does not take from HLO
args = [placed((N, N), P(None, "b")), placed((64, N), P("a"))]
told["several"] = shapes(qr.trace(*args), args)[2].guessed

partly = jax.shard_map(
    lambda x, y: lax.psum(jnp.tanh(x @ y), "a"),
    mesh=mesh, in_specs=(P(None, "a"), P("a")), out_specs=P(), axis_names={"a"},
)
args = [placed((64, N), P("b", "a")), placed((N, N), P("a"))]
told["partly"] = shapes(jax.jit(partly).trace(*args), args)[2].outputs

def missing(*_):
    raise AttributeError("jaxlib has no passes any more")

_compat.through_hlo = missing
args = [placed((3, N, N), P(None, None, "b")), placed((64, N), P("a"))]
traced = jax.jit(step, donate_argnums=1).trace(*args)
program, where, found = shapes(traced, args)
told["guessed"] = found.guessed
told["by ratio"] = [found.parts[v] for v in (*program.graph.inputs, *program.graph.outputs)]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    done = on_four_devices(PROGRAM, tmp_path_factory.mktemp("home"))
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_value_has_the_shape_that_xla_gives_it(told):
    programs = told["generated"]
    assert sum(len(p["xla"]) for p in programs) > 40
    assert [p["ours"] for p in programs] == [p["xla"] for p in programs]


def test_arguments_are_divided_as_they_are_placed(told):
    assert told["divided"] == [2, 2]


def test_what_is_inside_of_a_loop_is_divided_too(told):
    assert told["around"] == [[2, 2], [1, 2]]
    assert ["dot_general", 64, 16, 2, 2] in told["inside"] and ["reduce_sum", 64, 2] in told["inside"]


def test_types_with_explicit_axes_say_it_themselves(told):
    assert told["explicit"] == [[2, 2], [2, 2], [2]]


def test_parts_of_sums_are_whole(told):
    assert {*map(tuple, told["unreduced"])} == {(2, 1)}


def test_a_reference_that_is_closed_over_stays_one(told):
    assert told["a reference"] == ["", [[2]]]


def test_what_shardy_does_not_take_from_hlo_is_propagated_as_jax_wrote_it(told):
    assert not told["several"]


def test_a_shard_map_over_some_axes_leaves_the_others_to_shardy(told):
    assert told["partly"] == [[2, 1]]


def test_without_jaxs_private_parts_all_but_the_arguments_has_one_ratio(told):
    assert "no passes any more" in told["guessed"]
    weights, rows, last, each = told["by ratio"]
    assert (weights, rows) == ([1, 1, 2], [2, 1])
    assert last == [2, 1] and each == [1, 2]
