"""The tests of one module, in the process that calls it: which lines each of them runs, or the first that fails."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

ARGUMENTS = ["-q", "-p", "no:cacheprovider", "--no-header"]


def covered(files: Iterable[str], module: Path, out: Path) -> int:
    """Run the tests and write their seconds and the lines of ``module`` that they run: pytest's status."""
    plugin = _Covered(module)
    status = int(pytest.main([*_arguments(), *files], plugins=[plugin]))
    out.write_text(
        json.dumps({k: {"seconds": plugin.seconds[k], "lines": sorted(plugin.lines[k])} for k in plugin.lines})
    )
    return status


def first_failure(files: Iterable[str], order: Mapping[str, float], out: Path) -> int:
    """Run the tests, the lowest of ``order`` first, up to the first that fails, and write which: pytest's status."""
    return int(pytest.main([*_arguments(), "-x", *files], plugins=[_Ordered(order, out)]))


def _arguments() -> list[str]:
    # Names of folders are short, as sockets in them are: a path of one may have 107 bytes.
    return [*ARGUMENTS, f"--basetemp={tempfile.gettempdir()}/t"]


class _Quick:
    """An example that fails is enough: it need not become smaller."""

    def pytest_sessionstart(self) -> None:
        given = settings()  # what the tests' own conftest.py has loaded
        settings.register_profile("quick", given, phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)
        settings.load_profile("quick")


class _Covered(_Quick):
    def __init__(self, module: Path) -> None:
        self.names = {str(module), str(module.resolve())}
        self.seconds, self.lines = dict[str, float](), dict[str, set[int]]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        lines = self.lines[item.nodeid] = set()

        def in_module(frame: FrameType, event: str, _: object) -> Any:
            lines.add(frame.f_lineno)
            return in_module

        def anywhere(frame: FrameType, event: str, _: object) -> Any:
            return in_module if frame.f_code.co_filename in self.names else None

        started = time.perf_counter()
        threading.settrace(anywhere)
        sys.settrace(anywhere)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # pyright: ignore[reportArgumentType]
            self.seconds[item.nodeid] = time.perf_counter() - started


class _Ordered(_Quick):
    def __init__(self, order: Mapping[str, float], out: Path) -> None:
        self.order, self.out = order, out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.out.write_text(report.nodeid)
