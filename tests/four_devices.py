"""A process of its own with four CPU devices, for programs that are run on several."""

import subprocess
import sys


def on_four_devices(program, home, text=""):
    """Run a program there, with ``text`` as its input; it writes its caches under ``home``."""
    return subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "PYTHONPATH": ":".join(p for p in sys.path if p),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
        },
    )
