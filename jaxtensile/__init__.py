"""A function, its arguments and a byte budget go in; a function that fits, and the proof that it fits, come out.

Names resolve on first use (PEP 562), so that importing the package and the command line's
help never import JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxtensile.errors import (
    AgreementError,
    BudgetError,
    ConfigError,
    ConfigWarning,
    CoordinatorError,
    InternalError,
    InternalErrorWarning,
    JaxtensileError,
    PlanningError,
    SolverError,
    TargetError,
    VerifyError,
)
from jaxtensile.hardware import quiet_plugins

if TYPE_CHECKING:
    from jaxtensile.api import jit
    from jaxtensile.calibration import calibrate
    from jaxtensile.device import DeviceProfile, targets
    from jaxtensile.estimation import Estimate, estimate
    from jaxtensile.filtered import filter_jit
    from jaxtensile.jobs import job
    from jaxtensile.plan import MemoryUse
    from jaxtensile.report import Report
    from jaxtensile.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BudgetError",
    "ConfigError",
    "ConfigWarning",
    "CoordinatorError",
    "DeviceProfile",
    "Estimate",
    "InternalError",
    "InternalErrorWarning",
    "JaxtensileError",
    "MemoryUse",
    "PlanningError",
    "Report",
    "SolverError",
    "TargetError",
    "VerifyError",
    "Workload",
    "calibrate",
    "estimate",
    "filter_jit",
    "jit",
    "job",
    "targets",
]

_HOMES = {
    "calibrate": "jaxtensile.calibration",
    "estimate": "jaxtensile.estimation",
    "filter_jit": "jaxtensile.filtered",
    "jit": "jaxtensile.api",
    "job": "jaxtensile.jobs",
    "targets": "jaxtensile.device",
    "DeviceProfile": "jaxtensile.device",
    "Estimate": "jaxtensile.estimation",
    "MemoryUse": "jaxtensile.plan",
    "Report": "jaxtensile.report",
    "Workload": "jaxtensile.workload",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jaxtensile' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# JAX's plugins read variables at its first use, which may be before anything of ours runs.
quiet_plugins()
