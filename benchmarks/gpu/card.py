"""Measure prepared programs on the device that is here.

All programs of a workload (``benchmarks/gpu/programs.py``) are compiled first, as many at once as there are processors:
nothing compiles while something is timed. Each then steps once from the same fresh state, for its values, and all take
turns, step by step, ``STEPS`` times: least, quartiles and median. Last, ``TRACED`` steps of each are traced, for the
seconds of each kernel. ``results.json`` is kept after each workload; ``kernels.json.xz`` has the traces and ``hlo.zip``
what XLA scheduled here.
"""

from __future__ import annotations

import gc
import glob
import json
import lzma
import math
import os
import re
import statistics
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax._src import compiler
from jaxlib import xla_client

from benchmarks import workloads
from benchmarks.gpu.programs import config, file_of, told
from benchmarks.gpu.summary import table
from benchmarks.isolate import save

STEPS: Final = 30
WARM: Final = 2
TRACED: Final = 2
TIMED, TINY, LEAST = 8.0, 0.5, 5
"""Seconds that the steps of a program may take, or of one that is not to be measured, and turns in any case."""
LINK_BYTES: Final = 1 << 28
ARGUMENT: Final = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
PINNED, HERE = "pinned_host", "device"


class Program:
    """A module that XLA compiles here and that runs on flat buffers."""

    def __init__(self, folder: Path, row: dict[str, Any]) -> None:
        self.folder, self.row = folder, row
        self.executable: Any = None
        self.text = ""

    def compile(self) -> None:
        """Compile it as jax.jit would."""
        device = jax.devices()[0]
        module = lzma.decompress(file_of(self.folder, self.row["spec"], ".mlir.xz").read_bytes())
        options = compiler.get_compile_options(1, 1, env_options_overrides=self.row["options"], backend=device.client)
        began = time.perf_counter()
        try:
            self.executable = device.client.compile_and_load(module, xla_client.DeviceList((device,)), options)
        except Exception as error:
            self.row["error"] = f"compile: {type(error).__name__}: {str(error)[:500]}"
            return
        self.row["card_compile_seconds"] = time.perf_counter() - began
        m = self.executable.get_compiled_memory_stats()
        size = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
        self.row["card_bytes"] = size
        self.text = self.executable.hlo_modules()[0].to_string()
        taken = self.text.split("entry_computation_layout={(", 1)[1].split(")->", 1)[0]
        parts = ARGUMENT.findall(taken)
        self.kinds = [PINNED if "S(5)" in part else HERE for part in parts]

    def __call__(self, flat: Sequence[Any]) -> list[Any]:
        """One step: flat arguments in, flat results out; nothing is waited for."""
        given = [flat[i] for i in self.row["kept"]]
        outputs = self.executable.execute_sharded(given).disassemble_into_single_device_arrays()
        return [shards[0] for shards in outputs]

    def placed(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments where this program takes them."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        kept = dict(zip(self.row["kept"], self.kinds, strict=True))
        wanted = [kept.get(i, HERE) == PINNED for i in range(len(flat))]
        return [
            x
            if (x.sharding.memory_kind == PINNED) == pinned
            else jax.device_put(x, here.with_memory_kind(PINNED if pinned else HERE))
            for x, pinned in zip(flat, wanted, strict=True)
        ]


def flat_arguments(name: str, tiny: bool) -> tuple[list[Any], int]:
    """A fresh state and a batch as flat buffers, and how many are state."""
    made = jax.jit(workloads.load(name).init_args, static_argnums=0)
    state, batch = made(config(name, tiny=tiny), jax.random.key(0))
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves((state, batch))
    ]
    return jax.block_until_ready(raw), len(jax.tree.leaves(state))


def first_loss(program: Program, name: str) -> None:
    """One step from a fresh state: the loss, and the norm of what became of the state."""
    flat, states = flat_arguments(name, program.row["tiny"])
    flat = program.placed(flat)
    before = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    out = jax.block_until_ready(program(flat))
    after = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    program.row["peak"] = after if after > before else None  # the highest ever, which another's may be
    program.row["loss"] = [float(x) for x in out[states:] if x.ndim == 0]
    wide = [x for x in out[:states] if jnp.issubdtype(x.dtype, jnp.floating)]
    program.row["state_norm"] = math.sqrt(sum(float(jnp.vdot(y, y)) for y in map(_here, wide)))


def _here(x: Any) -> Any:
    x = jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return x.astype(jnp.float32).ravel()


def take_turns(programs: list[Program], name: str) -> None:
    """Time programs step by step in turn, over one state; one that fails is left out."""
    spent: dict[str, list[float]] = defaultdict(list)
    flat: list[Any] = []
    states = 0
    until = time.monotonic() + sum(TINY if p.row["tiny"] else TIMED for p in programs)
    for turn in range(WARM + STEPS):
        for program in list(programs):
            if time.monotonic() > until and turn > WARM + LEAST:
                continue
            try:
                if not flat:
                    flat, states = flat_arguments(name, program.row["tiny"])
                    flat = jax.block_until_ready(program.placed(flat))
                for again in range(2):  # the first after another program's finds nothing of its own in the caches
                    began = time.perf_counter()
                    out = jax.block_until_ready(program(flat))
                    took = time.perf_counter() - began
                    flat = [*out[:states], *flat[states:]]
                    del out
                    if again and turn >= WARM:
                        spent[program.row["spec"]].append(took)
            except Exception as error:
                program.row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
                programs.remove(program)
                flat = []
    for program in programs:
        seconds = sorted(spent[program.row["spec"]])
        program.row["steps"] = len(seconds)
        program.row["least"] = seconds[0]
        program.row["quartiles"] = statistics.quantiles(seconds, n=4)


def traced(program: Program, name: str) -> dict[str, Any]:
    """Seconds and times of each kernel over ``TRACED`` steps, by line of the device's plane and operation."""
    flat, states = flat_arguments(name, program.row["tiny"])
    flat = jax.block_until_ready(program.placed(flat))
    kernels: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                out = jax.block_until_ready(program(flat))
                flat = [*out[:states], *flat[states:]]
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                for event in line.events:
                    stats = {k: v for k, v in event.stats if isinstance(v, str | int | float)}
                    key = f"{line.name}|{stats.get('hlo_op', '')}|{event.name[:100]}"
                    seen = kernels.setdefault(key, [0, 0.0, {}])
                    if not seen[2]:
                        seen[2] = {k: str(v)[:200] for k, v in stats.items() if k not in ("hlo_op", "tf_op")}
                        seen[2]["first_ns"] = event.start_ns
                    seen[0] += 1
                    seen[1] += event.duration_ns
    return kernels


def link() -> dict[str, float]:
    """Bytes per second between device and pinned host memory, each way: the best of several copies."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    there = here.with_memory_kind("pinned_host")
    x = jax.block_until_ready(jax.device_put(jnp.ones(LINK_BYTES // 4, jnp.float32), here))
    best = {"to_host": 0.0, "to_device": 0.0}
    for _ in range(6):
        for way, place in (("to_host", there), ("to_device", here)):
            began = time.perf_counter()
            x = jax.block_until_ready(jax.device_put(x, place))
            best[way] = max(best[way], LINK_BYTES / (time.perf_counter() - began))
    return best


def measure(folder: Path, out: Path, result: dict[str, Any], specs: Sequence[str], until: float) -> None:
    """Measure the programs of ``specs`` in ``folder``, workload by workload, until ``time.monotonic()`` is ``until``.

    Fills ``result`` and keeps it in ``out`` after each workload.
    """
    begun = time.monotonic()
    rows = [row for spec in specs if (row := told(folder, spec))]
    groups: dict[str, list[Program]] = {}
    for row in rows:
        groups.setdefault(row["workload"], []).append(Program(folder, row))
    kernels: dict[str, Any] = {}
    result |= {"device": jax.devices()[0].device_kind, "rows": [{**row} for row in rows if "kept" not in row]}

    def keep() -> None:
        result["seconds"] = time.monotonic() - begun
        save(out / ("dry-run.json" if result["dry_run"] else "results.json"), result, table)
        if any(kernels.values()):
            (out / "kernels.json.xz").write_bytes(lzma.compress(json.dumps(kernels).encode(), preset=1))

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    try:
        result["link"] = link()
    except Exception as error:
        result["link"] = f"{type(error).__name__}: {str(error)[:300]}"
    say(f"{result['device']}, link {result['link']}")
    keep()
    slowest = 0.0
    for name, every in groups.items():
        began = time.monotonic()
        group = [program for program in every if "kept" in program.row]
        if began + slowest > until:
            say(f"{name}: no time left")
            result["rows"] += [program.row | {"error": "no time left"} for program in group]
            continue
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(Program.compile, group))
        say(f"{name}: {sum(p.executable is not None for p in group)} of {len(group)} programs compiled")
        ready = sorted((p for p in group if p.executable is not None), key=lambda p: p.row["bytes"])
        for program in list(ready):
            try:
                first_loss(program, name)
            except Exception as error:
                program.row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
                ready.remove(program)
            gc.collect()
        say(f"{name}: {len(ready)} ran")
        # What takes arguments from the host has them to itself: to move them for each turn takes seconds.
        aside = [p for p in ready if PINNED in p.kinds]
        for together in ([p for p in ready if p not in aside], *([p] for p in aside)):
            take_turns(together, name)
        for program in ready:
            try:
                kernels[program.row["spec"]] = traced(program, name)
            except Exception as error:
                program.row["trace_error"] = f"{type(error).__name__}: {str(error)[:500]}"
            gc.collect()
        with zipfile.ZipFile(out / "hlo.zip", "a", zipfile.ZIP_LZMA) as archive:
            for program in group:
                row, program.executable = program.row, None
                archive.writestr(file_of(Path(), row["spec"], ".hlo").name, program.text)
                steps = [round(1e3 * s, 2) for s in (row["least"], *row["quartiles"])] if "least" in row else ()
                said = row.get("error") or f"{steps} ms, by kernels {1e3 * (row['kernels_seconds'] or 0):.2f}"
                say(f"{row['spec']}: {said}; loss {row.get('loss')} {row.get('trace_error', '')}")
        gc.collect()
        result["rows"] += [{key: v for key, v in p.row.items() if key != "report"} for p in group]
        slowest = max(slowest, time.monotonic() - began)
        keep()
    if result["dry_run"]:
        (out / "hlo.zip").unlink(missing_ok=True)
    keep()
