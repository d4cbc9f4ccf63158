"""Which small faults do the tests of a module not see?

    python -m benchmarks.mutation.run [--sample N] [--print-only] [MODULE ...]

A fault is put into one module at a time (``mutants.py`` says which), and the module's own tests run on it:
``test_<module>.py``, those that ``TESTS`` names, or those of its room. A fault is *killed* when one of them fails or
when they take five times as long as they should; otherwise it *survives*: either it changes nothing that anybody can
see, or a test is missing. Of each module the first ``--sample`` faults by their hash are tried. The tests that run the
changed line come first, the quickest before the others, and then all others.

It works on a copy of the files that git knows, in a temporary folder. Results go to ``results.json`` and ``.md`` after
each fault; those of a module whose text has not changed are not tried again, survivors are if the tests have.
``MODULE`` is a path without its ending, as ``passes/verify/check``; without any all modules are tried.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.isolate import ROOT, heading
from benchmarks.machine import describe
from benchmarks.mutation.mutants import Mutant, mutants

RESULTS: Final = Path(__file__).parent / "results.json"
SAMPLE: Final = 20
SLOW: Final = 5.0
STARTING: Final = 60.0
"""Seconds that a test session may take before its first test, on a busy machine."""
LONGEST: Final = 900.0
"""Seconds that the tests of a module may take with their lines counted; with longer ones none is tried."""
MOST_BYTES: Final = 8 << 30
"""Of data, for a process with a fault in it."""
TESTS: Final = {
    "jaxtensile/search/candidates": ["variants", "recipe"],
    "jaxtensile/search/cheapest": ["variants"],
    "jaxtensile/rewrites/rows/loop_rows": ["chunk"],
    "jaxtensile/rewrites/rows/made_rows": ["chunk"],
    "jaxtensile/spmd/placement": ["offload_state"],
    "jaxtensile/ir/plan": ["check", "liveness"],
    "jaxtensile/planner/rounds": ["pipeline"],
    "jaxtensile/planner/series": ["pipeline"],
    "jaxtensile/planner/smallest": ["pipeline"],
    "jaxtensile/rewrites/rows/region": ["chunk"],
    "jaxtensile/search/modelled": ["pipeline"],
    "jaxtensile/jobs/suspension": ["suspend"],
    "passes/solvers/answer": ["greedy"],
    "passes/offload/insertion": ["offload"],
    "passes/offload/loops": ["loops"],
    "passes/solvers/milp": ["exact"],
    "passes/order/schedule": ["reorder", "offload", "clones", "check"],
    "jaxtensile/program/emit": ["emit", "own_stacks"],
    "passes/offload/state": ["streaming"],
    "passes/verify/pack_check": ["pack"],
    "jaxtensile/search/made": ["trial_compiles"],
    "jaxtensile/search/request": ["pipeline"],
    "jaxtensile/search/variant": ["variants"],
    "jaxtensile/planner/as_written": ["pipeline"],
    "jaxtensile/planner/contest": ["pipeline"],
    "jaxtensile/planner/page": ["pipeline"],
    "jaxtensile/planner/recall": ["plan_cache"],
    "jaxtensile/rewrites/rewrite": ["variants"],
    "jaxtensile/rewrites/rows/batched": ["chunk"],
    "jaxtensile/cli/doctor": ["cli"],
    "jaxtensile/cli/tuning": ["cli", "tune"],
    "jaxtensile/cli/loading": ["cli", "estimate_table"],
    "jaxtensile/cli/adopted": ["arbitrated"],
    "jaxtensile/cli/keeping": ["running"],
    "jaxtensile/cli/on_ray": ["running"],
    "jaxtensile/cli/running": ["running"],
    "jaxtensile/cli/xla_memory": ["running"],
    "jaxtensile/cli/serving": ["watching", "cli"],
    "jaxtensile/report/text": ["report"],
    "jaxtensile/report/facts": ["report"],
    "jaxtensile/report/chart": ["report"],
    "jaxtensile/report/html": ["report"],
    "jaxtensile/estimation/figures": ["estimation"],
    "jaxtensile/estimation/text": ["estimation"],
    "jaxtensile/ir/groups": ["segments"],
    "jaxtensile/ir/timeline": ["report"],
    "jaxtensile/xla/compilers": ["compile"],
    "passes/lifetimes/in_place": ["in_place", "loop_bodies", "donated"],
    "passes/pack/buffers": ["pack"],
    "runtime/config/tables": ["runtime_config"],
    "runtime/config/finding": ["runtime_config"],
    "runtime/coordinate/chronicle": ["coordinator"],
    "runtime/coordinate/status": ["coordinator"],
    "runtime/decide/events": ["coordinator"],
    "runtime/decide/gate_order": ["coordinator"],
    **{f"passes/pack/{name}": ["pack"] for name in ("best_fit", "pack_exact", "skyline", "valleys")},
    "jaxtensile/api/jit": ["api"],
    "jaxtensile/cli/estimate": ["estimate_table"],
    "jaxtensile/cli/main": ["cli"],
    "jaxtensile/devices/profiles": ["device"],
    "jaxtensile/estimation/estimate": ["estimation"],
    "jaxtensile/ir/text": ["irtext"],
    "jaxtensile/jobs/job": ["jobs"],
    "passes/solvers/by_name": ["solvers"],
    "runtime/decide/admission": ["coordinator"],
    "runtime/config/config": ["runtime_config"],
    "runtime/daemon/journal_file": ["journal"],
    "runtime/decide/knapsack": ["policy"],
    "runtime/coordinate/outbox": ["coordinator"],
    "runtime/daemon/peers": ["coordinator"],
    "runtime/protocol/wire": ["messages"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"faults of each module (default {SAMPLE})")
    parser.add_argument("--print-only", action="store_true", help="leave the recorded results alone")
    options = parser.parse_args()
    known = [m for m in modules() if tests_of(m)]
    wrong = [m for m in options.modules if m not in known]
    if wrong:
        parser.error(f"{wrong[0]!r} is no module with tests: there are {', '.join(known)}")
    # Before the first fork, because all tests need them; nothing of the package, which differs between the processes.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax  # noqa: F401
    import scipy.optimize  # noqa: F401

    import benchmarks.mutation.session  # noqa: F401

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"modules": {}}
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        os.chmod(folder, 0o755)  # tests of the daemon come as another user
        tree = Path(folder) / "tree"
        copied(tree)
        for module in options.modules or known:
            print(f"{module} …", flush=True)
            keep = (lambda _: None) if options.print_only else partial(saved, module)
            row = tried(tree, module, options.sample, recorded["modules"].get(module, {}), keep)
            print(told(module, row), flush=True)
            keep(row)


def modules() -> list[str]:
    return [
        p.relative_to(ROOT).with_suffix("").as_posix()
        for folder in ("jaxtensile", "passes", "runtime")
        for p in sorted((ROOT / folder).rglob("*.py"))
    ]


def tests_of(module: str) -> list[str]:
    """Its test files, relative to the tree: its own, else those of its room; empty for what has neither."""
    room, _, own = module.removeprefix("jaxtensile/").rpartition("/")
    files = [p for name in TESTS.get(module, [own]) for p in (ROOT / "tests").rglob(f"test_{name}.py")]
    if not files and room and own != "__init__":
        files = sorted((ROOT / "tests" / room).glob("test_*.py"))
    return [str(p.relative_to(ROOT)) for p in files]


def copied(tree: Path) -> None:
    """What git knows of the checkout, as it is now, and compiled."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, tree / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    for folder in ("jaxtensile", "passes", "runtime", "tests"):
        compileall.compile_dir(tree / folder, quiet=1)


def tried(
    tree: Path,
    module: str,
    sample: int,
    before: Mapping[str, Any],
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """A row of the results: ``before`` is an earlier one, of which is used what still holds. ``keep`` is told of the
    row after each fault."""
    path, files = tree / f"{module}.py", tests_of(module)
    text = path.read_bytes()
    every = mutants(text)
    row: dict[str, Any] = {
        "module": digest(text),
        "tests": digest(*((tree / f).read_bytes() for f in files)),
        "files": files,
        "possible": len(every),
    }
    kept = before if before.get("module") == row["module"] else {}
    verdicts = dict.fromkeys(kept.get("killed", ()), "killed")
    if kept.get("tests") == row["tests"]:
        verdicts |= {s["key"]: "survived" for s in kept.get("survivors", ())}
    chosen = every[:sample]
    left = [m for m in chosen if m.key not in verdicts]
    if left:
        for cache in path.parent.glob(f"__pycache__/{path.stem}.*"):
            cache.unlink()
        lines = baseline(tree, module, files)
        if isinstance(lines, str):
            return {**row, "crash": lines}
        for mutant in left:
            path.write_bytes(mutant.applied(text))
            verdicts[mutant.key] = verdict(tree, files, mutant, lines)
            print(f"  {mutant.line}: {mutant.old!r} -> {mutant.new!r}: {verdicts[mutant.key]}", flush=True)
            keep({**row, **counted(chosen, verdicts)})
        path.write_bytes(text)
    return {**row, **counted(chosen, verdicts)}


def counted(chosen: list[Mutant], verdicts: Mapping[str, str]) -> dict[str, Any]:
    """What became of those that have been tried."""
    done = [m for m in chosen if m.key in verdicts]
    left = sorted((m for m in done if verdicts[m.key] == "survived"), key=lambda m: m.start)
    return {
        "tried": len(done),
        "killed": sorted(m.key for m in done if m not in left),
        "survivors": [
            {"key": m.key, "function": m.function, "line": m.line, "source": m.source, "old": m.old, "new": m.new}
            for m in left
        ],
    }


def digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def baseline(tree: Path, module: str, files: list[str]) -> dict[str, Any] | str:
    """Of each test, its seconds and the lines of the module that it runs; or why that is not known."""
    out = tree.parent / "lines.json"

    def work() -> int:
        from benchmarks.mutation.session import covered

        # As tests import it: the folders of ``passes`` and ``runtime`` are links.
        name = module if module.startswith("jaxtensile") else f"jaxtensile/{module}"
        return covered(files, tree / f"{name}.py", out)

    status, said = in_a_fork(tree, work, LONGEST)
    if status != 0:
        print(said[-3000:], file=sys.stderr)
        return f"its tests take more than {LONGEST:.0f} s" if status is None else "its tests fail without a fault"
    return json.loads(out.read_text())


def verdict(tree: Path, files: list[str], mutant: Mutant, lines: Mapping[str, Any]) -> str:
    out = tree.parent / "failed"
    out.unlink(missing_ok=True)
    near = set(range(mutant.lines[0], mutant.lines[1] + 1))
    order = {k: row["seconds"] + (0.0 if near & set(row["lines"]) else 1e6) for k, row in lines.items()}

    def work() -> int:
        from benchmarks.mutation.session import first_failure

        return first_failure(files, order, out)

    limit = STARTING + SLOW * sum(row["seconds"] for row in lines.values())
    status, _ = in_a_fork(tree, work, limit)
    if status == 0:
        return "survived"
    return (
        f"killed by {out.read_text()}"
        if out.is_file()
        else "killed: too slow"
        if status is None
        else "killed at import"
    )


def in_a_fork(tree: Path, work: Callable[[], int], limit: float) -> tuple[int | None, str]:
    """The status of ``work()`` in a process of its own that begins as this one is, and what it printed.

    None for the status where it takes more than ``limit`` seconds; nothing that it started goes on.
    """
    scratch = Path(tempfile.mkdtemp(prefix="r-", dir=tree.parent))
    scratch.chmod(0o755)
    said = scratch / "said"
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(tree)
            out = os.open(said, os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= {"TMPDIR": str(scratch), "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            tempfile.tempdir = None
            sys.dont_write_bytecode = True
            sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            status = work()
        finally:
            sys.stdout.flush()
            os._exit(status)
    ended = waited(pid, limit)
    text = said.read_text(errors="replace") if said.is_file() else ""
    shutil.rmtree(scratch, ignore_errors=True)
    return ended, text


def waited(pid: int, limit: float) -> int | None:
    """The exit status of a child; None, and its whole session killed, after ``limit`` seconds."""
    until = time.monotonic() + limit
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)
    except BaseException:  # it is a session of its own, which an interrupt does not reach
        os.killpg(pid, signal.SIGKILL)
        raise
    os.waitpid(pid, 0)
    return None


# ---- results -------------------------------------------------------------------------------------------


def saved(module: str, row: dict[str, Any]) -> None:
    """Record ``row`` among the results, which are read anew because another run may have written."""
    recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"modules": {}}
    rows = recorded["modules"] | {module: row}
    result = {"machine": describe(), "modules": {m: rows[m] for m in modules() if m in rows}}
    for path, text in ((RESULTS, json.dumps(result, indent=1) + "\n"), (RESULTS.with_suffix(".md"), table(result))):
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        whole.write_text(text)
        whole.replace(path)


def told(module: str, row: Mapping[str, Any]) -> str:
    if "crash" in row:
        return f"{module}: {row['crash']}"
    return f"{module}: {len(row['killed'])} of {row['tried']} killed"


def table(result: dict[str, Any]) -> str:
    lines = heading("Small faults that tests see", result["machine"], __doc__)
    rows = {m: row for m, row in result["modules"].items() if "crash" not in row}
    tried, killed = (sum(row["tried"] for row in rows.values()), sum(len(row["killed"]) for row in rows.values()))
    lines += [f"**{killed} of {tried} faults in {len(rows)} modules are killed.**", ""]
    lines += ["| module | faults | tried | killed | survive |", "|---|---|---|---|---|"]
    for module, row in rows.items():
        faults = len(row["killed"])
        lines.append(f"| {module} | {row['possible']} | {row['tried']} | {faults} | {row['tried'] - faults} |")
    lines += [f"\n{module}: not tried, {row['crash']}" for module, row in result["modules"].items() if "crash" in row]
    lines += ["", "## Survivors", ""]
    for module, row in rows.items():
        lines += [
            f"- {module}, `{s['function']}`: `{one_line(s['old'])}` → `{one_line(s['new'])}` in `{s['source']}`"
            for s in row["survivors"]
        ]
    return "\n".join(lines) + "\n"


def one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
