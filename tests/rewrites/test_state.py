"""What may wait on the host between steps: what the update alone needs, and what replaces it."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.state import choose
from moments import LAYERS, N, adam, loss


def leaves(*names, dtype=jnp.float32, n=N):
    return {name: [jax.ShapeDtypeStruct((n, n), dtype)] * LAYERS for name in names}


def chosen(step, state, *, donate=(0,), most=None, batch=64):
    """Argument → output, by name, and what stays because of its place."""
    x = jax.ShapeDtypeStruct((batch, N), jnp.float32)
    traced = jax.jit(step, donate_argnums=donate).trace(state, x)
    donated = tuple(bool(a.donated) for a in jax.tree.leaves(traced.args_info))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)] + ["x"]
    outputs = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
    flat = trace_jaxpr(traced.jaxpr, donated, keep_unused=False)
    charge = op_costs(flat.graph, profile("nvidia-h200")).charge
    found, stay = choose(flat, charge, names, most)
    assert all(leaf.nbytes >= 1 << 20 for leaf in found)
    return {leaf.name: outputs[leaf.slot].removeprefix("[0]") for leaf in found}, stay


def of(*names):
    every = [f"['{name}'][{k}]" for name in names for k in range(LAYERS)]
    return dict(zip(every, every, strict=True))


def test_moments_move_and_parameters_stay():
    assert chosen(adam, leaves("m", "v", "w")) == (of("m", "v"), ())


def test_averages_and_master_weights_move():
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        grads = [g.astype(jnp.float32) for g in grads]
        m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        master = [w - 0.01 * m for w, m in zip(state["master"], m, strict=True)]
        ema = [0.9 * e + 0.1 * w for e, w in zip(state["ema"], master, strict=True)]
        return {"ema": ema, "m": m, "master": master, "w": [w.astype(jnp.bfloat16) for w in master]}, value

    state = {**leaves("ema", "m", "master"), **leaves("w", dtype=jnp.bfloat16, n=1024)}
    state["w"] = [jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * LAYERS
    assert chosen(step, state) == (of("ema", "m", "master"), ())


def test_momentum_with_weight_decay_is_replaced_by_momentum():
    # Old momentum and old parameters go into both: only their order tells which replaces which.
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        m = [0.9 * m + g + 0.1 * w for m, g, w in zip(state["m"], grads, state["w"], strict=True)]
        return {"m": m, "w": [w - 0.01 * m for w, m in zip(state["w"], m, strict=True)]}, value

    assert chosen(step, leaves("m", "w")) == (of("m"), ())


def test_a_global_norm_over_the_updates_is_no_obstacle():
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        norm = jnp.sqrt(sum((u * u).sum() for u in m))
        return {"m": m, "w": [w - 0.01 * m / norm for w, m in zip(state["w"], m, strict=True)]}, value

    assert chosen(step, leaves("m", "w"), batch=4096) == (of("m"), ())


def test_another_order_of_the_outputs_is_told():
    # jax.jit would give the buffer of an old parameter to a new moment: one on the device, one on the host.
    def step(state, x):
        new, value = adam(state, x)
        return {"a": new["w"], "m": new["m"], "v": new["v"]}, value

    found, stay = chosen(step, leaves("m", "v", "w"))
    assert not found and set(stay) == of("m", "v").keys()


@pytest.mark.parametrize("donate", [(), (1,)])
def test_what_is_not_donated_stays(donate):
    assert chosen(adam, leaves("m", "v", "w"), donate=donate) == ({}, ())


def test_small_leaves_stay():
    def small(state, x):
        return adam(state, x[:, :128])

    assert chosen(small, leaves("m", "v", "w", n=128)) == ({}, ())


def test_what_effects_depend_on_stays():
    def step(state, x):
        new, value = adam(state, x)
        jax.debug.print("{}", new["m"][0].sum())
        return new, value

    found, _ = chosen(step, leaves("m", "v", "w"))
    assert found == {k: v for k, v in of("m", "v").items() if k != "['m'][0]"}


def test_a_bound_takes_the_largest():
    assert len(chosen(adam, leaves("m", "v", "w"), most=4 << 20)[0]) == 4
    assert chosen(adam, leaves("m", "v", "w"), most=0) == ({}, ())


def test_what_is_given_back_as_it_came_stays():
    def step(state, x):
        new, value = adam(state, x)
        return new, (value, state["m"][0])

    assert "['m'][0]" not in chosen(step, leaves("m", "v", "w"))[0]
