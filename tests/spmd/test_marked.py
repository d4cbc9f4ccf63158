"""Every equation is found again in the lowered module, in bodies too, by the mark in its locations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtensile import _compat
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.spmd.marked import mark_of, module_of

V = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def marks(fun, *args):
    """Of the lowered program and, taken through HLO, of its operations."""
    program = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)
    module = module_of(program, args, ())
    text = _compat.through_hlo(module)
    there = module.operation.get_asm(enable_debug_info=True)
    return [{mark_of(found) for found in re.findall(r'loc\("[^"]*"', t)} for t in (there, text)], program


def test_equations_of_bodies_have_marks_of_their_own():
    def fun(x, y):
        z, each = lax.scan(lambda c, row: (jnp.tanh(c @ y), row * 2), x, x)
        z = lax.cond(z[0, 0] > 0, lambda z: z @ y, jnp.sin, z)
        return lax.while_loop(lambda z: z.sum() < 9, lambda z: jnp.exp(z), z), each

    found, program = marks(fun, V, V)
    loops = [op.id for op in program.graph.ops if op.bodies]
    expected = {f"{i}r0" for i in loops}
    for i in loops:
        for k, body in enumerate(program.graph.ops[i].bodies):
            expected |= {f"{i}.{k}.{op.id}" for op in body.ops if op.primitive in ("tanh", "dot_general", "sin", "exp")}
    assert len(expected) == 3 + 5
    for each in found:
        assert expected <= each


def test_a_shard_map_is_a_call_between_its_constraints():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    mapped = jax.shard_map(lambda x: lax.psum(jnp.sin(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    program = trace_jaxpr(jax.jit(lambda x: mapped(x) + 1).trace(V).jaxpr)
    text = str(module_of(program, [V], ()))
    assert text.count("@jaxtensile_shard_map") == 1 and "sine" not in text and "manual_computation" not in text


@pytest.mark.parametrize(
    ("location", "mark"),
    [
        ('loc("jit(evaluate)/jt7_/dot_general"(#loc3))', "7"),
        ('loc("jit(evaluate)/jt7_/while/body/jt7.0.12_/tanh")', "7.0.12"),
        ('loc("jit(evaluate)/jt7_/jt7r1_/optimization_barrier")', "7r1"),
        ('loc("jit(evaluate)/jt7_")', "7"),
        ('loc("jit(my_jt7_function)/add")', ""),
        ("loc(unknown)", ""),
    ],
)
def test_the_innermost_mark_counts(location, mark):
    assert mark_of(location) == mark
