"""Whole training steps for an H200 and a v5e that are not here: XLA for that device says that plans hold."""

import functools
import importlib
import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import jaxtensile
from jax_lines import in_a_soak
from jaxtensile import switches
from jaxtensile.api.feedback import slowed
from jaxtensile.planner import renewal
from jaxtensile.program.trace import jaxpr_flops
from jaxtensile.spmd.location import location
from jaxtensile.xla.target import resolve

workloads = importlib.import_module("benchmarks.workloads")
kernel_cache = importlib.import_module("benchmarks.machine").kernel_cache

H200, V100, V5E = "nvidia-h200", "nvidia-v100-16gb", "tpu-v5e"
KERNELS = kernel_cache(Path(os.environ["XDG_CACHE_HOME"]) / "kernels")
"""A kernel is compiled once for all programs of this process."""
pytestmark = pytest.mark.xdist_group("deviceless")  # in one process: programs as they are, and kernels, once


def mlp(layers=10, side=1024):
    """Square layers, a batch of 16384, momentum."""

    def loss(weights, x):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    def train_step(state, x):
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        momentum = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        weights = [w - 0.01 * m for w, m in zip(state["w"], momentum, strict=True)]
        return {"w": weights, "m": momentum}, value

    weights = [jax.ShapeDtypeStruct((side, side), jnp.bfloat16)] * layers
    args = {"w": weights, "m": weights}, jax.ShapeDtypeStruct((16384, side), jnp.bfloat16)
    return jaxtensile.Workload(fun=train_step, args=args, jit_options={"donate_argnums": 0}, name="mlp")


def gpt(**sizes):
    module = workloads.load("gpt2_small")
    return module.workload(
        module.Config(**{"layers": 4, "width": 256, "heads": 4, "vocab": 4096, "context": 256} | sizes)
    )


def resnet():
    module = workloads.load("resnet50")
    return module.workload(module.Config(batch=64, image=64, stages=(2, 2), width=32, classes=100))


def dlrm():
    module = workloads.load("dlrm")
    return module.workload(module.Config(batch=32768, rows=(1000,) * 14, top=(256, 1)))


SUBJECTS = {"gpt": functools.partial(gpt, batch=32), "mlp": mlp, "resnet": resnet}
OTHERS = {
    "shallow": functools.partial(mlp, layers=4),
    "narrow": functools.partial(mlp, layers=4, side=256),
    "deep": functools.partial(mlp, layers=16),
}
"""Where few or narrow layers show the same, and where it takes many."""


@functools.cache
def subject(name):
    return (SUBJECTS | OTHERS)[name]()


def plan(work, budget, target=H200, **options):
    options = {"compiler_options": KERNELS if target == H200 else None, **options, **work.jit_options}
    return jaxtensile.jit(work.fun, budget=budget, target=target, **options).plan(*work.args)


@functools.cache
def plain(name, target=H200):
    """The report of the program as it is."""
    return plan(subject(name), "100%", target)


def at(share, name, target=H200):
    use = plain(name, target).compiled
    return use.device - int((1 - share) * use.temp)


def check_report(report):
    assert report.compiled.exact and report.baseline.exact
    assert report.lower_bound <= report.compiled.device <= report.budget < report.baseline.device
    assert report.compiled.argument == report.baseline.argument
    assert report.compiled.alias == report.baseline.alias
    assert report.compiled.host == 0
    assert not report.unchanged and report.rounds >= 1
    assert report.stages > 0 or report.rewritten


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", ["gpt", "mlp", "resnet"])
def test_what_fits_an_h200_is_left_alone(name):
    report = plain(name)
    assert report.unchanged and report.fits and report.target == H200 and report.rounds == 0
    assert report.compiled == report.baseline and report.compiled.exact
    assert report.recompute_flops == 0 and report.overhead == 0
    assert report.compiled.temp > report.compiled.argument, "residuals are most of it"


@pytest.mark.cuda_aot
@pytest.mark.parametrize(
    "name, share",
    [
        pytest.param("gpt", 0.6, marks=in_a_soak),
        pytest.param("gpt", 0.4, marks=in_a_soak),
        ("mlp", 0.6),
        ("mlp", 0.3),
        pytest.param("resnet", 0.7, marks=in_a_soak),
    ],
)
def test_a_step_fits_a_smaller_budget(name, share):
    report = plan(subject(name), at(share, name))
    check_report(report)
    assert 0 <= report.recompute_flops < report.flops / 2
    if (name, share) in (("gpt", 0.4), ("mlp", 0.3)):
        assert report.recompute_flops > 0 and report.overhead > 0


@pytest.mark.cuda_aot
def test_what_is_lowered_is_what_was_planned():
    work = subject("mlp")
    step = jaxtensile.jit(work.fun, budget=at(0.5, "mlp"), target=H200, **work.jit_options)
    report = step.plan(*work.args)
    use = step.lower(*work.args).compile().memory_analysis()
    device = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes
    assert device == report.compiled.device <= report.budget
    assert "optimization_barrier" in str(step.trace(*work.args).jaxpr)
    assert [x.shape for x in jax.tree.leaves(step.eval_shape(*work.args))] == [
        x.shape for x in jax.tree.leaves(jax.eval_shape(work.fun, *work.args))
    ]


@pytest.mark.cuda_aot
def test_arguments_on_the_absent_device_say_the_target_themselves():
    """``target=None`` with abstract arguments placed there."""
    work = subject("mlp")
    there = SingleDeviceSharding(resolve(H200))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), work.args)
    step = jaxtensile.jit(work.fun, budget=at(0.5, "mlp"), **work.jit_options)
    report = step.plan(*args)
    check_report(report)
    assert report.target == H200


@pytest.mark.cuda_aot
def test_a_budget_that_no_plan_meets_names_the_ops():
    work = subject("shallow")
    fixed = plain("shallow").compiled.argument
    with pytest.raises(jaxtensile.BudgetError) as info:
        plan(work, fixed + 1000)
    assert info.value.needs > fixed + 1000 and info.value.culprits
    assert any("test_deviceless.py" in c.source for c in info.value.culprits)


@pytest.mark.cuda_aot
def test_values_wait_on_the_host_instead():
    """XLA holds on the host what was planned to be there, and less is computed twice.

    By the kernels of both, a plan without copies takes less time, and would be taken.
    """
    work, budget = subject("deep"), at(0.34, "deep")
    alone = plan(work, budget)
    step = jaxtensile.jit(work.fun, budget=budget, host_budget="8GiB", target=H200, **work.jit_options)
    taken = step.plan(*work.args)
    step.clear_cache()
    with switches.off("contest"):
        both = step.plan(*work.args)
    assert taken.fits and taken.kernels.seconds < both.kernels.seconds
    assert both.compiled.device <= budget and both.fits
    assert both.compiled.host == both.offload_bytes == both.predicted.host > 0
    assert both.recompute_flops < alone.recompute_flops and alone.compiled.host == 0
    assert "offload" in {d.kind for d in both.decisions}
    assert "offloaded" in str(both) and "to the host and back in a step" in str(both)


def normed():
    """Dense layers with a batch norm each: the backward pass reads their inputs centred and scaled, in no buffer."""

    def loss(ws, x):
        for w in ws:
            z = x @ w
            x = jax.nn.relu((z - z.mean(0)) * jax.lax.rsqrt(z.var(0) + 1e-5))
        return jnp.mean(x**2)

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    weight = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    args = ([weight] * 12, jax.ShapeDtypeStruct((8192, 2048), jnp.float32))
    return jaxtensile.Workload(fun=step, args=args, jit_options={"donate_argnums": 0}, name="normed")


@pytest.mark.cuda_aot
def test_what_is_read_through_fused_values_waits_on_the_host():
    """Half of the temporaries for nothing where the link is fast beside the work; without the host it costs a tenth."""
    work = normed()
    whole = plan(work, "15GiB", V100).compiled
    budget = whole.device - whole.temp // 2
    step = jaxtensile.jit(work.fun, budget=budget, host_budget="8GiB", target=V100, **work.jit_options)
    report = step.plan(*work.args)
    assert report.compiled.device <= budget and report.rounds == 1
    assert report.compiled.host == report.offload_bytes > whole.temp // 2
    assert report.recompute_flops == 0 and report.overhead_ratio < 0.001
    assert plan(work, budget, V100).overhead_ratio > 0.05


@pytest.mark.cuda_aot
def test_where_work_takes_longer_than_thought_more_waits_on_the_host():
    """Copies hide behind slower work and recomputation does not; where nothing is gained, nothing is compiled."""
    work, budget = subject("mlp"), at(0.26, "mlp")
    step = jaxtensile.jit(work.fun, budget=budget, host_budget="8GiB", target=H200, **work.jit_options)
    entry, args, kwargs = step._planned(work.args, {})
    first, traced = entry.fitted, step._plain.trace(*work.args)
    job = step._request(traced, location(traced, args, kwargs, {}), args, kwargs)

    def renewed(factor):
        took, asked = factor * first.report.step, []
        slower = first.time.slower(took)
        return renewal.renew(
            replace(job, device=slowed(job.device, slower)), took / 1.02, first.key, asked.append
        ), asked

    assert first.report.step == pytest.approx(first.time.work + first.report.wait, rel=0.02)
    same, asked = renewed(1.5)
    assert same is None and not [name for name in asked if "compile" in name]
    other, asked = renewed(10.0)
    assert other is not None and asked.count("compile planned") == other.report.rounds and "compile plain" not in asked
    assert other.report.step < 9.9 * first.report.step and other.report.recompute_flops < first.report.recompute_flops
    assert other.report.compiled.host == other.report.offload_bytes > first.report.offload_bytes
    assert other.report.compiled.device <= budget


def ode():
    module = workloads.load("ode")
    return module.workload(module.Config(batch=4, grid=256, steps=200))


@pytest.mark.parametrize(
    "target", [pytest.param(H200, marks=pytest.mark.cuda_aot), pytest.param(V5E, marks=pytest.mark.tpu_aot)]
)
def test_what_a_loop_stacks_waits_on_the_host(target):
    """One field of 2 MiB per step is on the host; without it that many bytes are on the device."""
    work = ode()
    step = jaxtensile.jit(work.fun, budget="400MB", host_budget="1GiB", target=target, **work.jit_options)
    report = step.plan(*work.args)
    assert report.compiled.exact and report.compiled.device <= report.budget
    assert report.compiled.host == report.offload_bytes == 200 * 2 << 20 > report.budget
    assert "offload" in {d.kind for d in report.decisions}
    assert report.wait > 0
    if target == H200:
        strides = slice_strides(step.lower(*work.args).compile().as_text(), "f32[1,4,256,256,2]")
        assert all(stride < 0 for stride in strides), "the backward loop reads the last slice first"


@pytest.mark.tpu_aot
def test_straight_line_code_waits_on_the_host_of_a_tpu():
    """XLA keeps both ends of a copy."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    def train_step(weights, x):
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)] * 12, jax.ShapeDtypeStruct((32768, 2048), jnp.bfloat16)
    step = jaxtensile.jit(train_step, budget="1.1GB", host_budget="1GiB", target=V5E, chunk=False, donate_argnums=0)
    report = step.plan(*args)
    assert report.compiled.exact and report.compiled.device <= report.budget
    assert 1 << 30 >= report.compiled.host >= report.offload_bytes > 0


def loop(length, unroll=1):
    def loss(w, x):
        def body(c, _):
            for _ in range(4):
                c = jnp.sin(jnp.tanh(c @ w)) * c
            return c, None

        return (jax.lax.scan(body, x, length=length, unroll=unroll)[0] ** 2).sum()

    args = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    return jaxtensile.Workload(fun=jax.grad(loss), args=args, jit_options={}, name="loop")


@pytest.mark.cuda_aot
@in_a_soak
def test_what_an_error_names_is_the_same_whatever_was_asked_and_is_met():
    work = gpt(layers=2, batch=16)

    def ask(budget):
        options = {"host_budget": "1GiB", "target": H200, "compiler_options": KERNELS, **work.jit_options}
        return jaxtensile.jit(work.fun, budget=budget, **options).plan(*work.args)

    named = set[int]()
    for budget in (130_000_000, 137_000_000):
        with pytest.raises(jaxtensile.BudgetError) as info:
            ask(budget)
        named.add(info.value.needs)
    (smallest,) = named
    assert ask(smallest).compiled.device <= smallest


@pytest.mark.cuda_aot
def test_what_fits_without_the_host_fits_with_a_host_budget():
    """XLA unrolls a loop of two iterations, and then cancels the copies."""
    work = loop(2)
    alone = jaxtensile.jit(work.fun, budget="180MiB", target=H200).plan(*work.args)
    budget = alone.compiled.device + (2 << 20)
    both = jaxtensile.jit(work.fun, budget=budget, host_budget="1GiB", target=H200).plan(*work.args)
    assert both.fits and both.compiled.host == both.offload_bytes


@pytest.mark.cuda_aot
@in_a_soak
def test_an_unrolled_loop_stacks_on_the_host():
    work, budget = loop(16, unroll=5), "160MiB"
    with pytest.raises(jaxtensile.errors.BudgetError):
        jaxtensile.jit(work.fun, budget=budget, target=H200, chunk=False).plan(*work.args)
    step = jaxtensile.jit(work.fun, budget=budget, host_budget="1GiB", target=H200, chunk=False)
    report = step.plan(*work.args)
    assert report.fits and report.compiled.host == report.offload_bytes == 16 * 8 << 20


def slice_strides(hlo, shape):
    """By how many bytes an iteration XLA takes the place of such a slice to move on, where it takes it to be linear."""
    found = []
    for line in hlo.splitlines():
        if re.search(rf"= {re.escape(shape)}\S* dynamic-slice\(", line) and "dynamic_slice_config" in line:
            linear = re.search(r'"linear":\{[^}]*"byte_stride":"(-?\d+)"', line)
            found.append(int((linear or re.search(r'"byte_stride":"(-?\d+)"', line))[1]))
    return found


@pytest.mark.cuda_aot
def test_a_product_that_is_read_in_slices_is_never_there_whole():
    """DLRM's interactions: two products of one stack, added and taken apart. Recomputation cannot get below them."""
    SUBJECTS.setdefault("dlrm", dlrm)
    report = plan(subject("dlrm"), at(0.65, "dlrm"), chunk=False)
    check_report(report)
    assert any("read in slices only" in note for note in report.notes)


@pytest.mark.cuda_aot
def test_checkpoints_by_hand_are_undone_where_there_is_room():
    """With room for all: the bytes and FLOPs of the step without them. With some room: something in between."""
    module = workloads.load("gpt2_small")
    config = module.Config(layers=4, width=256, heads=4, vocab=4096, context=256, batch=32)
    work = module.workload(config, remat=jax.checkpoint_policies.nothing_saveable)

    def at_most(budget, **options):
        options = {**work.jit_options, "compiler_options": KERNELS, **options}
        step = jaxtensile.jit(work.fun, budget=budget, target=H200, **options)
        return step.plan(*work.args), jaxpr_flops(step.trace(*work.args).jaxpr)

    free, (written, flops) = plain("gpt"), at_most("100%", undo=False)
    assert written.unchanged and written.flops == flops > free.flops
    assert written.compiled.device < free.compiled.device
    report, flops = at_most("100%")
    assert report.undone and report.rounds == 0 and report.fits
    assert report.compiled.device == free.compiled.device and report.baseline == written.compiled
    assert flops == free.flops == report.flops + report.recompute_flops
    room = (free.compiled.device - written.compiled.device) // 4
    report, flops = at_most(written.compiled.device + room)
    assert report.undone and report.fits and report.stages > 0
    assert free.flops < flops == report.flops + report.recompute_flops < written.flops
    assert "jax.checkpoint undone" in str(report)


@pytest.mark.tpu_aot
def test_a_step_for_a_v5e():
    assert plain("narrow", V5E).unchanged
    report = plan(subject("narrow"), at(0.85, "narrow", V5E), V5E, chunk=False)
    check_report(report)
    assert report.target == V5E


def adam(layers=6, side=2048, batch=8192):
    """Layers of f32, Adam: the moments are two thirds of the arguments."""

    def loss(weights, x):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return (x**2).mean()

    def train_step(state, x):
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        m = [0.9 * m + 0.1 * g for m, g in zip(state["m"], grads, strict=True)]
        v = [0.99 * v + 0.01 * g * g for v, g in zip(state["v"], grads, strict=True)]
        w = [w - 0.01 * a / (jnp.sqrt(b) + 1e-6) for w, a, b in zip(state["w"], m, v, strict=True)]
        return {"w": w, "m": m, "v": v}, value

    weights = [jax.ShapeDtypeStruct((side, side), jnp.float32)] * layers
    args = {"w": weights, "m": weights, "v": weights}, jax.ShapeDtypeStruct((batch, side), jnp.float32)
    return jaxtensile.Workload(fun=train_step, args=args, jit_options={"donate_argnums": 0}, name="adam")


@pytest.mark.cuda_aot
def test_the_state_is_on_the_host_and_off_the_device():
    work = adam()
    moved = 12 * 4 * 2048 * 2048
    before = plan(work, "100%").compiled
    step = jaxtensile.jit(work.fun, budget="100%", target=H200, offload_state=True, **work.jit_options)
    report = step.plan(*work.args)
    assert report.fits and not report.unchanged and report.rounds == 0
    assert report.baseline.device == before.device and report.baseline.host == 0
    # XLA counts the old and the new state once, as one buffer of the host.
    assert report.compiled.host == moved == report.offload_bytes
    assert report.compiled.argument == before.argument - moved
    assert report.compiled.alias == before.alias - moved
    assert report.compiled.device <= before.device - 0.8 * moved
    assert report.predicted.host == moved and report.predicted.argument == report.compiled.argument
    text = step.lower(*work.args).compile().as_text()
    assert text.count("S(5)} parameter(") == 12
    # Nothing is copied in before the forward pass is over.
    entry = text[text.index("\nENTRY") :].splitlines()
    copies = [i for i, line in enumerate(entry) if " copy-start(" in line]
    products = [i for i, line in enumerate(entry) if "gemm" in line or "custom-call" in line]
    assert len(copies) == 24 and sum(i < copies[0] for i in products) >= 6


@pytest.mark.cuda_aot
def test_the_state_on_the_host_leaves_room_for_residuals():
    work = adam()
    use = plan(work, "100%").compiled
    budget = use.device - int(0.7 * use.temp)
    alone = plan(work, budget)
    step = jaxtensile.jit(work.fun, budget=budget, target=H200, offload_state=True, **work.jit_options)
    report = step.plan(*work.args)
    assert report.fits and report.recompute_flops < alone.recompute_flops
    assert report.wait > 0 and report.overhead >= report.wait


@pytest.mark.tpu_aot
def test_the_state_is_on_the_host_of_a_tpu():
    work = adam(layers=4, side=1024, batch=1024)
    moved = 8 * 4 * 1024 * 1024
    arguments = moved * 3 // 2 + 4 * 1024 * 1024
    # Less than all arguments: at no time is all state on the device.
    options = {"objective": "flops", "chunk": False, "offload_state": True, **work.jit_options}
    step = jaxtensile.jit(work.fun, budget=int(0.6 * arguments), target=V5E, **options)
    report = step._planned(work.args, {})[0].fitted.report
    assert report.fits and report.recompute_flops == 0 and len(report.state) == 8
    assert report.compiled.host == moved == report.offload_bytes
    assert report.compiled.argument == report.predicted.argument == arguments - moved
