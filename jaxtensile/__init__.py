"""A memory planner for JAX: from a function, its arguments and a byte budget to a function that provably fits.

Names resolve on first use (PEP 562), so importing the package never imports JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxtensile.devices.hardware import quiet_plugins
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

if TYPE_CHECKING:
    from jaxtensile.api.filter_jit import filter_jit
    from jaxtensile.api.install import install, installed, uninstall
    from jaxtensile.api.jit import jit
    from jaxtensile.devices.profiles import DeviceProfile, targets
    from jaxtensile.estimation.estimate import Estimate, estimate
    from jaxtensile.ir.plan import MemoryUse
    from jaxtensile.jobs.job import job
    from jaxtensile.program.workload import Workload
    from jaxtensile.report.report import Report
    from jaxtensile.runtime.cluster.submit import Cluster
    from jaxtensile.tuning.largest import largest_batch
    from jaxtensile.xla.calibration import calibrate
    from jaxtensile.xla.target import target_devices

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BudgetError",
    "Cluster",
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
    "install",
    "installed",
    "jit",
    "job",
    "largest_batch",
    "target_devices",
    "targets",
    "uninstall",
]

_HOMES = {
    "calibrate": "jaxtensile.xla.calibration",
    "estimate": "jaxtensile.estimation.estimate",
    "filter_jit": "jaxtensile.api.filter_jit",
    "install": "jaxtensile.api.install",
    "installed": "jaxtensile.api.install",
    "jit": "jaxtensile.api.jit",
    "job": "jaxtensile.jobs.job",
    "largest_batch": "jaxtensile.tuning.largest",
    "target_devices": "jaxtensile.xla.target",
    "targets": "jaxtensile.devices.profiles",
    "uninstall": "jaxtensile.api.install",
    "Cluster": "jaxtensile.runtime.cluster.submit",
    "DeviceProfile": "jaxtensile.devices.profiles",
    "Estimate": "jaxtensile.estimation.estimate",
    "MemoryUse": "jaxtensile.ir.plan",
    "Report": "jaxtensile.report.report",
    "Workload": "jaxtensile.program.workload",
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
