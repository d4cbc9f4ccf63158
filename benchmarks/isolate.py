"""Each case of a benchmark in a process of its own, and results that survive an interruption."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def isolated(module: str, name: str, key: str = "workload", options: tuple[str, ...] = ()) -> dict[str, Any]:
    """What ``python -m benchmarks.MODULE --case NAME`` prints as JSON; a crash is a result too, under ``key``."""
    print(f"{name} …", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{module}", "--case", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {key: name, "crash": (done.stderr or done.stdout)[-2000:]}
    return json.loads(lines[-1])


def save(path: Path, result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """The result as JSON at ``path`` and as a table beside it."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))
