"""One process of a group: ``python -m benchmarks.processes.member ADDRESS PROCESSES ME [kill]``.

Reads cases from stdin, a JSON line each, and prints one JSON line for each: what came of it here.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtensile
from benchmarks.processes.cases import DEVICES, Case, built
from jaxtensile.devices import measured
from jaxtensile.devices.profiles import profile


def main(address: str, count: int, me: int) -> None:
    """Join the group and work off the cases."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, me)
    assert jax.device_count() == DEVICES
    print("{}", flush=True)  # here
    for line in sys.stdin:
        case = Case(**json.loads(line))
        try:
            told = _told(case, me)
        except Exception as error:  # a case is a result, whatever comes
            told = {"outcome": "failed", "error": type(error).__name__, "text": str(error)[:2000]}
        print(json.dumps(told), flush=True)
    sys.stdout.flush()
    os._exit(0)  # JAX waits at exit for processes that were killed


def _told(case: Case, me: int) -> dict[str, Any]:
    _measure(case.rates[me])
    step, arguments = built(case)
    use = jax.jit(step).lower(*arguments()).compile().memory_analysis()
    plain = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes
    options: dict[str, Any] = {"budget": int(case.share * plain), "objective": case.objective}
    fault = case.fault if me == case.victim else ""
    interrupting = None
    if fault == "budget":
        options["budget"] -= 1
    elif fault == "options":
        options["undo"] = False
    elif fault == "objective":
        options["objective"] = "time" if case.objective == "flops" else "flops"
    elif fault == "program":
        whole = step
        step = lambda ws, x: whole(ws, x * np.float32(2))  # noqa: E731
        step.__name__ = getattr(whole, "__name__", "step")
    elif fault == "late":
        time.sleep(case.after)
    elif fault == "interrupt":
        interrupting = threading.Timer(case.after, lambda: os.kill(os.getpid(), signal.SIGINT))

    def another(ws: Any, x: Any) -> Any:
        return (x * 2).sum() + sum(w.sum() for w in jax.tree.leaves(ws))

    ours = jaxtensile.jit(step, **options)
    if fault == "absent":
        time.sleep(50)
    if case.fault == "kill":
        print("{}", flush=True)  # about to call
    called = time.time()
    told: dict[str, Any] = {}
    got: Any = None
    try:
        if interrupting is not None:
            interrupting.start()
        if fault == "order":
            jaxtensile.jit(another)(*arguments())
        got = jax.block_until_ready(ours(*arguments()))
    except KeyboardInterrupt:
        told = {"outcome": "interrupted"}
    except jaxtensile.JaxtensileError as error:
        told = {"outcome": "error", "error": type(error).__name__, "text": str(error)}
    except Exception as error:
        told = {"outcome": "failed", "error": type(error).__name__, "text": str(error)[:2000]}
    when = {"called": called, "ended": time.time()}
    if interrupting is not None:
        interrupting.cancel()
        interrupting.join()
    if told:
        return {**told, **when}
    expected = jax.jit(step)(*arguments())
    for e, g in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert g.sharding.is_equivalent_to(e.sharding, g.ndim), (g.sharding, e.sharding)
        for a, b in zip(e.addressable_shards, g.addressable_shards, strict=True):
            np.testing.assert_allclose(a.data, b.data, rtol=1e-4, atol=1e-5)
    text, written = ours.lower(*arguments()).as_text(), jax.jit(step).lower(*arguments()).as_text()
    if case.number % 5 == 0:
        assert ours.plan(*arguments()).compiled.device <= options["budget"]
    return {"outcome": "values", "planned": text != written, "program": hash_of(text), **when}


def hash_of(text: str) -> str:
    """A short word for a program."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _measure(factor: float) -> None:
    """Have measured so much more than the published rates; nothing for 0."""
    Path(str(measured.file_of("cpu"))).unlink(missing_ok=True)
    if factor:
        names = "memory_bandwidth", "matmul_flops_f32", "elementwise_flops"
        numbers = {n: factor ** (1 + k) * getattr(profile("cpu"), n) for k, n in enumerate(names)}
        measured.keep(
            measured.Measurement(
                kind=measured.full_kind("cpu"),
                jaxlib=measured.jaxlib_version(),
                date="2026-01-31",
                took=1.0,
                numbers=numbers,
                how=dict.fromkeys(names, "a random case"),
            ),
            "cpu",
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
