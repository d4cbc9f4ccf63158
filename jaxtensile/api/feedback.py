"""Time the first calls of a plan, and plan again if steps are longer or shorter than predicted.

The measured step gives one factor by which all work is slower (or faster) than the device's rates. The ratios of
products, traffic and launches stay as they are. If the plan copies to the host, the link's rate comes from
``calibrate``, else from a short measurement between two steps. Without either nothing is learned, since slow work and a
slow link look the same.

A new plan is solved in its own thread. It is compiled if it differs and its predicted step beats the measured one by
``WORTH``. Calls switch to it between two steps, and back if it proves slower. Plans that only recompute stay: one
factor changes none of their comparisons.

Invariant: calls always run a verified program with the same results.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.errors import StoppedError
from jaxtensile.planner import renewal
from jaxtensile.search.request import Fitted, Request
from jaxtensile.units import Seconds, format_seconds
from jaxtensile.xla.calibration import link_bandwidth

SKIPPED, TIMED = 1, 5
"""Calls of a plan left untimed (the first loads the program), then timed: a median of five tolerates two disturbed
ones. A guess."""
OFF = 1.3
"""Factor between measured and predicted step above which the measurement is folded in. A guess."""
WORTH = 1.02
"""Factor by which another plan must be shorter. A guess."""
PATIENCE = 50
"""Calls after which timing ends: calls that overlap with others, or return no array, cannot be timed. A guess."""
RENEWALS = 2
"""Most renewals of one signature. A guess."""

clock = time.perf_counter
_RATES = ("memory_bandwidth", "matmul_flops_bf16", "matmul_flops_f32", "elementwise_flops")


@dataclass(slots=True)
class _Search:
    """A renewal under way: its result, or why there is none."""

    found: Fitted | None = None
    device: DeviceProfile | None = None
    note: str = ""
    done: bool = False
    given_up: bool = False


class Feedback:
    """What one signature runs, and what its steps taught. ``fitted``: what it runs at present.

    ``device``: the rates it was planned for. ``ask_again``: called in another thread to bring calls back to Python.
    """

    def __init__(self, fitted: Fitted, device: DeviceProfile, ask_again: Callable[[], object]) -> None:
        self.fitted = fitted
        self._ask_again = ask_again
        self._lock = threading.Lock()
        self._settled = fitted.time is None
        self._device = device  # as it was planned for, then with what was folded in
        self._before: tuple[Fitted, Seconds] | None = None
        self._search: _Search | None = None
        self._times: list[Seconds] = []
        self._calls = self._running = 0

    @property
    def timing(self) -> bool:
        """Whether calls should come to ``run``."""
        return not self._settled and self._search is None

    def give_up(self) -> None:
        """End a renewal as soon as possible; the present plan stays."""
        with self._lock:
            self._settled = True
            if self._search is not None:
                self._search.given_up = True

    def change(self) -> None:
        """Between two steps: switch to the plan that a renewal has found."""
        with self._lock:
            search = self._search
            if self._settled or search is None or not search.done:
                return
            self._search = None
            if search.found is None:
                self._note(search.note)
                self._settled = True
                return
            old, new = self.fitted.report, search.found.report
            assert old.measured is not None and search.device is not None
            # Of the plain program XLA's number is known, if at all, from the first fit.
            baseline = old.baseline if old.baseline.exact else new.baseline
            notes = tuple(dict.fromkeys((*new.notes, search.note)))
            report = replace(new, baseline=baseline, notes=notes, renewed=old.renewed + 1)
            self._before = self.fitted, old.measured
            self.fitted, self._device = replace(search.found, report=report), search.device
            self._times, self._calls = [], 0

    def tell(self, **fields: Any) -> None:
        """Put figures into the report of what runs."""
        with self._lock:
            self.fitted = replace(self.fitted, report=replace(self.fitted.report, **fields))

    def run(self, fitted: Fitted, args: Any, kwargs: Any, request: Callable[[], Request], device: Any) -> Any:
        """Call ``fitted.jitted``, timed if wanted; the last timed call decides what follows.

        ``request``: makes a renewal's request, without arrays. ``device``: where the call runs.
        """
        with self._lock:
            timed = fitted is self.fitted and self.timing
            self._calls += 1
            calls, alone = self._calls, self._running == 0
            self._running += 1
        try:
            if timed:
                _wait_for((args, kwargs))
            started = clock()
            outputs = fitted.jitted(*args, **kwargs)
            timed = timed and _wait_for(outputs)
            took = clock() - started
        finally:
            with self._lock:
                self._running -= 1
        search, measured = None, 0.0
        with self._lock:
            if fitted is not self.fitted or not self.timing:
                return outputs
            if timed and alone and calls == self._calls:
                self._times.append(took)
            if len(self._times) == SKIPPED + TIMED:
                measured = statistics.median(self._times[SKIPPED:])
                search = self._judged(measured)
            elif self._calls >= PATIENCE:
                self._settled = True
        if search is not None:
            self._begin(search, fitted, measured, request, device)
        return outputs

    # ---- under the lock ----

    def _note(self, text: str) -> None:
        report = self.fitted.report
        if text:
            report = replace(report, notes=tuple(dict.fromkeys((*report.notes, text))))
            self.fitted = replace(self.fitted, report=report)

    def _judged(self, measured: Seconds) -> _Search | None:
        """Record the measured time; returns a renewal to begin if it is not the predicted one."""
        report = replace(self.fitted.report, measured=measured)
        self.fitted = replace(self.fitted, report=report)
        if self._before is not None and measured > self._before[1]:
            took = format_seconds(measured)
            self.fitted, self._before = self._before[0], None
            self._note(f"a renewed plan took longer, {took} a step, and was given up")
            self._settled = True
            return None
        self._before = None
        if report.step / OFF <= measured <= report.step * OFF:
            self._settled = True
            return None
        self._search = _Search()
        return self._search

    # ---- without it: the request is made under the lock of who calls ``change``, and the link is measured ----

    def _begin(
        self, search: _Search, fitted: Fitted, measured: Seconds, make_request: Callable[[], Request], device: Any
    ) -> None:
        """Begin a renewal, or note why there is none."""
        predicted = format_seconds(fitted.report.step)
        off = f"steps take {format_seconds(measured)} where {predicted} were predicted"
        try:
            request = replace(make_request(), device=self._device)
            why = self._why_not(request, fitted)
            rate = None if why else self._link(request, fitted, device)
            if not why and rate is None and fitted.time is not None and fitted.time.copies:
                why = "the link was never measured, so that slow work and slow copies look alike: run calibrate()"
            if not why:
                enter = _compat.configuration()
                task = _Task(running=fitted, request=request, measured=measured, link=rate, off=off, enter=enter)
                self._start(search, task)
        except Exception as error:  # the call has been made: nothing here may keep its outputs from the user
            why = _told(error)
        if why:
            with self._lock:
                self._note(f"{off}; the plan stays: {why}")
                self._settled, self._search = True, None

    def _why_not(self, request: Request, fitted: Fitted) -> str:
        """Why a plan cannot be renewed; empty if it can."""
        link = (request.host_budget > 0 or fitted.state) and request.device.backend.offloads
        if not (link or request.may_stack_on_host):
            return "it recomputes alone, and one factor on all work changes nothing in it"
        return "it has been renewed often enough" if fitted.report.renewed >= RENEWALS else ""

    def _link(self, request: Request, fitted: Fitted, device: Any) -> float | None:
        """Bytes per second of the link, if it matters and can be known."""
        if "link_bandwidth" in request.device.measured:
            return request.device.link_bandwidth
        return link_bandwidth(device) if fitted.time is not None and fitted.time.copies else None

    def _start(self, search: _Search, task: _Task) -> None:
        def renew() -> None:
            _renew(search, task)
            if search.found is not None:
                self._ask_again()

        # No daemon: the interpreter waits for it at exit, or XLA's threads would outlive what they work with.
        threading.Thread(target=renew, name="jaxtensile-renewal").start()


# ---- in a thread of its own -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A renewal's input. ``link``: bytes per second, None to keep it. ``off``: both times in words. ``enter``: enter
    the calls' context."""

    running: Fitted
    request: Request
    measured: Seconds
    link: float | None
    off: str
    enter: Callable[[], bool]


def _renew(search: _Search, task: _Task) -> None:
    def watch(_: str) -> None:
        # The main thread is no longer alive once the interpreter waits for the others to end.
        if search.given_up or not threading.main_thread().is_alive():
            raise StoppedError

    try:
        search.note = _find(search, task, watch)
    except StoppedError:
        pass
    except Exception as error:
        search.found, search.note = None, f"{task.off}; the plan stays: its renewal failed: {_told(error)}"
    finally:
        search.done = True


def _find(search: _Search, task: _Task, watch: Callable[[str], None]) -> str:
    """Fill ``search``; the note for the report."""
    stays = f"{task.off}; the plan stays"
    if not task.enter():
        return f"{stays}: the calls are made in a context that no other thread can enter"
    request, running = task.request, task.running
    if task.link is not None:
        measured = request.device.measured | {"link_bandwidth"}
        request = replace(request, device=replace(request.device, link_bandwidth=task.link, measured=measured))
    assert running.time is not None
    slower = running.time.slower(task.measured, request.way)
    if slower is None:
        return f"{stays}: by the model its copies alone take longer"
    search.device = slowed(request.device, slower)
    found = renewal.renew(replace(request, device=search.device), task.measured / WORTH, running.key, watch)
    folded = f"with work {slower:.3g} times as long"
    if found is None:
        return f"{stays}: {folded} no other is {100 * (WORTH - 1):.0f} % shorter"
    search.found = found
    return f"{task.off}; the plan was renewed {folded}"


def slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    """``device`` with all work ``factor`` times as long and the same link."""
    rates = {name: getattr(device, name) / factor for name in _RATES}
    note = f" / {factor:.3g}, from measured steps"
    told = {name: device.sources.get(name, "") + note for name in (*_RATES, "kernel_launch")}
    launch = device.kernel_launch * factor
    return replace(device, **rates, kernel_launch=launch, sources={**device.sources, **told})


def without_arrays(x: Any) -> Any:
    """What a call with ``x`` is lowered for: its shape, and its sharding if committed."""
    if not isinstance(x, jax.Array) or _compat.is_tracer(x):
        return x
    return _compat.placed(x, x.sharding if x.committed else None)


def _wait_for(tree: Any) -> bool:
    """Wait for the arrays of ``tree``; False if there are none or one failed. The error comes at their use."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return bool(arrays)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


__all__ = ["Feedback", "slowed", "without_arrays"]
