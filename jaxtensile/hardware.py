"""Which accelerators this machine has, asked of the kernel: no JAX, no plugin, milliseconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_GOOGLE: Final = "0x1ae0"
_CUDA_CHECK: Final = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded (``/dev/dxg``: the one that WSL passes through)."""
    return any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def has_tpu() -> bool:
    """Whether a Google accelerator sits on this machine's PCI bus."""
    return any(p.read_text().strip() == _GOOGLE for p in Path("/sys/bus/pci/devices").glob("*/vendor"))


def spare_cuda_plugin_check() -> None:
    """Let JAX's CUDA plugin load for compiling where no driver is, instead of printing a traceback.

    The plugin looks for cuDNN and a driver at the first use of JAX and is out for the process
    when they are missing. Must run before that; does nothing where a driver is, or where the
    user has set the variable.
    """
    if not has_nvidia_driver():
        os.environ.setdefault(_CUDA_CHECK, "1")
