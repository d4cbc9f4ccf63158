"""A first hour with the README: what each script of a newcomer prints.

    python -m benchmarks.reports.hour [--label NAME] [SCRIPT ...]

``newcomer/*.py`` are what somebody wrote who had the README alone, and what went wrong is said in their first lines.
Each is run as it is, in a process of its own and without plans of earlier ones, and what it prints is put into
``hour-jax<version>.json`` and ``.md``, runs of several versions under their ``--label`` (default "now").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import ROOT, heading, save

HERE = Path(__file__).parent
SCRIPTS = HERE / "newcomer"
LIMIT = 1200.0
MOST_LINES, WIDEST = 60, 200
A100 = ("--target", "nvidia-a100-40gb")
ESTIMATES = {
    "largest_batch": (("step", *A100), ("step48", *A100, "--no-batch")),
    "nnx_train": (("step", *A100, "--exact"),),
}
"""Scripts that are read by the command line, and what it is asked for."""


def commands(name: str) -> list[list[str]]:
    """What is run of one script, as arguments of Python."""
    file = str(SCRIPTS.relative_to(ROOT) / f"{name}.py")
    if name not in ESTIMATES:
        return [[file]]
    return [["-m", "jaxtensile", "estimate", f"{file}:{fun}", *rest] for fun, *rest in ESTIMATES[name]]


def run(name: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "JAXTENSILE_PLAN_CACHE": "off", "PYTHONPATH": str(ROOT)}
    out = []
    for arguments in commands(name):
        print(name, *arguments[2:], "…", flush=True)
        began = time.perf_counter()
        command = [sys.executable, *arguments]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=environment,
                timeout=LIMIT,
            )
            told, status = done.stdout, str(done.returncode)
        except subprocess.TimeoutExpired as late:
            told, status = (late.stdout or b"").decode(errors="replace"), f"ended after {LIMIT:.0f} s"
        lines = [line[:WIDEST].rstrip() for line in told.replace(str(ROOT) + os.sep, "").splitlines()]
        seconds = round(time.perf_counter() - began, 1)
        out.append({"command": ["python", *arguments], "status": status, "seconds": seconds, "lines": lines})
    return out


def table(result: dict[str, Any]) -> str:
    labels = list(result["runs"])
    out = heading("A first hour with the README", result["runs"][labels[-1]]["machine"], __doc__)
    names = dict.fromkeys(name for label in labels for name in result["runs"][label]["scripts"])
    for name in names:
        doc = (SCRIPTS / f"{name}.py").read_text().partition('"""')
        said = doc[2].partition("\n")[0].strip('"') if not doc[0].strip() else ""
        out += [f"## {name}", "", *([said, ""] if said else [])]
        for label in labels:
            for row in result["runs"][label]["scripts"].get(name, ()):
                lines = row["lines"]
                cut = [f"… {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
                command = " ".join(row["command"])
                head = f"{label} ({result['runs'][label]['commit']}), {row['seconds']:.0f} s, status {row['status']}:"
                out += [f"{head} ``{command}``", "", "```", *lines[:MOST_LINES], *cut, "```", ""]
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="all without them")
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    from benchmarks.machine import commit, describe

    path = HERE / f"hour-jax{describe()['jax']}.json"
    result = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    known = result["runs"].get(options.label, {}).get("scripts", {})
    for name in options.scripts or sorted(p.stem for p in SCRIPTS.glob("*.py") if p.stem != "__init__"):
        known[name] = run(name)
        result["runs"][options.label] = {"machine": describe(), "commit": commit(), "scripts": known}
        save(path, result, table)


if __name__ == "__main__":
    main()
