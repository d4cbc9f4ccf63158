"""One case of the GPU benchmark, in a process of its own: whole training steps, run and timed.

A case prints what it knows as a line of JSON after each of its parts, so that a crash or a time limit costs
only what came after. ``memory_stats`` knows a process's highest use ever, hence the order of parts: the program
with fewer bytes runs first.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import jaxtensile
from benchmarks import workloads
from benchmarks.fit.run import SHARE
from jaxtensile.xla.compile import memory_of

STEPS, WARM = 12, 3
HOST_BUDGET = "48GiB"
LINK_BYTES = 1 << 28


@dataclass(frozen=True)
class Sizes:
    """Which sizes of the workloads run: the published ones, or those that a CPU can run."""

    tiny: bool

    def config(self, name: str) -> Any:
        module = workloads.load(name)
        if not self.tiny:
            return module.Config()
        if name == "gpt2_small":  # as small, but with something to recompute
            return module.Config(layers=4, width=64, heads=4, vocab=97, context=64, batch=8, learning_rate=1e-2)
        return module.Config.tiny()


def run(step: Callable[..., Any], arguments: Callable[[], tuple[Any, Any]], steps: int = STEPS) -> dict[str, Any]:
    """Steps on one batch, each waited for: seconds (median, least, most), the losses, and the highest bytes."""
    state, batch = arguments()
    seconds: list[float] = []
    losses: list[Any] = []
    for _ in range(WARM + steps):
        started = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - started)
        losses.append(loss)
    timed = seconds[WARM:]
    return {
        "step_seconds": statistics.median(timed),
        "range_seconds": [min(timed), max(timed)],
        "steps": len(timed),
        "losses": [float(loss) for loss in losses],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


class Modelled:
    """A workload whose programs are compared: the same arguments for each, made anew because steps donate them."""

    def __init__(self, name: str, sizes: Sizes, remat: str | None = None) -> None:
        module, config = workloads.load(name), sizes.config(name)
        policy = {"remat": getattr(jax.checkpoint_policies, remat)} if remat else {}
        self.work = module.workload(config, **policy)
        self._init = jax.jit(module.init_args, static_argnums=0)
        self._config = config

    def arguments(self) -> tuple[Any, Any]:
        gc.collect()
        return self._init(self._config, jax.random.key(0))

    def compiled(self) -> tuple[Any, dict[str, Any]]:
        """The program as written, and XLA's bytes for it."""
        step = jax.jit(self.work.fun, **self.work.jit_options)
        started = time.perf_counter()
        memory = memory_of(step.lower(*self.arguments()).compile())
        row = {"xla_bytes": memory.device, "argument_bytes": memory.argument}
        return step, {**row, "compile_seconds": time.perf_counter() - started}

    def planned(self, budget: int, host_budget: str | None = None) -> tuple[Any, dict[str, Any]]:
        """``jaxtensile.jit``'s program for a budget and what its report says; no program where none fits."""
        step = jaxtensile.jit(self.work.fun, budget=budget, host_budget=host_budget, **self.work.jit_options)
        started = time.perf_counter()
        try:
            # Not plan(): it would compile the plain program once more.
            report = step._planned(self.arguments(), {})[0].fitted.report
        except jaxtensile.BudgetError as error:
            return None, {"budget": budget, "fits": False, "needs": error.needs, "error": str(error)}
        ratio = report.overhead_ratio
        return step, {
            "budget": budget,
            "fits": report.fits,
            "unchanged": report.unchanged,
            "xla_bytes": report.compiled.device,
            "host_bytes": report.compiled.host,
            "model_bytes": report.predicted.device,
            "predicted_overhead": ratio,
            "predicted_plain_seconds": report.overhead / ratio if ratio else None,
            "rounds": report.rounds,
            "compile_seconds": time.perf_counter() - started,
            "notes": list(report.notes),
        }


def link(row: dict[str, Any], tell: Callable[[], None]) -> None:
    """Bytes per second between device and pinned host memory, each way: the best of several copies."""
    device = jax.devices()[0]
    row["device"], row["platform"] = device.device_kind, device.platform
    row["memory_stats"] = device.memory_stats()
    tell()
    here = jax.sharding.SingleDeviceSharding(device)
    there = here.with_memory_kind("pinned_host")
    x = jax.block_until_ready(jax.device_put(jax.numpy.ones(LINK_BYTES // 4, jax.numpy.float32), here))
    best = {"to_host": 0.0, "to_device": 0.0}
    for _ in range(8):
        for way, place in (("to_host", there), ("to_device", here)):
            started = time.perf_counter()
            x = jax.block_until_ready(jax.device_put(x, place))
            best[way] = max(best[way], LINK_BYTES / (time.perf_counter() - started))
    row["link"] = best


def plain(subject: Modelled, row: dict[str, Any], tell: Callable[[], None]) -> None:
    """The program as written."""
    step, row["peer"] = subject.compiled()
    tell()
    row["peer"] |= run(step, subject.arguments)


def policy(name: str, sizes: Sizes, row: dict[str, Any], tell: Callable[[], None]) -> None:
    """GPT-2 with one policy on every block, and our program of the plain step at its bytes."""
    peer, ours = Modelled("gpt2_small", sizes, name), Modelled("gpt2_small", sizes)
    peer_step, row["peer"] = peer.compiled()
    tell()
    step, row["ours"] = ours.planned(row["peer"]["xla_bytes"])
    tell()
    if step is not None:
        row["ours"] |= run(step, ours.arguments)
        tell()
    row["peer"] |= run(peer_step, peer.arguments)


def host(budget: int, sizes: Sizes, row: dict[str, Any], tell: Callable[[], None]) -> None:
    """Our program with host memory to use."""
    subject = Modelled("gpt2_small", sizes)
    step, row["ours"] = subject.planned(budget, HOST_BUDGET)
    tell()
    if step is not None:
        row["ours"] |= run(step, subject.arguments)
        tell()
        report = step._planned(subject.arguments(), {})[0].fitted.report  # the first steps may have led to another plan
        row["ours"] |= {"predicted_seconds": report.step, "renewed": report.renewed, "notes": list(report.notes)}


def suite(name: str, sizes: Sizes, row: dict[str, Any], tell: Callable[[], None]) -> None:
    """A workload at a share of its plain bytes above its arguments, and as it is."""
    subject = Modelled(name, sizes)
    plain_step, base = subject.compiled()
    row["peer"] = base
    tell()
    budget = int(base["argument_bytes"] + SHARE * (base["xla_bytes"] - base["argument_bytes"]))
    step, row["ours"] = subject.planned(budget)
    tell()
    if step is not None:
        row["ours"] |= run(step, subject.arguments)
        tell()
    row["peer"] |= run(plain_step, subject.arguments)


def case(name: str, *, tiny: bool) -> None:
    """Run one case and print its row: ``link``, ``gpt2:POLICY``, ``host:BYTES`` or ``suite:WORKLOAD``."""
    kind, _, what = name.partition(":")
    row: dict[str, Any] = {"case": name}
    sizes = Sizes(tiny)

    def tell() -> None:
        print(json.dumps(row), flush=True)

    if kind == "link":
        link(row, tell)
    elif kind == "host":
        host(int(what), sizes, row, tell)
    elif kind == "suite":
        suite(what, sizes, row, tell)
    elif what == "none":
        plain(Modelled("gpt2_small", sizes), row, tell)
    else:
        policy(what, sizes, row, tell)
    tell()
