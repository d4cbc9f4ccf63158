"""Each case of a benchmark in a process of its own, and results that survive an interruption."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def isolated(
    module: str,
    name: str,
    key: str = "workload",
    options: tuple[str, ...] = (),
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The last JSON line that ``python -m benchmarks.MODULE --case NAME`` prints.

    A crash, or more than ``limit`` seconds, is a result too: under ``key``, with what was printed before.
    """
    print(f"{name} …", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{module}", "--case", name, *options]
    env = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit, env=env)
        told, crash = done.stdout, (done.stderr or done.stdout)[-2000:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        told, crash = (late.stdout or b"").decode(errors="replace"), f"not done in {limit:.0f} s"
    lines = [line for line in told.splitlines() if line.startswith("{")]
    row = json.loads(lines[-1]) if lines else {}
    if crash or not lines:
        return {key: name, **row, "crash": crash or "printed nothing"}
    return row


def streamed(module: str, name: str, options: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Each JSON line of ``python -m benchmarks.MODULE --case NAME`` as it is printed; a crash is the last one."""
    print(f"{name} …", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{module}", "--case", name, *options]
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True, cwd=ROOT) as child,
    ):
        assert child.stdout is not None
        yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
        if child.wait():
            told.seek(0)
            yield {"crash": told.read()[-2000:] or f"status {child.returncode}"}


def command(doc: str | None, case: Callable[[str], dict[str, Any]]) -> argparse.ArgumentParser:
    """A benchmark's command line, to which its own arguments are added: ``--case NAME``, with which ``isolated`` calls
    it, prints ``case(NAME)`` as one JSON line and ends the process."""

    class Case(argparse.Action):
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: object, values: Any, _: str | None = None
        ) -> None:
            print(json.dumps(case(values)))
            parser.exit()

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action=Case, help=argparse.SUPPRESS)
    return parser


def save(path: Path, result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """The result as JSON at ``path`` and as a table beside it."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


def heading(title: str, machine: Mapping[str, Any], doc: str | None) -> list[str]:
    """The first lines of a table: its title, where it was measured, and what its benchmark says of itself."""
    where = f"jax {machine['jax']}, Python {machine['python']}, {machine['cpus']} x {machine['machine']}"
    return [f"# {title}", "", f"{where}, {machine['date']}", "", (doc or "").strip(), ""]


def run_missing(
    module: str,
    path: Path,
    names: Iterable[str],
    table: Callable[[dict[str, Any]], str],
    *,
    again: bool = False,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The rows of ``path`` by name, with those that are missing or crashed; with ``again`` all. Each is kept as it is
    made."""
    from benchmarks.machine import commit, describe

    machine = describe()
    path = path.with_name(f"{path.name}-jax{machine['jax']}.json")
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    result |= {"machine": machine, "commit": commit()}
    for name in names:
        if name in result["rows"] and "crash" not in result["rows"][name] and not again:
            continue
        row = isolated(module, name, environment=environment, limit=limit)
        result["rows"][name] = {**row, "date": machine["date"]}
        save(path, result, table)
    return result
