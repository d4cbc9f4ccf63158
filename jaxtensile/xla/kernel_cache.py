"""Kernels for an absent GPU, compiled once for all programs of a thread.

A plan takes several compiles, and most kernels of one are those of the last. XLA keeps them in a file, after it has
allocated: bytes are the same. What runs here is compiled as JAX does it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from jaxtensile import _compat
from jaxtensile.devices.backends import CUDA

OPTION: Final = "xla_gpu_kernel_cache_file"
_APART: Final = "xla_gpu_enable_llvm_module_compilation_parallelism"
_LARGEST: Final = 1 << 28
"""Bytes above which a file begins anew. A guess."""


class Files(threading.local):
    """A folder for this thread, made when it is asked for: XLA appends to a file."""

    folder: TemporaryDirectory[str] | None = None

    def file(self) -> str | None:
        """The thread's file; None if none can be written."""
        with suppress(OSError):
            if self.folder is None or not Path(self.folder.name).is_dir():  # which others may have cleaned up
                self.folder = TemporaryDirectory(prefix="jaxtensile-", ignore_cleanup_errors=True)
            path = Path(self.folder.name, "kernels")
            if path.exists() and path.stat().st_size > _LARGEST:
                path.unlink()
            return str(path)
        return None


_FILES: Final = Files()


def kept_in(file: str) -> dict[str, Any]:
    """Compiler options with which XLA compiles a GPU kernel once for all programs that share ``file``.

    Until jax 0.11 kernels are kept only if they are compiled apart; since then they are, and XLA refuses to be told.
    """
    return {OPTION: file, **({_APART: True} if _compat.JAX_VERSION < (0, 11) else {})}


def kernel_cache(lowered: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compiler options that ``options`` lack, for a program lowered for an absent GPU; None if there are none."""
    asked = OPTION in options or OPTION in os.environ.get("XLA_FLAGS", "")
    if asked or _compat.compiled_elsewhere(lowered) != CUDA.in_jax or (file := _FILES.file()) is None:
        return None
    return kept_in(file)
