"""XLA's part of the tests, made short: a program is compiled once.

What was compiled is there for all processes of a test run, and for later runs on the same machine: programs for this
CPU through JAX's own persistent cache, of which the key covers program, options and XLA, kernels for absent GPUs
through XLA's. Both are kept in ``~/.cache/jaxtensile-tests``, in a folder for these versions and this very CPU. An
entry is written under another name and then renamed, and carries its digest: one that is damaged is not there.
``JAXTENSILE_TESTS_CACHE=off`` does without; a path there is another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest

KERNELS_ARE_USED = True
FORMAT = 2
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
)
LIMIT = 1 << 30
"""Bytes in a folder, above which it begins anew; tests leave a tenth of it."""
DIGEST = hashlib.sha256().digest_size


class Folder:
    """Bytes by name, for any number of processes at once; of what cannot be read or written nothing is known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, name: str) -> bytes | None:
        with suppress(OSError):
            data = (self.path / name).read_bytes()
            if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
                return data[DIGEST:]
        return None

    def put(self, name: str, data: bytes) -> None:
        with suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(file.name, self.path / name)

    @contextmanager
    def locked(self):
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def folder() -> Folder | None:
    """The folder for these versions and this CPU, or None where there is to be none."""
    chosen = os.environ.get("JAXTENSILE_TESTS_CACHE", "")
    root = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxtensile-tests")
    if chosen == "off":
        return None
    path = root / hashlib.sha256(repr(_machine()).encode()).hexdigest()[:16]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    if sum(file.stat().st_size for file in path.iterdir()) > LIMIT:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return Folder(path)


def _machine() -> tuple[object, ...]:
    versions = []
    for package in PACKAGES:
        with suppress(ModuleNotFoundError):
            versions.append((package, version(package)))
    cpu = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "".join(sorted({line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features")}))
    return FORMAT, platform.platform(), platform.python_version(), versions, cpu


def quicken(kept: Folder | None, kernels: Path) -> None:
    """From now on JAX in this process looks in ``kept`` before it compiles, and XLA in ``kernels`` for GPUs."""
    from jax._src import compiler

    from jaxtensile import _compat
    from jaxtensile.xla import kernel_cache

    options, own = compiler.get_compile_options, kernel_cache.Files.file

    def get_compile_options(*args, backend=None, **kwargs):
        made = options(*args, backend=backend, **kwargs)
        debug = made.executable_build_options.debug_options
        if kept is not None and KERNELS_ARE_USED and _compat.only_compiles(backend):
            debug.xla_gpu_kernel_cache_file = str(kernels)
        return made

    compiler.get_compile_options = get_compile_options
    if kept is not None:
        kernel_cache.Files.file = lambda files: str(kernels) if KERNELS_ARE_USED else own(files)
    if kept is not None:
        _share_programs(kept)


def _share_programs(kept: Folder) -> None:
    import jax
    from jax._src import compilation_cache

    class Programs(compilation_cache.CacheInterface):
        _path = kept.path

        def get(self, key: str) -> bytes | None:
            return kept.get(key)

        def put(self, key: str, value: bytes) -> None:
            kept.put(key, value)

    cached = compilation_cache.is_cache_used
    compilation_cache.get_file_cache = lambda path: (Programs(), path)
    compilation_cache.is_cache_used = lambda backend: backend.platform == "cpu" and cached(backend)
    jax.config.update("jax_compilation_cache_dir", str(kept.path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs and kernels are compiled in this test, whatever is kept: XLA:CPU cannot serialize what was loaded."""
    import jax
    from jax._src import compilation_cache

    jax.clear_caches()  # which hold what other tests have loaded
    monkeypatch.setitem(globals(), "KERNELS_ARE_USED", False)
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda _: False)


class Kernels:
    """A file of this process that begins as the kept one, and of which what was added is kept at the end.

    XLA only ever appends to it. What two processes added to the same file is not joined: a kernel that both made has
    another name in each, and XLA refuses a file with both.
    """

    NAME = "kernels of one"

    def __init__(self, kept: Folder | None, file: Path) -> None:
        self.kept, self.file = kept, file
        self.began = (kept.get(self.NAME) if kept is not None else None) or b""
        if self.began:
            file.write_bytes(self.began)

    def keep(self) -> None:
        if self.kept is None or not self.file.exists() or (now := self.file.read_bytes()) == self.began:
            return
        with suppress(OSError), self.kept.locked():
            if (self.kept.get(self.NAME) or b"") == self.began:
                self.kept.put(self.NAME, now)
