"""Kernels for absent GPUs are compiled once, to the same bytes; what runs here and what users chose stays."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import compiled_once
from benchmarks.machine import placed
from jaxtensile.xla import kernel_cache as cache
from jaxtensile.xla.compile import compile_program, memory_of
from jaxtensile.xla.target import compiler_options

SHAPES = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)


def step(w, x):
    return jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """As for a user: a file of this thread's own, in a folder of this test."""
    compiled_once.set_aside(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_FILES", cache.Files())
    return tmp_path


def lowered(target):
    """The step, lowered for a target or for this CPU."""
    return jax.jit(step).lower(*(placed(SHAPES, target) if target else SHAPES))


@pytest.mark.cuda_aot
@pytest.mark.parametrize("target", ["nvidia-l4", "nvidia-v100-16gb"])
def test_a_kernel_is_compiled_once_and_bytes_are_the_same(alone, target):
    args = placed(SHAPES, target)
    make = lambda options: jax.jit(step, compiler_options=dict(options))  # noqa: E731
    options = compiler_options(target)
    first = compile_program(make, args, {}, options)
    (file,) = alone.rglob("kernels")
    kernels = file.read_bytes()
    again = compile_program(make, args, {}, options)
    assert kernels and file.read_bytes() == kernels, "nothing was compiled that is known"
    assert first.memory == again.memory == memory_of(make(options).lower(*args).compile())
    assert cache.OPTION not in first.options, "what is compiled of it later is compiled as ever"


@pytest.mark.cuda_aot
def test_what_the_user_chose_and_what_runs_here_is_as_it_was(alone, monkeypatch):
    absent = lowered("nvidia-l4")
    assert cache.kernel_cache(lowered(None), {}) is None
    assert cache.kernel_cache(absent, {cache.OPTION: "mine"}) is None
    assert cache.kernel_cache(absent, {})[cache.OPTION].startswith(str(alone))
    monkeypatch.setenv("XLA_FLAGS", f"--{cache.OPTION}=mine")
    assert cache.kernel_cache(absent, {}) is None


@pytest.mark.tpu_aot
def test_no_file_for_a_tpu(alone):
    assert cache.kernel_cache(lowered("tpu-v5e"), {}) is None and not [*alone.iterdir()]


def test_a_large_file_begins_anew_and_one_that_cannot_be_written_is_done_without(alone, monkeypatch):
    files = cache.Files()
    path = Path(files.file())
    path.write_bytes(b"kernels")
    assert Path(files.file()).exists()
    monkeypatch.setattr(cache, "_LARGEST", 3)
    assert files.file() == str(path) and not path.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(alone / "nowhere"))
    assert cache.Files().file() is None
