"""A device that is here is measured really; what is found is used, kept, and sized to the device."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.cli import main as cli
from jaxtensile.devices import measured
from jaxtensile.devices.profiles import profile, profile_for_kind
from jaxtensile.units import MIB
from jaxtensile.xla import calibration
from jaxtensile.xla.calibration import Effort, _rate, _sampled, copies, measure, products, stream
from programs import FAST, chain_args, squeezed, step

CPU = jax.devices("cpu")[0]
TINY = Effort(aim=0.001, share=1e-4, repetitions=3, limit=0.1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_unwritten", {})
    return tmp_path


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(calibration, "Effort", lambda: TINY)


# ---- statistics on plain data ----


def test_the_median_repetition_makes_the_rate():
    rate = _rate([0.1, 0.5, 0.1, 0.1, 9.0], 2.0, "so large")
    assert rate.value == 20.0
    assert rate.spread == pytest.approx(4.0)
    assert "so large" in str(rate)
    assert _rate([0.2] * 3, 1.0, "").spread == 0.0


def sleeper(per_unit):
    """A step that takes ``per_unit`` seconds times its size, and the sizes it was made for."""
    sizes = []

    def make(n):
        sizes.append(n)

        def step(x):
            time.sleep(n * per_unit)
            return x

        return step, jnp.zeros(())

    return make, sizes


def test_sizes_follow_what_the_first_runs_took():
    make, sizes = sleeper(1e-4)
    effort = Effort(aim=0.01, repetitions=3)
    size, samples, calls = _sampled(make, 1000, 1e9, 1, 1, effort)
    assert sizes[0] == 1000 and size == sizes[-1]
    assert 20 <= size <= 200, "0.1 s was ten times too long"
    assert len(samples) == 3 and 1 <= calls <= 4


def test_no_size_is_above_the_most_or_below_one_multiple():
    make, sizes = sleeper(0.0)
    size, _, calls = _sampled(make, 10_000, 700.0, 1, 256, Effort(aim=10.0, repetitions=3))
    assert set(sizes) == {512} == {size}
    assert calls == 32, "what is too short alone is run in a chain"
    assert _sampled(make, 10.0, 1.0, 1, 256, Effort(aim=10.0, repetitions=3))[0] == 256


def test_time_is_limited():
    make, _ = sleeper(1e-2)
    _, samples, _ = _sampled(make, 10, 10.0, 1, 10, Effort(aim=0.1, repetitions=100, limit=0.15))
    assert len(samples) == 3


# ---- what is really run, small ----


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_have_a_rate(dtype):
    rate = products(CPU, dtype, 1e10, 4 * MIB, TINY)
    assert 1e7 < rate.value < 1e15
    side = int(rate.size.split()[0])
    assert side % 256 == 0 and 3 * side**2 * jnp.dtype(dtype).itemsize <= 4 * MIB


def test_values_neither_grow_nor_vanish_along_a_chain(monkeypatch):
    ends = []
    timed = calibration._timed

    def watched(step, state, calls):
        took, state = timed(step, state, calls)
        ends.append(np.asarray(state, np.float32))
        return took, state

    monkeypatch.setattr(calibration, "_timed", watched)
    products(CPU, jnp.bfloat16, 1e10, 4 * MIB, Effort(aim=0.05, share=1.0, repetitions=7))
    assert ends and all(np.isfinite(x).all() and 1e-6 < np.abs(x).max() < 1e3 for x in ends)


def test_a_stream_has_a_rate():
    assert 1e7 < stream(CPU, 1e10, 8 * MIB, TINY).value < 1e14


def test_copies_to_the_host_and_back_have_a_rate_where_they_count():
    for to_host in (True, False):
        assert 1e6 < copies(CPU, to_host, 1e10, 4 * MIB, TINY, lambda _: True).value < 1e14
        # What XLA says of a CPU's: there is nothing on another side.
        with pytest.raises(calibration._NotMeasured, match="no copy"):
            copies(CPU, to_host, 1e10, 4 * MIB, TINY, lambda c: c.memory_analysis().host_output_size_in_bytes > 0)


@pytest.mark.cuda_aot
def test_the_compiler_of_a_gpu_says_that_the_copy_counts():
    from jax.sharding import SingleDeviceSharding

    from jaxtensile.xla.target import resolve

    device = resolve("nvidia-h200")
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=SingleDeviceSharding(device))
    out = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host), out_shardings=host)
    assert out.lower(x).compile().memory_analysis().host_output_size_in_bytes == 4 << 20


def test_a_measurement_says_how_each_number_was_found():
    found = measure(CPU, profile("cpu"), TINY)
    assert set(found.numbers) == {"matmul_flops_bf16", "matmul_flops_f32", "memory_bandwidth"} == set(found.how)
    assert found.kind.startswith("cpu: ") and found.took < 30
    assert "float32" in found.how["matmul_flops_f32"] and "bfloat16" in found.how["matmul_flops_bf16"]


def test_the_link_is_measured_alone_where_there_is_one(monkeypatch):
    assert calibration.link_bandwidth(CPU) is None  # its own memory is the host's
    monkeypatch.setattr(calibration, "_LITTLE", TINY)
    monkeypatch.setattr(
        calibration,
        "copies",
        lambda device, there, peak, most, effort, _: copies(device, there, peak, most, effort, bool),
    )
    calibration.link_bandwidth.cache_clear()
    assert 1e6 < calibration.link_bandwidth(CPU) < 1e14 and CPU in jax.devices()
    assert calibration.link_bandwidth(CPU) == calibration.link_bandwidth(CPU)
    calibration.link_bandwidth.cache_clear()


def test_an_unknown_device_without_a_link_falls_back_to_the_table():
    published = profile_for_kind("NVIDIA Something", "gpu")
    with pytest.warns(RuntimeWarning, match="link_bandwidth: the compiler makes no copy"):
        found = measure(CPU, published, TINY)
    device = measured.applied(published, found, "NVIDIA Something")
    assert device.link_bandwidth == published.link_bandwidth and "link_bandwidth" not in device.measured
    assert device.memory_bandwidth == found.numbers["memory_bandwidth"]


# ---- the front door ----


def test_a_device_is_measured_once(tiny, monkeypatch):
    first = jaxtensile.calibrate()
    assert first.measured and first.name == "cpu"
    path = measured.file_of("cpu")
    assert path.is_file()
    written = path.read_text()
    monkeypatch.setattr(calibration, "measure", None)  # a second measurement would raise
    assert jaxtensile.calibrate(CPU) == first
    assert path.read_text() == written


def test_threads_that_ask_at_once_do_not_disturb_the_measurement(tiny, monkeypatch):
    asked, start = [], threading.Barrier(4)
    monkeypatch.setattr(calibration, "measure", lambda *about: asked.append(about) or measure(*about))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (start.wait(), jaxtensile.calibrate())[1], range(4)))
    assert len(asked) == 1 and found == [found[0]] * 4


def test_refresh_measures_again(tiny):
    jaxtensile.calibrate()
    data = json.loads(measured.file_of("cpu").read_text())
    data["numbers"]["memory_bandwidth"] = 1.0
    measured.file_of("cpu").write_text(json.dumps(data))
    assert jaxtensile.calibrate().memory_bandwidth == 1.0
    assert jaxtensile.calibrate(refresh=True).memory_bandwidth > 1e6
    assert jaxtensile.calibrate().memory_bandwidth > 1e6


def test_later_plans_use_the_measured_rates(tiny):
    def step(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)

    def planned():
        return jaxtensile.jit(jax.grad(step), budget="1GiB").plan(*args)

    assert not any("measured" in note for note in planned().notes)
    jaxtensile.calibrate()
    assert any("rates measured on cpu" in note for note in planned().notes)


def test_times_of_a_plan_follow_the_rates():
    args = chain_args(layers=16, width=16)
    _, published = squeezed(step, *args, compiler_options=FAST)
    assert published.overhead > 0
    device = profile("cpu")
    slow = {n: getattr(device, n) / 100 for n in ("memory_bandwidth", "matmul_flops_bf16", "matmul_flops_f32")}
    found = measured.Measurement(
        kind=measured.full_kind("cpu"),
        jaxlib=measured.jaxlib_version(),
        date="2026-01-31",
        took=1.0,
        numbers=slow,
        how=dict.fromkeys(slow, "a hundredth"),
    )
    measured.keep(found, "cpu")
    slower = jaxtensile.jit(step, budget=published.budget, compiler_options=FAST).plan(*args)
    assert slower.overhead > 5 * published.overhead, "launches cost what they did"
    assert slower.target == published.target == "cpu"


@pytest.mark.cuda_aot
def test_a_target_that_is_not_here_uses_what_was_measured_on_its_kind():
    numbers = {"memory_bandwidth": 4.3e12}
    found = measured.Measurement(
        kind="NVIDIA H200",
        jaxlib=measured.jaxlib_version(),
        date="2026-01-31",
        took=1.0,
        numbers=numbers,
        how=dict.fromkeys(numbers, "elsewhere"),
    )
    measured.keep(found, "NVIDIA H200")
    report = jaxtensile.jit(lambda x: x * 2, target="nvidia-h200").plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert any("measured on NVIDIA H200: memory_bandwidth" in note for note in report.notes)


@pytest.mark.cuda_aot
def test_a_device_that_is_not_here_cannot_be_measured():
    from jaxtensile.xla.target import resolve

    with pytest.raises(jaxtensile.TargetError, match="H200 is not here"):
        jaxtensile.calibrate(resolve("nvidia-h200"))


def test_mistakes_are_told():
    with pytest.raises(jaxtensile.TargetError, match=r"jax.devices\(\)"):
        jaxtensile.calibrate("nvidia-h200")
    with pytest.raises(jaxtensile.JaxtensileError, match="tracing"):
        jax.jit(lambda x: x + jaxtensile.calibrate().memory_bandwidth)(1.0)


def test_a_folder_that_cannot_be_written_costs_a_warning(tiny, cache):
    (cache / "jaxtensile").write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="this process only"):
        first = jaxtensile.calibrate()
    assert jaxtensile.calibrate() == first


def test_the_command_line(tiny, capsys):
    assert cli.main(["calibrate"]) == 0
    said = capsys.readouterr().out
    assert "memory_bandwidth" in said and "B/s" in said and "measured 20" in said
    assert str(measured.file_of("cpu")) in said
    assert cli.main(["calibrate", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["numbers"]["memory_bandwidth"]["measured"] is True
    assert data["numbers"]["link_bandwidth"]["measured"] is False
    assert data["numbers"]["memory_bandwidth"]["published"] == profile("cpu").memory_bandwidth
    before = measured.load("cpu")
    assert cli.main(["calibrate", "--refresh"]) == 0
    assert measured.load("cpu") != before


def test_the_effort_is_small():
    """As the promise has it: seconds, and a small share of the memory."""
    started = time.perf_counter()
    found = measure(CPU, profile("cpu"), Effort())
    assert time.perf_counter() - started < 20, "10 s on a machine that is not busy"
    assert all(x > 1e8 for x in found.numbers.values())
