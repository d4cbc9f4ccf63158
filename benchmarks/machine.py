"""What every result file says about where it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jaxlib


def describe() -> dict[str, Any]:
    """Versions, machine and date."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }


def commit() -> str:
    """Of the code that is measured."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def placed(args: Any, target: str) -> Any:
    """The shapes of ``args`` on a device that is not here."""
    from jaxtensile.xla.target import resolve

    sharding = jax.sharding.SingleDeviceSharding(resolve(target))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)


def kernel_cache(file: Path) -> dict[str, Any]:
    """Compiler options with which XLA compiles a GPU kernel once for all programs that share ``file``.

    It does so after allocation, so that bytes are the same. Until jax 0.11 kernels are cached only where they are
    compiled as modules of their own; since then they always are, and XLA refuses the option.
    """
    apart = {"xla_gpu_enable_llvm_module_compilation_parallelism": True} if jax.__version_info__ < (0, 11) else {}
    return {"xla_gpu_kernel_cache_file": str(file), **apart}
