"""What half and double of a constant change: the plans of the workloads by the model, beside those as it is.

    python -m benchmarks.house.sweep [--parts] [--keep] MODULE:CONSTANT ... [--workloads NAME ...]

as ``passes.solvers.greedy:_AWAY``. Each value is planned with in a process of its own, whose import of the module reads
the other value; those files stay as they are. A share between 0.5 and 1 is moved by half and double of its distance
from 1, a factor between 1 and 3 by its distance from 1, all other numbers themselves. Told are how many plans change;
the change of their bytes, in percent of them, and of their charge, in percent of the charge of the step, the least and
the most; and CPU seconds beside those with the constant as it is, which on a busy machine differ by some 20 % without a
reason. Where the constant is a price, charges are in other units and say nothing. ``--keep`` adds the lines to
``sweep.json`` and ``sweep.md``.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from benchmarks.house.constants import ROOT, constants

HERE = Path(__file__).parent
KEPT, TABLE = HERE / "sweep.json", HERE / "sweep.md"
HEAD = """# What half and double of a constant change

Made by `python -m benchmarks.house.sweep --keep MODULE:CONSTANT ...`: plans by the model for an H200 at 0.8, 0.5 and
0.3 of the temporaries (`benchmarks.house.plans`), with the constant at half and at double beside those with it as it
is. Told are how many plans change; by how much their bytes do, in percent, and what they charge, in percent of the
step (of a price: in its own units, which says nothing); and the CPU seconds of planning, which differ by some 20 %
without a reason. A share between 0.5 and 1 is moved by half and double of its distance from 1, and so is a factor
between 1 and 3.
"""


def scaled(value: Any, factor: float) -> Any:
    """A constant at half or at double, so that it still means something."""
    if isinstance(value, tuple):
        return tuple(scaled(part, factor) for part in value)
    if isinstance(value, int):
        return max(round(value * factor), 1)
    if 0.5 < value < 1:
        return 1 - (1 - value) * factor
    return 1 + (value - 1) * factor if 1 < value <= 3 else value * factor


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def value_of(module: str, name: str) -> Any:
    return next(c.values[c.names.index(name)] for c in constants(file_of(module)) if name in c.names)


class Changed(SourceFileLoader):
    """A module in which one constant has another value."""

    def __init__(self, fullname: str, path: str, name: str, value: Any) -> None:
        super().__init__(fullname, path)
        self.constant, self.value = name, value

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        for at, node in enumerate(tree.body, 1):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if self.constant in {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}:
                    tree.body[at:at] = ast.parse(f"{self.constant} = {self.value!r}").body
                    return compile(tree, self.path, "exec")
        raise KeyError(self.constant)


class Finder(MetaPathFinder):
    """Finds that module."""

    def __init__(self, module: str, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module or (spec := PathFinder.find_spec(fullname, path)) is None or spec.origin is None:
            return None
        spec.loader = Changed(fullname, spec.origin, self.name, self.value)
        return spec


def planned(asked: Sequence[str]) -> None:
    """In a process of its own: the plans of some workloads, one as JSON on each line."""
    module, name, factor, parts, *names = asked
    chunks = (False, True) if parts == "parts" else (False,)
    if module:
        sys.meta_path.insert(0, Finder(module, name, scaled(value_of(module, name), float(factor))))
    from benchmarks.house.plans import plans

    for workload in names:
        begun, rows = time.process_time(), list(plans(workload, chunks))
        spent = (time.process_time() - begun) / len(rows)
        for row in rows:
            print(json.dumps(row | {"seconds": spent}), flush=True)


def run(module: str, name: str, factor: float, parts: bool, names: Sequence[str]) -> dict[Any, dict[str, Any]]:
    way = [module, name, str(factor), "parts" if parts else "whole"]
    command = [sys.executable, "-m", "benchmarks.house.sweep", "--planned", *way, *names]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {(r["workload"], r["chunk"], r["share"]): r for r in map(json.loads, said.splitlines())}


def compared(before: dict[Any, dict[str, Any]], after: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    def percent(what: str, key: Any) -> float:
        """Of the bytes, and of the charge of a step."""
        was, now = before[key][what], after[key][what]
        return 100 * (now - was) / before[key]["step" if what == "charge" else what]

    changed = [k for k in before if before[k]["digest"] != after[k]["digest"]]
    found: dict[str, Any] = {"plans": len(before), "changed": len(changed)}
    for what in ("device", "charge"):
        by = sorted((percent(what, k), k) for k in changed)
        ends = [by[0], by[-1]] if by else []
        found[what] = [[round(p, 2), f"{k[0]} {k[2]}{' in parts' if k[1] else ''}"] for p, k in ends]
    was, now = (sum(r["seconds"] for r in rows.values()) for rows in (before, after))
    return found | {"seconds": round(100 * (now / was - 1))}


def told(found: dict[str, Any]) -> str:
    if not found["changed"]:
        return f"all {found['plans']} the same; time {found['seconds']:+d} %"
    ends = {what: [f"{p:+.2f} % ({where})" for p, where in found[what]] for what in ("device", "charge")}
    bytes_, charge = (" to ".join(dict.fromkeys(ends[what])) for what in ("device", "charge"))
    return (
        f"{found['changed']} of {found['plans']} change: bytes {bytes_}; charge {charge}; time {found['seconds']:+d} %"
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD, "| constant | value | at half | at double | workloads | measured |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{r['module'].removeprefix('jaxtensile.')}:{r['name']}` | {r['value']} | {told(r['half'])} | "
        f"{told(r['double'])} | {', '.join(r['workloads'])} | {r['date']}, {r['commit']}, jax {r['jax']}, "
        f"Python {r['python']}, {r['cpus']} x {r['machine']} |"
        for r in sorted(rows, key=lambda r: (r["module"], r["name"]))
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    from benchmarks import machine, workloads

    parser = argparse.ArgumentParser(description="What half and double of a constant change in the plans.")
    parser.add_argument("constants", nargs="+", metavar="MODULE:CONSTANT")
    parser.add_argument("--workloads", nargs="+", default=list(workloads.NAMES), choices=workloads.NAMES)
    parser.add_argument("--parts", action="store_true", help="also with work in parts of the batch")
    parser.add_argument("--keep", action="store_true", help="keep what is found")
    asked = parser.parse_args()
    about = {**machine.describe(), "commit": machine.commit(), "workloads": asked.workloads}
    before = run("", "", 1.0, asked.parts, asked.workloads)
    for given in asked.constants:
        module, _, name = given.rpartition(":")
        module = f"jaxtensile.{module.removeprefix('jaxtensile.')}"
        half, double = (compared(before, run(module, name, f, asked.parts, asked.workloads)) for f in (0.5, 2.0))
        row = {"module": module, "name": name, "value": value_of(module, name), "half": half, "double": double, **about}
        print(f"{given} = {row['value']}\n  at half:   {told(half)}\n  at double: {told(double)}", flush=True)
        if asked.keep:
            rows = json.loads(KEPT.read_text()) if KEPT.exists() else []
            rows = [r for r in rows if (r["module"], r["name"]) != (module, name)] + [row]
            KEPT.write_text(json.dumps(rows, indent=1) + "\n")
            TABLE.write_text(table(rows))


if __name__ == "__main__":
    planned(sys.argv[2:]) if sys.argv[1:2] == ["--planned"] else main()
