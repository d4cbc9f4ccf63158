"""This machine's accelerators and memory, from the kernel and the driver: no JAX, no plugin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from jaxtensile.units import MIB, Bytes

_ANSWERS: Final = 30.0
"""Seconds to wait for ``nvidia-smi``: it is slow if it loads the driver first. A guess."""
_GOOGLE: Final = "0x1ae0"
_CUDA_CHECK: Final = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
WITHOUT_TPU: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
"""Environment variables that silence libtpu without a TPU and let several processes compile for one at once."""


def allocator_stats(device: Any) -> dict[str, int]:
    """What the allocator of a JAX device says of its bytes; nothing where it has no figures."""
    try:
        return device.memory_stats() or {}
    except Exception:  # a backend without these figures
        return {}


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded (``/dev/dxg``: WSL)."""
    return any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def has_tpu() -> bool:
    """Whether a Google accelerator is on this machine's PCI bus."""
    return any(p.read_text().strip() == _GOOGLE for p in Path("/sys/bus/pci/devices").glob("*/vendor"))


def host_memory(root: Path = Path("/")) -> Bytes:
    """Bytes of host memory that this process may use: the machine's, or a control group's lower limit.

    ``root``: the folder with ``proc`` and ``sys``.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((physical, *_group_limits(root)))


def _group_limits(root: Path) -> Iterator[Bytes]:
    """Limits of this process's memory control groups (versions 1 and 2) and of all above them."""
    with suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if not after.startswith("cgroup"):
                continue
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup2":
                controller, file = "", "memory.max"
            elif kind == "cgroup" and "memory" in options.split(","):
                controller, file = "memory", "memory.limit_in_bytes"
            else:
                continue
            # What is mounted is the tree below ``top``: all of it, or in a container often this group alone.
            top, mount = (_unescaped(path) for path in before.split(" ")[3:5])
            place = root / mount.lstrip("/")
            group = next((path for _, names, path in groups if controller in names.split(",")), top)
            inside = Path(group).relative_to(top) if Path(group).is_relative_to(top) else Path()
            for folder in (place / inside, *(place / inside).parents):
                if folder.is_relative_to(place):
                    yield from _limit(folder / file)


def _limit(file: Path) -> Iterator[Bytes]:
    """The number in a control group's file, if it has one (not ``max``)."""
    with suppress(OSError):
        text = file.read_text().strip()
        if text.isdecimal():
            yield int(text)


def _unescaped(path: str) -> str:
    """A path of ``/proc/self/mountinfo``, in which a blank is ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def device_memory() -> dict[str, Bytes]:
    """Bytes of each device, by lease name: the GPUs that ``nvidia-smi`` lists, else the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None and has_nvidia_driver():
        ask = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(ask, capture_output=True, text=True, timeout=_ANSWERS, check=True).stdout
            return {f"cuda:{k}": int(line) * MIB for k, line in enumerate(said.split())}
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # a driver that does not answer has no devices to share
    return {"cpu:0": host_memory()}


def quiet_plugins() -> None:
    """Keep JAX's CUDA and TPU plugins quiet on a machine without such devices. Call it before the first use of JAX.

    Without cuDNN or a driver, the CUDA plugin prints a traceback, and the process cannot even compile with it. libtpu
    queries its place in a pod and prints that nobody answered. No effect if the device is present; set variables stay.
    JAX itself sets ``TPU_SKIP_MDS_QUERY`` if it sees no TPU.
    """
    if not has_nvidia_driver():
        os.environ.setdefault(_CUDA_CHECK, "1")
    if ("TPU_LIBRARY_PATH" in os.environ or find_spec("libtpu") is not None) and not has_tpu():
        for name, value in WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
