"""Every target's own compiler runs here without its hardware, and leaves the process as it was."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import compiled_once
import jaxtensile
from jaxtensile.devices import hardware
from jaxtensile.devices.profiles import profile, profile_for_kind, targets
from jaxtensile.units import MIB
from jaxtensile.xla import target
from jaxtensile.xla.target import compiler_options, resolve, resolve_all

CUDA = [n for n in targets() if profile(n).platform == "cuda"]
TPU = [n for n in targets() if profile(n).platform == "tpu"]
ROWS, WIDTH = 2048, 1024


def compile_for(name, dtype):
    sharding = SingleDeviceSharding(resolve(name))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype, sharding=sharding)
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype, sharding=sharding)

    def two_products(x, w):
        return jax.nn.softmax(jnp.tanh(x @ w) @ w).sum(axis=-1)

    return jax.jit(two_products).lower(x, w).compile(compiler_options=dict(compiler_options(name)))


def check_memory(name, dtype):
    memory = compile_for(name, dtype).memory_analysis()
    item, activation = jnp.dtype(dtype).itemsize, ROWS * WIDTH * jnp.dtype(dtype).itemsize
    assert memory.argument_size_in_bytes == (ROWS + WIDTH) * WIDTH * item
    # Padded to a tile on TPU.
    assert ROWS * item <= memory.output_size_in_bytes <= ROWS * max(item, 4)
    # One activation must exist between the products, unless it fits a TPU's on-chip memory; a GPU
    # without bf16 units holds f32 copies of everything.
    least = 0 if name in TPU else activation
    assert least <= memory.temp_size_in_bytes <= 8 * activation + 64 * MIB


@pytest.mark.cuda_aot
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CUDA)
def test_cuda_targets_compile(name, dtype):
    check_memory(name, dtype)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", TPU)
def test_tpu_targets_compile(name):
    check_memory(name, jnp.bfloat16)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", TPU)
def test_a_tpu_profile_has_the_compilers_own_capacity(name):
    """libtpu refuses what does not fit: the profile's capacity compiles, 8 MiB more does not."""
    sharding = SingleDeviceSharding(resolve(name))

    def compiles(size):
        x = jax.ShapeDtypeStruct((size // 2 // 2048, 1024), jnp.int16, sharding=sharding)
        try:
            jax.jit(lambda x: x + 1).lower(x).compile()
        except jax.errors.JaxRuntimeError as error:
            assert "RESOURCE_EXHAUSTED" in str(error)
            return False
        return True

    assert compiles(profile(name).capacity)
    assert not compiles(profile(name).capacity + 8 * MIB)


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", CUDA)
def test_a_cuda_device_is_known_by_its_kind(name):
    device = resolve(name)
    assert device.platform == "gpu"
    assert profile_for_kind(device.device_kind, device.platform) == profile(name)
    assert resolve(name) is device


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", TPU)
def test_a_tpu_device_is_known_by_its_kind(name):
    device = resolve(name)
    assert device.platform == "tpu"
    assert profile_for_kind(device.device_kind, device.platform) == profile(name)
    assert resolve(name) is device


@pytest.mark.cuda_aot
def test_a_volta_is_compiled_for_itself():
    """No bf16 units: the products run in f32, which an Ampere does not need."""
    volta = compile_for("nvidia-v100-16gb", jnp.bfloat16).memory_analysis().temp_size_in_bytes
    ampere = compile_for("nvidia-a100-40gb", jnp.bfloat16).memory_analysis().temp_size_in_bytes
    assert volta > ampere


def sharded_step(mesh):
    """A step, arguments that are sharded over four devices, and what one device has of them."""
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def step(w, x, scale):
        return jax.value_and_grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).mean() * scale)(w)

    return step, (w, x, np.float32(2)), (256 + 1024) * 256 * 4 // 4


@pytest.mark.cuda_aot
def test_arguments_keep_their_shardings_on_a_target():
    """Of the target itself, of another one, and of no device at all."""
    four = resolve_all("nvidia-h200", 4)
    assert len(set(four)) == 4 and resolve_all("nvidia-h200", 4) == four
    assert resolve_all("nvidia-h200", 1) == (resolve("nvidia-h200"),)
    for mesh in (Mesh(np.array(four), ("x",)), AbstractMesh((4,), ("x",))):
        step, args, mine = sharded_step(mesh)
        for name in ("nvidia-h200", "nvidia-a100-40gb"):
            report = jaxtensile.jit(step, target=name, budget="1GiB").plan(*args)
            assert mine <= report.compiled.argument <= mine + 256, name
            assert any("4 devices" in note for note in report.notes)
    step, args, mine = sharded_step(Mesh(np.array(four), ("x",)))
    estimate = jaxtensile.estimate(step, *args, target="nvidia-a100-40gb", exact=True)
    assert mine <= estimate.argument <= mine + 256 and estimate.shards == 4


@pytest.mark.cuda_aot
def test_shardings_that_no_target_can_keep():
    four = resolve_all("nvidia-h200", 4)
    mesh = Mesh(np.array(four), ("x",))
    step, (w, x, scale), _ = sharded_step(mesh)
    ours = jaxtensile.jit(step, target="nvidia-a100-40gb", budget="1GiB")
    here = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(four[0]))
    with pytest.raises(jaxtensile.TargetError, match="is on one device and others are sharded over 4"):
        ours.plan(w, here, scale)
    constrained = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))
    mapped = jax.shard_map(lambda w: w, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    w, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x))
    for placed in (constrained, mapped):
        named = jaxtensile.jit(lambda w, x, p=placed: step(p(w), x, 1), target="nvidia-a100-40gb", budget="1GiB")
        with pytest.raises(jaxtensile.TargetError, match="in a shard_map or a constraint, and its arguments name none"):
            named.plan(w, x)


@pytest.mark.cuda_aot
def test_a_target_with_a_number_of_devices():
    """Of as many as there are shardings for; in hosts of as many GPUs."""
    step, args, mine = sharded_step(AbstractMesh((4,), ("x",)))
    assert jaxtensile.jit(step, target="nvidia-h200:4", budget="1GiB").plan(*args).compiled.argument >= mine
    devices = jaxtensile.target_devices("nvidia-h200:2x2")
    assert len(devices) == 4 and len({d.process_index for d in devices}) == 2
    assert jaxtensile.target_devices("nvidia-h200") == [resolve("nvidia-h200")]
    with pytest.raises(jaxtensile.TargetError, match="has 8 devices, and the program is divided among 4"):
        jaxtensile.jit(step, target="nvidia-h200:8", budget="1GiB").plan(*args)
    for wrong in ("nvidia-h200:", "nvidia-h200:0", "nvidia-h200:8x", "nvidia-h200:1x2x3x4"):
        with pytest.raises(jaxtensile.TargetError, match="no number of devices behind its colon"):
            jaxtensile.jit(step, target=wrong)


@pytest.mark.tpu_aot
def test_a_grid_of_tpus_as_it_was_asked_for():
    assert len(jaxtensile.target_devices("tpu-v5e:2x4")) == len(jaxtensile.target_devices("tpu-v5e:8")) == 8
    assert max(d.coords[0] for d in jaxtensile.target_devices("tpu-v5e:2x4")) == 1
    assert max(d.coords[0] for d in jaxtensile.target_devices("tpu-v5e:4x2")) == 3


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("name", "count"), [("tpu-v5e", 8), ("tpu-v5p", 8), ("tpu-v6e", 2)])
def test_several_chips_of_a_tpu(name, count):
    found = resolve_all(name, count)
    assert len(set(found)) == count and {d.device_kind for d in found} == {resolve(name).device_kind}


def test_more_cpu_devices_than_there_are():
    count = 2 * len(jax.local_devices(backend="cpu"))
    with pytest.raises(jaxtensile.TargetError, match=f"xla_force_host_platform_device_count={count}"):
        resolve_all("cpu", count)


def test_the_cpu_is_a_real_device():
    assert resolve("cpu") == jax.local_devices(backend="cpu")[0]
    assert compiler_options("cpu") == {}


def test_an_unknown_name_is_an_error():
    with pytest.raises(jaxtensile.TargetError, match="nvidia-h200"):
        resolve("h200")


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("nvidia-l4", "jax_plugins", "cuda-aot"),
        ("nvidia-v100-16gb", "nvidia.cuda_nvcc", "cuda-aot"),
        ("tpu-v6e", "libtpu", "tpu-aot"),
    ],
)
def test_a_missing_plugin_names_the_extra(name, missing, extra, monkeypatch):
    found = target._wheel_folder
    monkeypatch.setattr(target, "_wheel_folder", lambda m: None if m.startswith(missing) else found(m))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    target._resolve.cache_clear()
    with pytest.raises(jaxtensile.TargetError) as caught:
        resolve(name)
    assert f'pip install "jaxtensile[{extra}]"' in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.cuda_aot
def test_a_compiler_that_refuses_is_a_target_error(monkeypatch):
    """As on a machine whose ptxas is too old, or has none: XLA's reason in one sentence."""
    without = {"xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED"}  # which refuses it in other words
    compiled_once.set_aside(monkeypatch)
    monkeypatch.setattr(target, "compiler_options", lambda name: without)
    target._resolve.cache_clear()
    with pytest.raises(jaxtensile.TargetError) as caught:
        resolve("nvidia-v100-16gb")
    assert "cannot be compiled for: UNIMPLEMENTED" in str(caught.value)
    assert "\n" not in str(caught.value)


CHILD = """
import os, sys
import jax, jaxtensile
from jaxtensile.xla.target import resolve
before = dict(os.environ)
for word in sys.argv[1:]:
    if word == "devices":
        assert [d.platform for d in jax.devices()] == ["cpu"], jax.devices()
    else:
        resolve(word)
assert jax.numpy.ones(3).sum() == 3
assert [d.platform for d in jax.devices()] == ["cpu"], jax.devices()
assert dict(os.environ) == before
"""


def without_the_packages_own(monkeypatch):
    """The environment as it was before this process imported the package."""
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", *hardware.WITHOUT_TPU):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.cuda_aot
@pytest.mark.tpu_aot
@pytest.mark.parametrize("platforms", ["", "cpu"])
@pytest.mark.parametrize(
    "words",
    [
        "nvidia-h200",
        "tpu-v5e",
        "nvidia-h200 tpu-v5e",
        "tpu-v5e nvidia-h200",
        "devices nvidia-h200 tpu-v5e",
        "devices tpu-v5e nvidia-h200",
    ],
)
def test_resolving_is_silent_and_changes_nothing(words, platforms, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    without_the_packages_own(monkeypatch)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *words.split()], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == "", "a user sees our own words alone, also of plugins that JAX loads by itself"


@pytest.mark.cuda_aot
def test_jax_used_before_the_package_was_imported(monkeypatch):
    """Then the CUDA plugin has already given up; it is registered again."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    without_the_packages_own(monkeypatch)
    code = (
        "import jax; jax.devices(); from jaxtensile.xla.target import resolve; "
        "print(resolve('nvidia-l4').device_kind, jax.devices())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "NVIDIA L4 [CpuDevice(id=0)]"


@pytest.mark.tpu_aot
def test_two_processes_may_compile_for_tpus_at_once():
    code = "from jaxtensile.xla.target import resolve; print(resolve('tpu-v5e').device_kind, flush=True); input()"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        assert [p.stdout.readline().strip() for p in both] == ["TPU v5 lite"] * 2
    finally:
        for p in both:
            p.communicate("\n", timeout=60)
