"""XLA's number is read right, the executable that was measured runs, known failures are survived."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtensile.devices.backends import CPU, CUDA, TPU
from jaxtensile.units import MIB
from jaxtensile.xla import compile as compiling
from jaxtensile.xla.compile import RESERVED, compile_program, memory_of, planned_options, sooner, within
from programs import FAST

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILES.append(event) if "backend_compile" in event else None
)


def jit_of(fun, **more):
    return lambda options: jax.jit(fun, compiler_options=dict(options) or None, **more)


def test_the_sum_is_xla_own():
    a, b = jnp.ones((64, 32)), jnp.ones((32, 16))
    made = compile_program(jit_of(lambda a, b: (jnp.tanh(a @ b) @ b.T).sum()), (a, b), {}, {})
    analysis = made.jitted.lower(a, b).compile().memory_analysis()
    assert made.memory.exact and made.refusal == "" and made.seconds > 0
    assert made.memory.argument == analysis.argument_size_in_bytes == (64 * 32 + 32 * 16) * 4
    assert made.memory.output == analysis.output_size_in_bytes == 4
    assert made.memory.temp == analysis.temp_size_in_bytes >= 64 * 16 * 4
    assert made.device == made.memory.argument + made.memory.output + made.memory.temp - made.memory.alias


def _scanned(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=20)[0].sum()


def _sorted(w, x):
    return (jnp.sort(jnp.fft.irfft(jnp.fft.rfft(x @ w) * 2), axis=0) ** 2).sum()


def _pooled(w, x):
    images = jnp.maximum(x.reshape(4, 16, 16, 8), 0) * w[0, 0]
    filters = w[:12, :48].reshape(3, 3, 8, 8)
    images = lax.conv_general_dilated(images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(jnp.sin(images), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()


@pytest.mark.parametrize("fun", [_scanned, _sorted, _pooled])
def test_a_trial_takes_the_bytes_of_what_runs_and_is_not_run(fun):
    args = jnp.ones((64, 64)), jnp.ones((128, 64))
    trial = sooner(CPU, {})
    assert trial
    full, tried = (compile_program(jit_of(jax.grad(fun)), args, {}, {}, None, None, None, t) for t in ({}, trial))
    assert tried.memory == full.memory and full.memory.temp > 0
    assert (tried.jitted, tried.options) == (None, full.options) and full.jitted is not None


def test_donated_bytes_are_counted_once():
    x = jax.ShapeDtypeStruct((MIB,), jnp.float32)
    kept = compile_program(jit_of(lambda x: x + 1), (x,), {}, {}).memory
    given = compile_program(jit_of(lambda x: x + 1, donate_argnums=0), (x,), {}, {}).memory
    assert kept.device == 8 * MIB and kept.alias == 0
    assert given.device == given.alias == 4 * MIB


def test_memory_of_tells_host_bytes_apart():
    """What is given back in the memory of an argument is there once."""
    sizes = {"argument": 5, "output": 0, "temp": 7, "alias": 0}
    sizes |= {"host_temp": 11, "host_argument": 13, "host_output": 6, "host_alias": 4}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    use = memory_of(SimpleNamespace(memory_analysis=lambda: analysis))
    assert (use.device, use.host) == (12, 26)


def test_the_first_call_does_not_compile_again():
    x = jnp.ones(128)
    made = compile_program(jit_of(lambda x, *, n: jnp.sin(x) * n), (x,), {"n": 2.0}, FAST)
    COMPILES.clear()
    assert made.jitted(x, n=2.0).shape == (128,)
    assert COMPILES == []
    jax.jit(lambda x: jnp.cos(x) - 3)(x)
    assert len(COMPILES) == 1, "the counter counts"


def failing(*errors):
    """A ``make`` whose compiles fail in turn with the given texts (None: succeed); and the options it saw."""
    seen, left = [], list(errors)

    def make(options):
        seen.append(dict(options))
        text = left.pop(0)

        def lower(*args, **kwargs):
            if text is None:
                return jax.jit(lambda x: x + 1).lower(*args, **kwargs)
            return SimpleNamespace(compile=lambda _: (_ for _ in ()).throw(RuntimeError(text)))

        return SimpleNamespace(lower=lower)

    return make, seen


TILES = "INTERNAL: Couldn't find output tile sizes that satisfy hlo fusion.3"


def test_missing_tile_sizes_are_compiled_without_triton():
    make, seen = failing(TILES, None)
    made = compile_program(make, (1.0,), {}, {"some": 1})
    assert seen == [{"some": 1}, {"some": 1, "xla_gpu_enable_triton_gemm": False}]
    assert made.options == seen[1] and made.memory is not None
    assert any("xla_gpu_enable_triton_gemm" in note for note in made.notes)


def test_missing_tile_sizes_a_second_time_are_an_error():
    make, seen = failing(TILES, TILES)
    with pytest.raises(RuntimeError, match="tile sizes"):
        compile_program(make, (1.0,), {}, {})
    assert len(seen) == 2
    make, seen = failing(TILES)
    with pytest.raises(RuntimeError, match="tile sizes"):
        compile_program(make, (1.0,), {}, {"xla_gpu_enable_triton_gemm": True})
    assert len(seen) == 1, "what the user chose is not overruled"


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.\nmore",
        "E1000 CompileTimeHbmOom: Used 20.1G of 15.75G hbm",
    ],
)
def test_a_compiler_that_refuses_for_memory_is_an_answer(text):
    make, seen = failing(text)
    made = compile_program(make, (1.0,), {}, {})
    assert made.memory is None and made.device > 10**18 and len(seen) == 1
    assert made.refusal and "\n" not in made.refusal and len(made.refusal) <= 300


def test_other_errors_are_the_users():
    make, _ = failing("INVALID_ARGUMENT: no such option")
    with pytest.raises(RuntimeError, match="no such option"):
        compile_program(make, (1.0,), {}, {})


@pytest.mark.parametrize("backend", [CUDA, TPU], ids=lambda b: b.name)
def test_accelerators_compile_planned_programs_as_plain_ones(backend):
    user = {"xla_gpu_autotune_level": 0}
    assert planned_options(backend, user) == [user]


def test_what_the_user_reserves_of_a_chip_stays():
    assert within({"other": 1}, 5) == {"other": 1, RESERVED: 5}
    assert within({}, -5) == {RESERVED: 0}
    assert within({RESERVED: 7}, 5) == {RESERVED: 7}


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_options_of_the_user_are_kept(version, monkeypatch):
    monkeypatch.setattr(compiling._compat, "JAX_VERSION", version)
    user = {"xla_disable_hlo_passes": "fusion,algsimp", "other": 1}
    before = dict(user)
    choices = planned_options(CPU, user)
    assert user == before and len(choices) == 2
    for options in choices:
        assert options["other"] == 1
        assert options["xla_disable_hlo_passes"].startswith("fusion,algsimp")
    assert ("cse_barrier_expander" in choices[0]["xla_disable_hlo_passes"]) == (version < (0, 11))
    assert [o.get("xla_cpu_scheduler_type") for o in choices] == [None, "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"]


def test_under_planned_options_a_barrier_in_a_small_loop_is_compiled():
    """In a loop of so few bytes that XLA:CPU makes one kernel of it, where a barrier ends the process on jax 0.10."""

    def step(c, _):
        a, b = lax.optimization_barrier((c, c + 1))
        return jnp.sin(a) * b, None

    x = jnp.ones(4)
    for options in planned_options(CPU, {}):
        jitted = jax.jit(lambda x: lax.scan(step, x, None, length=3)[0], compiler_options=options)
        assert jnp.allclose(jitted(x), lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * (c + 1), x))


def test_under_planned_options_a_barrier_holds():
    """The reason for the options: hand-written recomputation saves bytes under them on every jax."""

    def layers(x, w):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return x

    def loss(remat, w, x):
        for _ in range(4):
            x = (jax.checkpoint(layers) if remat else layers)(x, w)
        return x.sum()

    x, w = jnp.ones((4096, 16)), jnp.eye(16)
    options = planned_options(CPU, FAST)[0]
    used = [
        compile_program(jit_of(jax.grad(lambda w, x, r=r: loss(r, w, x))), (w, x), {}, options).memory.temp
        for r in (False, True)
    ]
    assert used[1] < 0.6 * used[0]
