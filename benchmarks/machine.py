"""What every result file says about where it was measured."""

from __future__ import annotations

import datetime
import os
import platform
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
