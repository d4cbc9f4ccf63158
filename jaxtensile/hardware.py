"""Which accelerators this machine has, asked of the kernel and the driver: no JAX, no plugin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from jaxtensile.units import MIB, Bytes

_GOOGLE: Final = "0x1ae0"
_CUDA_CHECK: Final = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded (``/dev/dxg``: the one that WSL passes through)."""
    return any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def has_tpu() -> bool:
    """Whether a Google accelerator sits on this machine's PCI bus."""
    return any(p.read_text().strip() == _GOOGLE for p in Path("/sys/bus/pci/devices").glob("*/vendor"))


def physical_memory() -> Bytes:
    """Bytes of this machine's own memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory() -> dict[str, Bytes]:
    """Bytes of each device, by the names that leases have: the GPUs that the driver's tool lists, else the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None and has_nvidia_driver():
        ask = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
            return {f"cuda:{k}": int(line) * MIB for k, line in enumerate(said.split())}
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # a driver that does not answer has no devices to share
    return {"cpu:0": physical_memory()}


def spare_cuda_plugin_check() -> None:
    """Let JAX's CUDA plugin load for compiling where no driver is, instead of printing a traceback.

    The plugin looks for cuDNN and a driver at the first use of JAX and is out for the process
    when they are missing. Must run before that; does nothing where a driver is, or where the
    user has set the variable.
    """
    if not has_nvidia_driver():
        os.environ.setdefault(_CUDA_CHECK, "1")
