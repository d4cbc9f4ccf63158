"""What is read from the text of a compiled program, beside what JAX's own counts say and what the same program without
XLA's recomputation has."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import jaxtensile
from jaxtensile.devices.backends import CUDA
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import NOTHING_AGAIN
from jaxtensile.program.trace import jaxpr_flops
from jaxtensile.xla.compile import not_recomputing, recomputing
from jaxtensile.xla.hlo import hlo_flops, recomputed
from jaxtensile.xla.target import resolve

A100 = "nvidia-a100-40gb"
LAYERS, WIDTH, ROWS = 12, 4096, 65536
"""About 37 GiB, where XLA recomputes from 30 on."""


def train_step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = y + jax.nn.gelu(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


ARGS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def there(args, target):
    sharding = SingleDeviceSharding(resolve(target))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)


@pytest.mark.cuda_aot
def test_flops_of_the_compiled_program_are_those_of_the_traced_one():
    """Products in a loop, a strided convolution and both of its gradients."""
    sharding = SingleDeviceSharding(resolve("nvidia-h200"))

    def loss(w, k, x, images):
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]
        y = jax.lax.conv_general_dilated(images, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (x**2).sum() + (jnp.sin(y) ** 2).sum()

    shapes = (256, 256), (3, 3, 64, 128), (512, 256), (8, 32, 32, 64)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    fun = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    text = fun.lower(*args).compile().as_text()
    assert hlo_flops(text) == jaxpr_flops(fun.trace(*args).jaxpr)


@pytest.mark.cuda_aot
def test_products_that_xla_recomputes_are_what_it_has_more_of():
    device, args = profile(A100), there(ARGS, A100)
    lowered = jax.jit(train_step, donate_argnums=0).lower(*args)
    plain = lowered.compile(compiler_options=not_recomputing(CUDA, {})).as_text()
    fewest = lowered.compile(compiler_options=recomputing({}, device.capacity, 12 << 30)).as_text()
    assert recomputed(plain, device) is NOTHING_AGAIN
    found = recomputed(fewest, device)
    assert found.flops == hlo_flops(fewest) - hlo_flops(plain) > 0
    assert found.seconds > found.flops / device.matmul_flops_f32


def test_what_a_loop_recomputes_counts_in_every_iteration():
    text = """HloModule jit_f

%body (p: f32[256,1024]) -> f32[256,1024] {
  %p = f32[256,1024]{1,0} parameter(0)
  %exp.1.remat = f32[256,1024]{1,0} exponential(%p)
  %gte.remat.2 = f32[256,1024]{1,0} get-tuple-element(%exp.1.remat), index=0
  ROOT %add.3 = f32[256,1024]{1,0} add(%exp.1.remat, %p)
}

ENTRY %main (x: f32[256,1024]) -> f32[256,1024] {
  %x = f32[256,1024]{1,0} parameter(0)
  %tanh.remat2.1 = f32[256,1024]{1,0} tanh(%x)
  ROOT %while.1 = f32[256,1024]{1,0} while(%tanh.remat2.1), body=%body, backend_config={"known_trip_count":{"n":"9"}}
}
"""
    device = profile("nvidia-h200")
    once = device.kernel_launch + 2 * 4 * 256 * 1024 / (0.85 * device.memory_bandwidth)
    found = recomputed(text, device)
    assert found.count == 2 and found.flops == 0
    assert found.seconds == pytest.approx((1 + 9) * once)


@pytest.mark.cuda_aot
def test_an_estimate_says_what_xla_recomputes():
    static, exact = (
        jaxtensile.estimate(train_step, *ARGS, target=A100, donate_argnums=0, exact=e) for e in (False, True)
    )
    assert static.low <= exact.device <= static.high
    assert exact.spared is not None and exact.spared < 0.8 * exact.device
    assert f"XLA recomputes {exact.xla.count} operations by itself" in str(exact)
    assert "XLA recomputes by itself under jax.jit; exact=True says what" in str(static)
    small = jaxtensile.estimate(train_step, *ARGS, target="nvidia-h200", donate_argnums=0, exact=True)
    assert small.device == exact.device and small.spared is None and not small.xla.count


@pytest.mark.cuda_aot
def test_what_xla_recomputes_is_a_plan_like_any_other(monkeypatch, tmp_path):
    """It is taken where it costs less, found again by another process, and left out where the user leaves it out."""
    monkeypatch.setenv("JAXTENSILE_PLAN_CACHE", str(tmp_path))
    capacity, plain = profile(A100).capacity, 37 << 30

    def report(budget, **options):
        given = {"target": A100, "chunk": False, "objective": "flops", "donate_argnums": 0, "compiler_options": options}
        return jaxtensile.jit(train_step, budget=budget, **given).plan(*ARGS)

    free = report(capacity)
    assert free.unchanged and not free.xla.count and free.compiled.device > 0.85 * plain
    found = report(30 << 30)
    assert found.fits and found.unchanged and found.xla.count and found.overhead == found.xla.seconds > 0
    assert "with" in str(found).splitlines()[0] and f"{found.xla.count} operations that XLA recomputes" in str(found)
    again = report(30 << 30)
    assert (again.compiled, again.xla) == (found.compiled, found.xla)
    assert any("earlier process" in note for note in again.notes)
    ours = report(30 << 30, xla_disable_hlo_passes="rematerialization")
    assert ours.fits and not ours.unchanged and not ours.xla.count
    assert found.overhead <= ours.overhead


@pytest.mark.tpu_aot
def test_what_a_tpu_recomputes_is_told():
    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 16, jax.ShapeDtypeStruct((98304, 2048), jnp.float32)
    found = jaxtensile.estimate(train_step, *args, target="tpu-v5e", donate_argnums=0, exact=True)
    assert found.xla.count > 0 and "XLA recomputes" in str(found)
