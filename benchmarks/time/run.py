"""How well do the kernels of a compiled program say how long its steps take?

    python -m benchmarks.time.run MEASURED [--fit]

``MEASURED``: a folder with ``rows.jsonl``, a line per program that was measured on a card (``spec``, ``step_s``: the
median of its steps, ``range``: the least and the most), ``hlo/``, XLA's text of each program, compiled without a card
(``.hlo.xz``), and ``calibrate.txt``, the rates that ``jaxtensile calibrate`` found there. Seconds by the kernels, and
by the jaxpr model where the row has them, stand beside the measured ones, by the median and by the least: ten steps
each, some of them disturbed. ``--fit`` fits the shares of ``xla/kernel_time.py`` to every other program, and prints
them. Results go to ``results.json`` and ``results.md``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from benchmarks.isolate import heading, save
from benchmarks.machine import describe

HERE: Final = Path(__file__).parent
TARGET: Final = "nvidia-h100-80gb"
FREE: Final = ("fill", "traffic", "product", "convolution", "attention", "tile", "start", "unaligned")
"""The shares that ``--fit`` fits; the others, of which the programs say little, are as they are."""
PRIOR: Final = {"traffic": 0.3, "fill": 0.03}
"""How dear it is to leave a share that is known from elsewhere, here that of large copies; others are nearly free."""
RATES: Final = {"TB/s": 1e12, "TFLOP/s": 1e12, "GB/s": 1e9}


def measured_device(folder: Path) -> Any:
    """The profile with the rates that were measured."""
    from jaxtensile.devices.profiles import profile

    found = {}
    for line in (folder / "calibrate.txt").read_text().splitlines():
        if match := re.match(r"\s+(\w+)\s+([\d.]+) (TB/s|TFLOP/s|GB/s)\s.*measured", line):
            found[match[1]] = float(match[2]) * RATES[match[3]]
    return replace(profile(TARGET), **found, measured=frozenset(found))


def rows(folder: Path) -> list[dict[str, Any]]:
    """What was measured of each program whose text is there, and its schedule."""
    found = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = row["spec"].translate(str.maketrans(":=,", "_-+"))
        path = folder / "hlo" / f"{name}.hlo.xz"
        if path.is_file():
            found.append(row | {"text": lzma.decompress(path.read_bytes()).decode()})
    return sorted(found, key=lambda row: row["spec"])


def predictions(rows: Sequence[Mapping[str, Any]], device: Any, shares: Any) -> list[Any]:
    from jaxtensile.xla.kernel_time import timed

    return [timed(row["text"], device, shares) for row in rows]


def plain_of(rows: Sequence[Mapping[str, Any]], spec: str) -> int | None:
    """Which row is the plain program of a row's."""
    name = spec.partition(":")[0] + ":plain"
    return next((i for i, row in enumerate(rows) if row["spec"] == name), None)


def fit(rows: Sequence[Mapping[str, Any]], device: Any) -> Any:
    """The shares with which every other program, beginning with the first, takes what it took at least."""
    import numpy as np
    from scipy.optimize import least_squares

    from jaxtensile.xla.kernel_time import FITTED, schedule_of, seconds_of

    schedules = [(schedule_of(row["text"]), row["range"][0]) for row in rows[::2]]
    start = np.array([getattr(FITTED, name) for name in FREE])

    def shares(x: Any) -> Any:
        return replace(FITTED, **dict(zip(FREE, map(float, x * start), strict=True)))

    def off(x: Any) -> list[float]:
        found = [math.log(seconds_of(s, device, shares(x)).seconds / took) for s, took in schedules]
        return [*found, *(np.array([PRIOR.get(name, 0.03) for name in FREE]) * (x - 1))]

    return shares(least_squares(off, np.ones(len(FREE)), bounds=(0.3, 3.0), diff_step=0.02).x)


def verdict(
    rows: Sequence[Mapping[str, Any]], seconds: Callable[[int], float | None], took: Callable[[int], float]
) -> dict[str, Any]:
    """How far off predicted seconds are, overheads over the plain program (in points), and pairs in the wrong order."""
    known = {i: s for i in range(len(rows)) if (s := seconds(i)) is not None}
    ratio = {i: s / took(i) - 1 for i, s in known.items()}
    points, right, pairs = [], 0, 0
    for i in known:
        plain = plain_of(rows, rows[i]["spec"])
        if plain is not None and plain in known and plain != i:
            points.append(100 * abs(known[i] / known[plain] - took(i) / took(plain)))
    for i, j in combinations(known, 2):
        if rows[i]["spec"].partition(":")[0] == rows[j]["spec"].partition(":")[0]:
            pairs += 1
            right += (known[i] < known[j]) == (took(i) < took(j))
    return {
        "programs": len(known),
        "within 10 %": sum(abs(r) <= 0.1 for r in ratio.values()),
        "within 25 %": sum(abs(r) <= 0.25 for r in ratio.values()),
        "worst %": round(100 * max(map(abs, ratio.values())), 1),
        "overheads": len(points),
        "within 5 points": sum(p <= 5 for p in points),
        "kendall": round(2 * right / pairs - 1, 2) if pairs else None,
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds by the kernels of compiled programs beside measured ones.")
    parser.add_argument("folder", type=Path, metavar="MEASURED")
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_args()
    from jaxtensile.xla.kernel_time import FITTED

    device, found = measured_device(asked.folder), rows(asked.folder)
    shares = fit(found, device) if asked.fit else FITTED
    if asked.fit:
        print({name: float(f"{getattr(shares, name):.3g}") for name in FREE})
    made = predictions(found, device, shares)
    least = [row["range"][0] for row in found]
    median = [row["step_s"] for row in found]
    table = []
    for i, (row, ours) in enumerate(zip(found, made, strict=True)):
        plain = plain_of(found, row["spec"])
        table.append(
            {
                "spec": row["spec"],
                "fitted": i % 2 == 0,
                "least_ms": round(1e3 * least[i], 2),
                "median_ms": round(1e3 * median[i], 2),
                "kernels_ms": round(1e3 * ours.seconds, 2),
                "wait_ms": round(1e3 * ours.wait, 2),
                "kernels": ours.kernels,
                "jaxpr_ms": round(1e3 * row["pred_step"], 2) if "pred_step" in row else None,
                "over": None if plain in (None, i) else round(100 * (ours.seconds / made[plain].seconds - 1), 1),
                "over_least": None if plain in (None, i) else round(100 * (least[i] / least[plain] - 1), 1),
                "over_median": None if plain in (None, i) else round(100 * (median[i] / median[plain] - 1), 1),
            }
        )
    jaxpr = [row.get("pred_step") or _plain_step(found, i) for i, row in enumerate(found)]
    verdicts = {}
    for name, which in (("reported", 1), ("fitted", 0), ("all", None)):
        chosen = [i for i in range(len(found)) if which is None or i % 2 == which]
        # Overheads and orders need the other programs of the same name: all are asked for these.
        for what, seconds in (("kernels", [m.seconds for m in made]), ("jaxpr", jaxpr)):
            for against, took in (("least", least), ("median", median)):
                verdicts[f"{what}, {name}, {against}"] = verdict(
                    found,
                    lambda i, s=seconds, c=chosen: s[i] if i in c or found[i]["spec"].endswith(":plain") else None,
                    took.__getitem__,
                )
    text = heading("Seconds by the kernels of compiled programs", describe(), __doc__)
    text += [
        "| program | | least ms | by kernels | off % | waiting | kernels | by the jaxpr | over plain % | by kernels |",
        "|" + "---|" * 10,
    ]
    for row in table:
        off = 100 * (row["kernels_ms"] / row["least_ms"] - 1)
        over = ("", "") if row["over"] is None else (f"{row['over_least']:+.1f}", f"{row['over']:+.1f}")
        text.append(
            f"| {row['spec']} | {'fitted' if row['fitted'] else 'reported'} | {row['least_ms']} | {row['kernels_ms']} "
            f"| {off:+.1f} | {row['wait_ms']} | {row['kernels']} | {row['jaxpr_ms'] or ''} | {over[0]} | {over[1]} |"
        )
    text += [
        "",
        "| predicted by, of which programs, against | " + " | ".join(next(iter(verdicts.values()))) + " |",
        "|" + "---|" * 9,
    ]
    text += [f"| {name} | " + " | ".join(map(str, v.values())) + " |" for name, v in verdicts.items()]
    print("\n".join(text))
    result = {"machine": describe(), "rows": table, "verdicts": verdicts}
    save(HERE / "results.json", result, lambda _: "\n".join(text) + "\n")


def _plain_step(found: Sequence[Mapping[str, Any]], i: int) -> float | None:
    """By the jaxpr model, of a plain program: what the rows of its plans say of it."""
    if not found[i]["spec"].endswith(":plain"):
        return None
    name = found[i]["spec"].partition(":")[0]
    return next(
        (row["pred_plain"] for row in found if row["spec"].startswith(name + ":ours") and "pred_plain" in row), None
    )


if __name__ == "__main__":
    main()
