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
    """Compiler options with which all programs that share ``file`` share their GPU kernels; bytes are the same."""
    from jaxtensile.xla.kernel_cache import kept_in

    return kept_in(str(file))
