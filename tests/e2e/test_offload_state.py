"""``jaxtensile.jit(offload_state=True)``: the same steps, with the state on the host between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from adam_steps import LAYERS, N, batch, init, loss, train_step, where
from jaxtensile.api import jit as api
from jaxtensile.api.feedback import SKIPPED, TIMED
from jaxtensile.planner import pipeline
from jaxtensile.spmd import placement
from programs import squeezed

WHERE = {"ema": "pinned_host", "m": "pinned_host", "v": "pinned_host", "w": "device", "count": "device"}


def jitted(fun=train_step, budget="1GiB", **options):
    return jaxtensile.jit(fun, budget=budget, offload_state=True, donate_argnums=0, **options)


def close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * max(1.0, float(np.abs(b).max())))


@pytest.fixture(scope="module")
def step():
    return jitted()


@pytest.fixture(scope="module")
def plain():
    return jax.jit(train_step, donate_argnums=0)


def test_steps_are_those_of_jax_jit(step, plain):
    ours, theirs = init(), init()
    for k in range(4):
        ours, value = step(ours, batch(k))
        theirs, expected = plain(theirs, batch(k))
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        assert where(ours) == WHERE
    close(ours, theirs)


def test_what_was_donated_is_gone(step):
    state = init()
    new, _ = step(state, batch(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.nbytes > 8)
    newer, _ = step(new, batch(1))
    assert all(x.is_deleted() for x in jax.tree.leaves(new) if x.nbytes > 8)
    assert not any(x.is_deleted() for x in jax.tree.leaves(newer))


def test_one_plan_and_one_compile_serve_all_calls(monkeypatch):
    fits, traces = [], []
    fit = pipeline.fit
    monkeypatch.setattr(pipeline, "fit", lambda *a, **k: fits.append(1) or fit(*a, **k))

    def counted(state, x):
        traces.append(1)
        return train_step(state, x)

    step = jitted(counted)
    state, _ = step(init(), batch(0))
    with jax.log_compiles(False):
        for k in range(SKIPPED + TIMED + 2):
            state, _ = step(state, batch(k))
        monkeypatch.setattr(api._compat, "under_trace", None)  # Python, which asks that first, is not asked
        state, _ = step(state, batch(4))
    assert len(fits) == len(traces) == 1
    assert where(state) == WHERE


def test_arrays_on_the_device_and_of_numpy_are_moved_again(step, plain):
    state, theirs = init(), init()
    for k in range(3):
        state, _ = step(state, batch(k))
        theirs, _ = plain(theirs, batch(k))
        # Once as a restored checkpoint on the device, once as it was read from a file.
        state = jax.tree.map(jnp.asarray if k else np.asarray, jax.device_get(state))
    close(step(state, batch(5))[0], plain(theirs, batch(5))[0])


def test_a_run_resumes_from_a_file(step, plain, tmp_path):
    state, theirs = init(), init()
    for k in range(2):
        state, _ = step(state, batch(k))
        theirs, _ = plain(theirs, batch(k))
    flat, tree = jax.tree.flatten(jax.device_get(state))
    np.savez(tmp_path / "state.npz", *flat)
    with np.load(tmp_path / "state.npz") as saved:
        state = jax.tree.unflatten(tree, [saved[f"arr_{i}"] for i in range(len(flat))])
    for k in range(2, 4):
        state, _ = jitted()(state, batch(k))
        theirs, _ = plain(theirs, batch(k))
    close(state, theirs)


def test_a_run_resumes_through_orbax(step, plain, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    state, theirs = init(), init()
    for k in range(2):
        state, _ = step(state, batch(k))
        theirs, _ = plain(theirs, batch(k))
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = saver.restore(tmp_path / "state", like)
    assert where(restored) == WHERE
    close(step(restored, batch(2))[0], plain(theirs, batch(2))[0])


def test_the_report_names_what_waits(step):
    report = step.plan(init(), batch(0))
    assert [leaf.name for leaf in report.state] == [f"state['{n}'][{k}]" for n in ("ema", "m", "v") for k in range(3)]
    assert report.offload_bytes == sum(leaf.nbytes for leaf in report.state) == 9 * N * N * 4
    assert not report.unchanged and report.fits
    assert "state['ema'][0]" in str(report)
    assert report.to_dict()["state"][0] == {"name": "state['ema'][0]", "nbytes": N * N * 4}
    # Of shapes alone the same is planned, and of arrays that are on the host already.
    assert step.plan(jax.eval_shape(init), jax.eval_shape(lambda: batch(0))).state == report.state
    assert step.plan(step(init(), batch(0))[0], batch(0)).state == report.state


def test_what_is_lowered_is_what_runs(step):
    lowered = step.lower(init(), batch(0))
    assert "pinned_host" in lowered.as_text()
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(step(init(), batch(0))[0])]
    assert kinds.count("pinned_host") == 9


def test_together_with_recomputation():
    def deep(state, x):
        def loss(weights, x):
            for w in weights:
                for _ in range(4):
                    x = jnp.tanh(x @ w)
            return (x * x).sum()

        grads = jax.grad(loss)(state["w"], x)
        m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        return {"m": m, "w": [w - 0.01 * m for w, m in zip(state["w"], m, strict=True)]}

    def fresh():
        w = init()["w"]
        return {"m": [0.1 * a for a in w], "w": w}

    x = jnp.tile(batch(0), (64, 1))
    step, report = squeezed(deep, fresh(), x, donate_argnums=0, offload_state=True, chunk=False)
    assert len(report.state) == LAYERS and report.actions and report.fits
    close(step(fresh(), x), jax.jit(deep)(fresh(), x))


def test_a_host_budget_bounds_it():
    step = jitted(host_budget=4 * N * N * 4)
    state, _ = step(init(), batch(0))
    assert sum(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state)) == 4
    assert jitted(host_budget=0).plan(init(), batch(0)).unchanged


def test_under_another_transform_and_without_jit(step):
    state, _ = step(init(), batch(0))
    expected = train_step(jax.device_get(state), batch(1))[1]
    np.testing.assert_allclose(jax.jit(lambda s, x: step(s, x)[1])(state, batch(1)), expected, rtol=1e-4)
    with jax.disable_jit():
        np.testing.assert_allclose(step(state, batch(1))[1], expected, rtol=1e-4)


def test_static_arguments_keywords_and_methods():
    class Trainer:
        @jaxtensile.jit(
            budget="1GiB", offload_state=True, donate_argnames="state", static_argnums=0, static_argnames="rate"
        )
        def step(self, x, *, state, rate):
            return train_step(state, x, rate=rate)

    state, _ = Trainer().step(batch(0), state=init(), rate=0.1)
    assert where(state) == WHERE
    close(state, train_step(init(), batch(0), rate=0.1)[0])


def test_nothing_to_move_is_said():
    report = jitted(lambda w, x: w - 0.1 * jax.grad(lambda w: loss([w], x))(w)).plan(init()["w"][0], batch(0))
    assert not report.state and any("no donated argument" in note for note in report.notes)

    def swapped(state, x):
        new, value = train_step(state, x)
        return {"a": new["w"], **{name: new[name] for name in ("ema", "m", "v")}}, value

    report = jitted(swapped).plan(init(), batch(0))
    assert not report.state and any("in the arguments' order" in note for note in report.notes)


def test_wrong_use_is_an_error_with_a_way_out():
    with pytest.raises(ValueError, match="places the arguments itself"):
        jaxtensile.jit(train_step, offload_state=True, in_shardings=None)


def test_a_tpu_that_gives_back_something_else_is_refused(monkeypatch):
    class Tpu:
        platform, device_kind, client = "tpu", "TPU v5e", None

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    monkeypatch.setattr(placement, "host_sharding", lambda _: sharding)
    monkeypatch.setattr(placement, "state_comes_back", lambda _: False)
    with pytest.raises(jaxtensile.errors.TargetError, match="leave offload_state= out"):
        placement.Placement(None, active=lambda: True).job_place(Tpu(), (), {})
    monkeypatch.setattr(placement, "state_comes_back", lambda _: True)
    assert placement.Placement(None, active=lambda: True).job_place(Tpu(), (), {}) is not None


@pytest.mark.cuda_aot
def test_state_that_a_branch_takes_in_at_once_stays_where_it_is():
    """Updates every few steps, as ``optax.MultiSteps`` makes them, in a branch that needs all of the state."""

    def step(state, x):
        def update(state):
            return {"w": state["w"] - 0.1 * state["m"], "m": 0.9 * state["m"], "n": 0 * state["n"]}

        loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(state["w"])
        state = {**state, "m": state["m"] + grad, "n": state["n"] + 1}
        return jax.lax.cond(state["n"] == 4, update, lambda state: state, state), loss

    wide = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    args = (
        {"w": wide, "m": wide, "n": jax.ShapeDtypeStruct((), jnp.int32)},
        jax.ShapeDtypeStruct((64, 2048), jnp.float32),
    )
    options = {"target": "nvidia-h200", "donate_argnums": 0}
    plain = jaxtensile.jit(step, budget="10GiB", **options).plan(*args)
    report = jaxtensile.jit(step, budget="10GiB", offload_state=True, **options).plan(*args)
    assert report.compiled.device <= plain.compiled.device
    assert report.state or any("offload_state= has no effect" in note for note in report.notes)
