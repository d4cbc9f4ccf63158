"""What is installed, which targets compile here, and what to install for the rest.

Invariant: never raises and never imports JAX in this process. A child tries the targets, since compilers may print or
abort.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from jaxtensile.devices.hardware import has_nvidia_driver, has_tpu
from jaxtensile.devices.measured import best_known, table
from jaxtensile.devices.profiles import profile, targets
from jaxtensile.errors import ConfigError
from jaxtensile.settings.config_text import checked
from jaxtensile.units import format_bytes

_CORE: Final = ("jaxtensile", "jax", "jaxlib", "numpy", "msgspec", "rich")
_EXTRAS: Final = {
    "cuda-aot": (
        "jax-cuda13-plugin",
        "jax-cuda13-pjrt",
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-nvjitlink",
        "nvidia-cuda-nvcc-cu12",
    ),
    "tpu-aot": ("libtpu",),
    "ray": ("ray",),
    "plot": ("matplotlib",),
    "test": (
        *("pytest", "pytest-xdist", "hypothesis", "optax", "flax"),
        *("equinox", "diffrax", "lineax", "optimistix", "blackjax", "numpyro", "dm-haiku", "cloudpickle"),
    ),
    "zoo": ("optax", "transformers", "keras", "dm-haiku", "jmp", "equimo"),
    "docs": ("sphinx", "myst-parser", "furo"),
    "dev": ("ruff", "pyright", "scipy-stubs", "build"),
}
_TRY_TARGETS: Final = """
import json, sys
from jaxtensile.xla.target import resolve
for name in sys.argv[1:]:
    try:
        resolve(name)
        print(json.dumps([name, ""]), flush=True)
    except Exception as error:
        print(json.dumps([name, str(error)]), flush=True)
"""
_LIMIT_S: Final = 120.0
"""Seconds to try all targets: compilers load in seconds, and a hung one is not waited for. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's findings. ``core``, ``extras``: versions, None if not installed. ``targets``: '' or why it does not
    compile. ``config``: its lines or error."""

    python: str
    nvidia_driver: bool
    tpu: bool
    core: dict[str, str | None]
    extras: dict[str, dict[str, str | None]]
    targets: dict[str, str]
    config: tuple[str, ...] = ()

    def __str__(self) -> str:
        accelerators = [name for name, here in (("NVIDIA driver", self.nvidia_driver), ("TPU", self.tpu)) if here]
        lines = [f"Python {self.python}; accelerators here: {', '.join(accelerators) or 'none'}", "", "Packages"]
        lines += [f"  {name:<12} {found or 'not installed'}" for name, found in self.core.items()]
        lines += ["", "Extras"]
        for extra, members in self.extras.items():
            missing = [name for name, found in members.items() if found is None]
            state = ", ".join(f"{name} {found}" for name, found in members.items() if found is not None)
            if missing:
                state = f'missing {", ".join(missing)}: pip install "jaxtensile[{extra}]"'
            lines.append(f"  {extra:<12} {state}")
        lines += ["", "Config", *(f"  {line}" for line in self.config)]
        lines += ["", "Targets"]
        for name, problem in self.targets.items():
            device = best_known(profile(name))
            state = f"no: {problem}" if problem else f"compiles here, {format_bytes(device.capacity)}"
            lines.append(f"  {name:<18} {state}{', rates measured' if device.measured else ''}")
        lines += ["", "Rates, and where they come from (jaxtensile calibrate measures this machine's device)"]
        for name in self.targets:
            device = best_known(profile(name))
            if device.measured or not device.backend.own_memory:
                lines += [f"  {name}", *(f"    {line}" for line in table(device))]
        return "\n".join(lines)


def diagnose(config: str | None = None) -> Diagnosis:
    """Check packages, accelerators and config (by default the one that counts here), and try every target once."""
    return Diagnosis(
        python=platform.python_version(),
        nvidia_driver=has_nvidia_driver(),
        tpu=has_tpu(),
        core={name: _version(name) for name in _CORE},
        extras={extra: {name: _version(name) for name in members} for extra, members in _EXTRAS.items()},
        targets=_try_targets(targets()),
        config=_config(config),
    )


def _config(option: str | None) -> tuple[str, ...]:
    try:
        return tuple(checked(option))
    except ConfigError as error:
        return (str(error),)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _try_targets(names: tuple[str, ...]) -> dict[str, str]:
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRY_TARGETS, *names], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict.fromkeys(names, f"could not be tried: {error}")
    answers: dict[str, str] = {}
    for line in child.stdout.splitlines():
        try:
            name, problem = json.loads(line)
        except ValueError:  # something a plugin printed
            continue
        answers[name] = problem
    last = (child.stderr.strip().splitlines() or ["no message"])[-1]
    died = f"the trial process ended with status {child.returncode}: {last}"
    return {name: answers.get(name, died) for name in names}
