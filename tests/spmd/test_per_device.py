"""Programs with the sizes of one device: as written, rewritten, and bodies alone."""

import json

from four_devices import on_four_devices

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtensile import _compat
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Program
from jaxtensile.program.bodies import bodies_of
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import retrace, trace_jaxpr
from jaxtensile.rewrites.loops.loops import loop_ladder, rewrite_loops
from jaxtensile.spmd.local_shapes import local_shapes, sharded
from jaxtensile.spmd.per_device import PerDevice

WIDTH, LAYERS, ROWS = 64, 3, 128
mesh = jax.make_mesh((4,), ("data",))

def loss(ws, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()

def place(shape, *spec, mesh=mesh):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec)))

args = place((LAYERS, WIDTH, WIDTH), None, "data"), place((ROWS, WIDTH), "data")
jitted = jax.jit(jax.grad(loss))
traced = jitted.trace(*args)
where = sharded(traced, args, {}, _compat.static_arguments(jitted), 4)
program = trace_jaxpr(traced.jaxpr)
local = PerDevice.of(program, local_shapes(program, where), profile("cpu").backend)
once = local(program)

def told(graph):
    def shapes(op):
        return [graph.values[r].shape for r in op.results]
    return [(op.primitive, op.flops, shapes(op), [*map(told, op.bodies)]) for op in graph.ops]

def straight(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x ** 2).mean()

auto = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

def by_rows(loss, ws):
    args = ws, place((ROWS, WIDTH), "data", mesh=auto)
    jitted = jax.jit(lambda ws, x: jax.tree.map(jnp.subtract, ws, jax.grad(loss)(ws, x)))
    traced = jitted.trace(*args)
    where = sharded(traced, args, {}, _compat.static_arguments(jitted), 4)
    program = trace_jaxpr(traced.jaxpr)
    return traced.jaxpr, PerDevice.of(program, local_shapes(program, where), profile("cpu").backend)

closed, in_loops = by_rows(loss, place((LAYERS, WIDTH, WIDTH), None, "data", mesh=auto))
looping = in_loops(trace_jaxpr(closed))
closed, gathers = by_rows(straight, [place((WIDTH, WIDTH), "data", mesh=auto) for _ in range(LAYERS)])
exchanging = gathers(trace_jaxpr(closed))
retraced = retrace(lambda *flat: emit(exchanging, Program.unchanged(exchanging.graph))(flat), closed)
rng = np.random.default_rng(0)
flat = [rng.normal(size=v.aval.shape).astype("f") for v in closed.jaxpr.invars]
same = [np.array_equal(a, b) for a, b in zip(jaxpr_as_fun(closed)(*flat), jaxpr_as_fun(retraced)(*flat), strict=True)]

ladder = loop_ladder(once.graph, profile("cpu"), None)
again = local(trace_jaxpr(rewrite_loops(once, traced.jaxpr, ladder.rungs[-1])))
held = lambda *flat: jaxpr_as_fun(traced.jaxpr)(*jax.lax.optimization_barrier(flat))
behind = local(trace_jaxpr(retrace(held, traced.jaxpr)))
scan = next(op.id for op in once.graph.ops if op.primitive == "scan")
(body,) = bodies_of(once, scan)
print(json.dumps({
    "whole": told(program.graph),
    "once": told(once.graph),
    "twice": told(local(once).graph),
    "again": told(again.graph),
    "behind": told(behind.graph),
    "body": told(body.traced().graph),
    "inside": told(local.inside(body.closed, body.graph)(body.traced()).graph),
    "exchanging": told(exchanging.graph),
    "exchanging again": told(gathers(trace_jaxpr(retraced)).graph),
    "read twice": sum(len([1 for r in exchanging.graph.ops for v in op.results if v in r.operands]) == 2
                      for op in exchanging.graph.ops if op.primitive == "all_gather"),
    "same": same,
    "workspaces": [[o.workspace for o in op.bodies[0].ops if o.workspace] for op in looping.graph.ops if op.bodies],
    "inputs": [once.graph.values[v].shape for v in once.graph.inputs],
}))
"""


def test_sizes(tmp_path):
    """Also: weights in rows are gathered once for two readers, and their gradients added up whole before a device keeps
    its rows, as values of their own, or in bodies as workspaces; a program retraced with them has no more."""
    done = on_four_devices(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["inputs"] == [[3, 16, 64], [32, 64]]
    assert found["twice"] == found["once"] and found["inside"] == found["body"]
    assert found["behind"][0][::2] == ["optimization_barrier", found["inputs"]]
    assert found["behind"][1:] == found["once"]
    scans = {k: [row for row in found[k] if row[0] == "scan"] for k in ("whole", "once", "again")}
    for whole, once in zip(scans["whole"], scans["once"], strict=True):
        assert once[1] == whole[1] / 4  # the work of one device
        assert [row[0] for row in once[3][0]] == [row[0] for row in whole[3][0]]
    forward, backward = scans["once"]
    assert [32, 64] in forward[2] and [3, 32, 64] in forward[2]  # rows are divided: the carry and its stacks
    assert [3, 16, 64] in backward[2]  # gradients like the weights
    forward, backward = scans["again"]  # stacks the carry alone, and computes the rest again
    assert forward[2] == [[32, 64], [3, 32, 64]] and backward[1] > scans["once"][1][1]
    products = [row for row in forward[3][0] if row[0] == "dot_general"]
    assert products and all(row[2] == [[32, 64]] for row in products)
    matrix = [64, 64]
    sums = [row for row in found["exchanging"] if row[0] == "psum"]
    assert [row[2] for row in sums] == [[[64, 16]]] * 3 and found["read twice"] == 2
    gathers = [row for row in found["exchanging"] if row[0] == "all_gather"]
    assert [row[2] for row in gathers] == [[matrix]] * 3
    assert found["exchanging again"] == found["exchanging"] and all(found["same"])
    forward, backward = found["workspaces"]
    assert forward == [64 * 64 * 4] and max(backward) == 2 * 64 * 64 * 4
