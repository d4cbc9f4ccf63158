"""Static estimates beside what XLA allocates, on every target.

    python -m benchmarks.estimate.targets [--targets NAME ...] [--programs WORD ...] [--static]

The programs are those of ``small.py``: train steps of a few layers, single operations and their derivatives, the suite
at small sizes. What XLA says is kept in ``targets-jax<version>.json``, a row for each program and target, as it becomes
known; a run takes what is missing (``--static``: nothing), and makes all estimates again. XLA:GPU is compiled for
without its own rematerialization, and without optimizing kernels, which come after memory is assigned.

``low`` and ``high`` are the static figure less and more a share of its temporaries and so many copies of the largest
array that is stored. ``fit`` says which, for all targets of one kind together: the least with which on either side
985 of 1000 programs of the calibration half are inside, where a copy counts as a twentieth of the temporaries. One
copy is the least, and no share is below what the networks of ``truth.py`` need on an H200: 0.08 below, 0.21 above.
``jaxtensile.xla.compilers`` has what all versions of jax here need, and for TPUs that there may be no temporaries at
all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimate import small
from benchmarks.isolate import heading

HERE = Path(__file__).parent
KEYS = ("device", "argument", "output", "temp", "alias")
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
SHARES = (0.08, 0.12, 0.16, 0.21, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
LEAST = {"low": 0.08, "high": 0.21}
COPIES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)
COPY = 0.05
WITHIN = 0.985


def allocated(program: small.Program, target: str, kernels: Path) -> dict[str, Any]:
    """What XLA says of one program on one target."""
    import jax

    from benchmarks.machine import kernel_cache, placed
    from jaxtensile.devices.profiles import profile
    from jaxtensile.xla.compile import compile_program, not_recomputing
    from jaxtensile.xla.target import compiler_options, tracing_for

    on_gpu = profile(target).platform == "cuda"
    options = {**compiler_options(target), **({**kernel_cache(kernels), **UNOPTIMIZED} if on_gpu else {})}
    options = not_recomputing(profile(target).backend, options)

    def make(options: Any) -> Any:
        return jax.jit(program.fun, **program.options, compiler_options=options)

    try:
        with tracing_for(target):
            made = compile_program(make, tuple(placed(program.args, target)), {}, options)
    except Exception as error:
        return {"crash": f"{type(error).__name__}: {error}"[:300]}
    if made.memory is None:
        return {"crash": made.refusal}
    return {key: getattr(made.memory, key) for key in KEYS} | {"seconds": round(made.seconds, 2)}


def estimated(program: small.Program, rows: Sequence[dict[str, Any]]) -> None:
    """Put the static figures of one program into its rows."""
    import jax

    from jaxtensile.devices.profiles import profile
    from jaxtensile.estimation.estimate import program_of, static_estimate
    from jaxtensile.xla.target import tracing_for

    traced: dict[str, Any] = {}
    for row in rows:
        device = profile(row["target"])
        if device.platform not in traced:
            with tracing_for(row["target"]):
                trace = jax.jit(program.fun, **program.options).trace(*program.args)
            traced[device.platform] = program_of(trace)
        found = static_estimate(traced[device.platform], device, name=program.name, seconds={})
        row["static"] = {
            **{key: getattr(found, key) for key in ("device", "temp", "low", "high")},
            "least": found.room.least,
            "largest": found.room.largest,
        }


def below(row: dict[str, Any], share: float, copies: float) -> bool:
    """Whether XLA's figure is no lower than that allows."""
    s = row["static"]
    least = s["least"] - share * s["temp"] - copies * s["largest"]
    return row["device"] >= s["device"] - s["temp"] + max(least, 0)


def above(row: dict[str, Any], share: float, copies: float) -> bool:
    """Whether XLA's figure is no higher than that allows."""
    s = row["static"]
    return row["device"] <= s["device"] + share * s["temp"] + copies * s["largest"]


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """``low`` and ``high``, each a share and a number of copies."""
    out = {}
    for side, holds in (("low", below), ("high", above)):
        enough = [
            (share + COPY * copies, share, copies)
            for share, copies in itertools.product(SHARES, COPIES)
            if share >= LEAST[side] and sum(holds(row, share, copies) for row in rows) >= WITHIN * len(rows)
        ]
        out[side] = min(enough)[1:] if enough else (SHARES[-1], COPIES[-1])
    return out


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one half on one target."""
    errors = [abs(row["static"]["device"] / max(row["device"], 1) - 1) for row in rows]
    inside = [row["static"]["low"] <= row["device"] <= row["static"]["high"] for row in rows]
    width = [(row["static"]["high"] - row["static"]["low"]) / max(row["static"]["device"], 1) for row in rows]
    return {
        "programs": len(rows),
        "median": 100 * statistics.median(errors),
        "p90": 100 * sorted(errors)[int(0.9 * len(errors))],
        "inside": 100 * sum(inside) / len(rows),
        "width": 100 * statistics.median(width),
    }


def table(result: dict[str, Any]) -> str:
    out = heading("Static estimates on every target", result["machine"], __doc__)
    out += ["| target | half | programs | median error, % | 90th percentile, % | inside low..high, % | width, % |"]
    out += ["|---|---|---|---|---|---|---|"]
    for target, halves in result["targets"].items():
        for half, s in halves.items():
            figures = f"{s['median']:.1f} | {s['p90']:.1f} | {s['inside']:.1f} | {s['width']:.0f}"
            out.append(f"| {target} | {half} | {s['programs']} | {figures} |")
    out += ["", "``width``: from low to high, in per cent of the static figure, the median. What ``fit`` finds:", ""]
    out += ["| kind of target | low: share, copies | high: share, copies |", "|---|---|---|"]
    for kind, sides in result["fit"].items():
        cells = (", ".join(format(x, "g") for x in sides[side]) for side in ("low", "high"))
        out.append(f"| {kind} | {' | '.join(cells)} |")
    names = list(result["targets"])
    out += [
        "",
        "XLA's MiB, and what the static figure is more or less in per cent; **bold**: not between low and high.",
        "",
    ]
    out += ["| program | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    by = {(row["program"], row["target"]): row for row in result["rows"] if "static" in row}
    for name in dict.fromkeys(row["program"] for row in result["rows"]):
        cells = [_cell(by.get((name, target))) for target in names]
        out.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    s = row["static"]
    text = f"{row['device'] / 2**20:,.1f} {100 * (s['device'] / max(row['device'], 1) - 1):+.0f}"
    return text if s["low"] <= row["device"] <= s["high"] else f"**{text}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="all without them")
    parser.add_argument("--programs", nargs="+", metavar="WORD", help="those with one of these in their names")
    parser.add_argument("--static", action="store_true", help="compile nothing")
    options = parser.parse_args()
    import jax

    from benchmarks.machine import describe
    from jaxtensile.devices.profiles import targets

    machine, programs, halves = describe(), small.programs(), small.halves()
    path = HERE / f"targets-jax{machine['jax']}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["program"], row["target"]): row for row in kept}
    wanted = [p for p in programs.values() if not options.programs or any(w in p.name for w in options.programs)]
    with tempfile.TemporaryDirectory() as folder:
        for program in () if options.static else wanted:
            for target in options.targets or targets():
                if (program.name, target) not in known:
                    row = {"program": program.name, "target": target} | allocated(program, target, Path(folder, target))
                    known[program.name, target] = row
                    save(path, machine, known)
                    print(program.name, target, row.get("crash") or f"{row['device'] / 2**20:,.1f} MiB", flush=True)
            jax.clear_caches()
    for program in programs.values():
        own = [row for (name, _), row in known.items() if name == program.name and "crash" not in row]
        for row in own:
            row["half"] = halves[program.family]
        estimated(program, own)
    save(path, machine, known)


def save(path: Path, machine: dict[str, Any], known: dict[tuple[str, str], dict[str, Any]]) -> None:
    """One row a line, in the order of programs and targets, and the table."""
    from jaxtensile.devices.profiles import profile, targets
    from jaxtensile.xla.compilers import kind_of

    places = {name: i for i, name in enumerate(small.programs())}
    order = {name: i for i, name in enumerate(targets())}
    rows = sorted(
        (row for row in known.values() if row["program"] in places),
        key=lambda row: (places[row["program"]], order[row["target"]]),
    )
    found: dict[str, Any] = {}
    for target in order:
        own = [row for row in rows if row["target"] == target and "static" in row]
        parts = {half: [r for r in own if r["half"] == half] for half in (small.CALIBRATION, small.REPORT)}
        if all(parts.values()):
            found[target] = {half: summary(part) for half, part in parts.items()}
    kinds = {target: kind_of(profile(target)) for target in found}
    fits = {
        kind: fit([r for r in rows if kinds.get(r["target"]) == kind and r.get("half") == small.CALIBRATION])
        for kind in dict.fromkeys(kinds.values())
    }
    head = json.dumps({"machine": machine, "targets": found, "fit": fits}, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n ]\n}\n")
    if found:
        path.with_suffix(".md").write_text(table({"machine": machine, "targets": found, "fit": fits, "rows": rows}))


if __name__ == "__main__":
    main()
