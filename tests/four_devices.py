"""A process of its own with four CPU devices, or another number, for programs that are run on several."""

import subprocess
import sys


def on_four_devices(program, home, text=""):
    """Run a program there, with ``text`` as its input; it writes its caches under ``home``."""
    return on_devices(4, ("-c", program), home, text)


def on_devices(count, arguments, home, text=""):
    """Run Python with these arguments there."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "PYTHONPATH": ":".join(p for p in sys.path if p),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
        },
    )
