"""One test file in this process, each outcome a line of JSON as soon as it is known.

    python -m benchmarks.jaxtests.worker MODE FILE LOG SECONDS [ONLY]

``MODE``: ``plain`` leaves ``jax.jit`` alone, the others are those of ``substitute``. Tests that ``LOG`` knows are not
run again; ``ONLY``: a file with the names of those to run, all by default. A test that takes longer than ``SECONDS``
ends the process, and the last line says which it was.
"""

from __future__ import annotations

import ast
import dataclasses
import faulthandler
import importlib
import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_VALUES = re.compile(r"Not equal to tolerance|Mismatched elements|Arrays are not|Max absolute difference")
_TOLD = 1500
"""Characters of a failure that are kept: its end says what it was."""


class Recorder:
    """A pytest plugin that writes down what became of each test."""

    def __init__(self, mode: str, log: Path, limit: float, only: Path | None = None) -> None:
        self.mode = mode
        self.known = {row["id"] for row in read(log) if "outcome" in row}
        self.only = set(only.read_text().splitlines()) if only else None
        self.out = log.open("a")
        self.limit = limit
        self.row: dict[str, Any] = {}

    def tell(self, row: dict[str, Any]) -> None:
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: Any) -> None:
        """JAX is imported here in every mode, as its test helpers keep the stdout that there is then."""
        if self.mode != "plain" and isinstance(collector, pytest.File):
            from benchmarks.jaxtests.substitute import install

            install(self.mode)
        if isinstance(collector, pytest.File):
            fill_in(collector.path)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        names = {item: _name(item.nodeid) for item in items}
        asked = set(names.values()) if self.only is None else self.only
        items[:] = [item for item in items if names[item] in asked - self.known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.row = {"id": _name(nodeid), "outcome": "passed", "counts": _counts(), "began": time.perf_counter()}
        self.tell({"begin": self.row["id"]})
        faulthandler.dump_traceback_later(self.limit, exit=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "passed" or self.row["outcome"] == "failed":
            return
        self.row["outcome"] = report.outcome
        if report.failed:
            text = str(report.longrepr)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.row["error"] = crash.message[:_TOLD] if crash else text[-_TOLD:]
            self.row["where"] = text[-_TOLD:]
            self.row["values"] = bool(_VALUES.search(text))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        before = self.row.pop("counts")
        self.row["seconds"] = round(time.perf_counter() - self.row.pop("began"), 2)
        self.row.update({k: v - before[k] for k, v in _counts().items() if v != before[k]})
        self.tell(self.row)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.tell({"finished": int(exitstatus)})


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; the last one may have been cut."""
    rows = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def fill_in(file: Path) -> None:
    """Give modules the names that a test file of another version of JAX imports and they lack: only tests that use
    them fail, with ``jax.jit`` as well."""
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        try:
            module = importlib.import_module(node.module)
        except ImportError:
            continue
        for alias in node.names:
            if hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}") is not None:
                continue
            if not hasattr(module, alias.name):
                setattr(module, alias.name, type(alias.name, (_Missing,), {}))


class _Missing:
    """In place of what this version of JAX does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"this version of JAX has no {type(self).__name__}")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _counts() -> dict[str, int]:
    substitute = sys.modules.get("benchmarks.jaxtests.substitute")
    return dataclasses.asdict(substitute.COUNTS) if substitute else {}


def main(mode: str, file: str, log: str, limit: str, only: str = "") -> int:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist", "--tb=short"]
    recorder = Recorder(mode, Path(log), float(limit), Path(only) if only else None)
    status = pytest.main([file, *options], plugins=[recorder])
    return 0 if status in (0, 1, 5) else int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
