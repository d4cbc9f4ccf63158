"""Requests to plan a function, without the door that users enter by."""

import jax
import msgspec
import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.passes.verify.check import check
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.search import variants
from jaxtensile.search.recipe import Recipe, fingerprint, recipe_of, replay
from jaxtensile.search.request import Request
from jaxtensile.search.variant import program_key
from programs import FAST, chain_args, step

ARGS = chain_args(layers=12, width=8, rows=256)


def opened(fun, *args, device="nvidia-h200", **fields):
    """A job for ``fun``, and its written variant."""
    jaxpr = jax.jit(fun).trace(*args).jaxpr
    work = Request(
        **{
            "name": "f",
            "jaxpr": jaxpr,
            "donated": (False,) * len(jax.tree.leaves(args)),
            "args": args,
            "kwargs": {},
            "budget": 1 << 40,
            "device": profile(device),
            "shards": 1,
            "make": None,
            "options": {},
            **fields,
        }
    )
    traced = trace_jaxpr(jaxpr, work.donated)
    return work, variants.written(work, traced, op_costs(traced.graph, work.device), prepare)


def there_and_back(start, variant, plan):
    """Through bytes, into a variant that knows nothing of the first."""
    told = msgspec.msgpack.encode(recipe_of(variant, plan))
    recipe = msgspec.msgpack.decode(told, type=Recipe)
    again, same = replay(recipe, start)
    assert same == plan
    assert (again.loops, again.taken, again.aside) == (variant.loops, variant.taken, variant.aside)
    assert again.charge == pytest.approx(variant.charge) and again.seconds == pytest.approx(variant.seconds)
    assert fingerprint(again.traced.graph) == fingerprint(variant.traced.graph)
    assert program_key(again, same) == program_key(variant, plan)
    assert again.problem.link == variant.problem.link and again.problem.host_budget == variant.problem.host_budget
    check(again.problem.graph, same.program)
    return recipe


def job(budget, fun=step, args=ARGS, **fields):
    traced = jax.jit(fun).trace(*args)

    def make(evaluate, options):
        def run(*args):
            return jax.tree.unflatten(traced.out_tree, evaluate(jax.tree.leaves(args)))

        return jax.jit(fun if evaluate is None else run, compiler_options=dict(options) or None)

    known = {
        "name": "step",
        "jaxpr": traced.jaxpr,
        "donated": (False,) * len(jax.tree.leaves(args)),
        "args": args,
        "kwargs": {},
        "budget": budget,
        "device": profile("cpu"),
        "shards": 1,
        "make": make,
        "options": FAST,
    }
    return Request(**(known | fields))
