"""What XLA has compiled is compiled once: for all processes of a test run, and for later runs on the same machine.

Programs for this CPU go through JAX's own persistent cache, of which the key covers program, options and XLA; kernels
for GPUs that are not here through XLA's. Both are kept in ``~/.cache/jaxtensile-tests``, in a folder for these versions
and this very CPU. An entry is written under another name and then renamed, and carries its digest: one that is damaged
is not there. ``JAXTENSILE_TESTS_CACHE=off`` does without, another folder is used instead.
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

FORMAT = 1
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12")
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


def share_programs(kept: Folder, kernels: Path) -> None:
    """From now on JAX looks in ``kept`` before it compiles for this CPU, and XLA in ``kernels`` for absent GPUs."""
    import jax
    from jax._src import compilation_cache, compiler

    class Programs(compilation_cache.CacheInterface):
        _path = kept.path

        def get(self, key: str) -> bytes | None:
            return kept.get(key)

        def put(self, key: str, value: bytes) -> None:
            kept.put(key, value)

    cached, options = compilation_cache.is_cache_used, compiler.get_compile_options

    def is_cache_used(backend) -> bool:
        return backend.platform == "cpu" and cached(backend)

    def get_compile_options(*args, backend=None, **kwargs):
        made = options(*args, backend=backend, **kwargs)
        if backend is not None and "CompileOnly" in type(backend).__name__ and jax.__version_info__ >= (0, 11):
            made.executable_build_options.debug_options.xla_gpu_kernel_cache_file = str(kernels)
        return made

    compilation_cache.get_file_cache = lambda path: (Programs(), path)
    compilation_cache.is_cache_used = is_cache_used
    compiler.get_compile_options = get_compile_options
    jax.config.update("jax_compilation_cache_dir", str(kept.path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


class Kernels:
    """A file of this process that begins as the kept one, and of which what was added is kept at the end.

    XLA only ever appends to it, and any number of such files one after the other are one.
    """

    NAME = "kernels"

    def __init__(self, kept: Folder, file: Path) -> None:
        self.kept, self.file = kept, file
        self.began = kept.get(self.NAME) or b""
        if self.began:
            file.write_bytes(self.began)

    def keep(self) -> None:
        if not self.file.exists() or (now := self.file.read_bytes()) == self.began:
            return
        added = now.removeprefix(self.began)
        with suppress(OSError), self.kept.locked():
            self.kept.put(self.NAME, (self.kept.get(self.NAME) or b"") + added)
