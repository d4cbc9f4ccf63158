"""JAX's own tests, with ``jax.jit`` replaced by ``jaxtensile.jit``: which of them does only ours fail?

    JAX_TESTS=FOLDER python -m benchmarks.jaxtests.run [--library NAME] [--mode MODE ...] [FILE ...]

``JAX_TESTS``: the folder ``tests`` of a checkout of JAX, of the version that is installed or the nearest to it; nothing
of it is copied here. Every file (``api``; by default a list of about seventy) runs in a process of its own, once in
each mode, and what does not pass there runs with ``jax.jit`` as well: ``one``, no budget; ``tight``, the smallest
reachable budget for every call; ``half``, half of the temporaries, with ``chunk=True``; ``forced``, the smallest plan
by the model for every call, whatever XLA allocates for it; ``exec``, no budget, by ``jaxtensile.install`` as
``jaxtensile exec`` does it; ``exec-tight``, so with one byte as best it goes. What a file gave is kept in ``--keep``
line by line, so that a run goes on where it stopped; ``--again`` forgets ours of the chosen modes and files first. What
was compared goes to ``results-jax<version>.json`` and ``.md`` beside this file, for the files that ran, beside those
known before.

``--library``: the tests are of another library, as ``optax``, from the folder of its checkout; all its test files run,
or FILE, paths in that folder. Results go to ``NAME-jax<version>.json`` and ``.md``.

"Only ours": the test passes with ``jax.jit`` and does not with ours. XLA's optimizations are off on both sides, which
is several times faster and changes nothing that is asked here. "Programs": signatures that reached the planner;
"planned": those of them that ran as another program than the user's own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.jaxtests.worker import read

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
MODES: Final = ("one", "tight", "half", "forced", "exec", "exec-tight")
FILES: Final = """
    api aot pjit shard_map export lax_control_flow custom_api custom_linear_solve custom_root batching core memories
    layout pickle checkify jaxpr_effects python_callback debugging_primitives debug_nans mutable_array state
    multi_device multibackend nn ode random random_lax random_impl array lax lax_autodiff lax_vmap lax_vmap_op linalg
    fft scipy_fft image dtypes x64_context key_reuse stax optimizers lax_scipy lax_scipy_special_functions
    scipy_ndimage scipy_optimize scipy_signal scipy_stats lax_scipy_sparse sparse sparsify sparse_bcoo_bcsr pmap hijax
    jet xla_metadata name_stack jax_jit lax_numpy_reducers lax_numpy_operators lax_numpy_indexing error_check eigh svd
    generated_fun stateful_rng svd polynomial host_callback for_loop
""".split()
"""Test files by the part of their names before ``_test``; those that a version of JAX does not have are left out."""
ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_SLOW_TESTS": "1",
    "JAX_NUM_GENERATED_CASES": "10",
    "JAXTENSILE_PLAN_CACHE": "off",
    "JAXTENSILE_STRICT": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
_MANY: Final = ("pmap", "multi_device", "shard_map", "lax_control_flow")
"""Files whose multi-device tests are skipped unless there are some devices."""
_TEST_LIMIT: Final = 300.0
"""Seconds a test may take before its process is ended."""
_DEATHS: Final = 50
"""Processes of one file that may die before the rest of it is given up."""


_THREAD: Final = "counts the compilations of the calling thread: XLA compiles in another one while the rest is planned"
_TRIED: Final = "counts tracings, or says where they are: what is only measured is compiled apart, and traced for it"
_DIVIDED: Final = "counts tracings: to plan a sharded program, how it is divided is found with one more"
_UNREDUCED: Final = "jax 0.10.2 cannot write its own equations again there (`_make_lengths_same`)"
_ELSE: Final = "passes by itself and after those of its kind: in the whole file two arrays go at a later collection"
_LATER: Final = "what a plan was made with goes at the next garbage collection, not with the last name of the function"
_ROUNDS: Final = (
    "rounding: a relative 1.9e-5 between two orders of operations, where the test asks 1e-6 of itself and 5e-2 of "
    "numpy; of 60 such matrices both are as far from complex128, 2.2e-6 in the median and 1.8e-5 at most"
)
_FNUZ: Final = (
    "XLA:CPU's own: f32 to float8_e4m3fnuz and back for one column a turn of a loop gives NaN, under `jax.jit` as well"
)
_FRAMES: Final = "counts frames, or looks for JAX's own file in them"
_COSTS: Final = "counts the FLOPs of the lowered program, which is the planned one"
_GAMMA: Final = (
    "rounding: exponentials of sums of `lgamma` in f32 differ by a relative 7.8e-6 between two orders of fusion, where "
    "the test asks 1e-6 of itself and 1e-3 of numpy; of the integers that they are, `jax.jit`'s are 1.2e-5 off at most "
    "and ours 5.2e-6"
)
EXPLAINED: Final = {
    "test_fp8_dot_general_injection1": _FNUZ,
    "test_complicated": "counts how often a primitive of its own is lowered: plans are compiled, some in vain",
    "test_dynamic_exclusion": _FRAMES,
    "test_simple_exclusion_remove_frames": _FRAMES,
    "test_simple_exclusion_tracebackhide": _FRAMES,
    "test_module_reuse": _COSTS,
    "test_module_summary": _COSTS,
    "test_module_summary_with_depth": _COSTS,
    "test_partitioned_params": _COSTS,
    "testPascal6": _GAMMA,
    "testPascal9": _GAMMA,
    "test_cond_memory_leak": _ELSE,
    "test_error_disallowed_custom_call_stablehlo": "exports a call that no compiler here knows; plans are compiled",
    "test_fsdp_pipeline_grad": "jax 0.10.2 cannot evaluate its own equations again there; in use it runs as written",
    "test_wsc_aval_cache_hit": _DIVIDED,
    "test_scan_over_layers_minibatch_unreduced_custom_vjp": _UNREDUCED,
    "test_scan_over_layers_minibatch_unreduced_grad": _UNREDUCED,
    "test_minibatch_scan_unreduced_grad": "counts all-reduces: a plan for fewer bytes has two for XLA's one",
    "test_jit_reference_dropping": _LATER,
    "test_pe_close_jaxpr_cache_leak": _LATER,
    "test_reference_cycles_jit": _LATER,
    "test_solve_sylvester2": _ROUNDS,
    "test_remat_custom_policy_save_cos": "is traced and never compiled: JAX cannot lower it, and the mode compiles it",
    "test_cache_miss_explanations_sharding_mismatch": _TRIED,
    "test_changing_abstract_device": _TRIED,
    "test_lowering_cache_hit_different_devices": _TRIED,
    "test_lowering_cache_hit_inputs_with_different_mesh": _TRIED,
    "test_lowering_cache_miss_different_devices_and_sharding": _TRIED,
    "test_value_grad_tagging4": "looks for one call in the lowered text that a plan writes out",
    "test_compilation_cache_miss_when_devices_change": _THREAD,
    "test_different_devices_shmap_abstract_mesh_cache_hit": _THREAD,
    "test_different_devices_wsc_abstract_mesh_cache_hit": _THREAD,
    "test_jit_mul_sum_sharding_preserved": _THREAD,
    "test_jit_traceback": "counts the frames between a first call and the function: four of them are ours",
}
"""Tests that only ours fails, and why that stays so."""


def run(
    tests: Path, name: str, mode: str, log: Path, limit: float, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The outcomes of one file in one mode, of ``only`` some of its tests; those of an earlier run included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = _file(tests, name)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    if name in _MANY:
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "benchmarks.jaxtests.worker", mode, str(file), str(log), str(limit)]
    if only is not None:
        chosen = log.with_suffix(".only")
        chosen.write_text("\n".join(only))
        command.append(str(chosen))
    for _ in range(_DEATHS):
        rows = read(log)
        ended = {row["id"]: row for row in rows if "outcome" in row}
        if rows and "finished" in rows[-1] if only is None else ended.keys() >= set(only):
            break
        with log.with_suffix(".out").open("w") as told:
            status = subprocess.run(command, cwd=tests.parent, env=environment, stdout=told, stderr=told).returncode
        rows = read(log)[len(rows) :]
        if rows and "finished" in rows[-1]:
            break
        with log.open("a") as out:
            out.write(_death(rows, status, log.with_suffix(".out").read_text(errors="replace")))
    found = {row["id"]: row for row in read(log) if "outcome" in row}
    return [row for name, row in found.items() if only is None or name in only]


def _file(tests: Path, name: str) -> Path:
    """Where the tests of that name are: ``api`` in ``api_test.py``, ``tests/test_jit`` in itself."""
    own = tests / f"{name}_test.py"
    return own if own.exists() else tests / f"{name}.py"


def _all_of(folder: Path) -> list[str]:
    """The test files of a library."""
    files = sorted({*folder.rglob("*_test.py"), *folder.rglob("test_*.py")})
    return [str(f.relative_to(folder)).removesuffix(".py").removesuffix("_test") for f in files]


def _death(rows: Sequence[dict[str, Any]], status: int, told: str) -> str:
    """What to write into the log of a process that did not come to its end; one that never began is given up."""
    begun = [row["begin"] for row in rows if "begin" in row]
    ended = {row["id"] for row in rows if "outcome" in row}
    last = begun[-1] if begun and begun[-1] not in ended else f"(process {status})"
    outcome = "late" if "Timeout (" in told else "died"
    row = {"id": last, "outcome": outcome, "error": f"status {status}", "where": told[-3000:]}
    return json.dumps(row) + "\n" + ("" if begun else json.dumps({"finished": status}) + "\n")


def compared(name: str, ours: Iterable[dict[str, Any]], plain: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: what a file gave in one mode; ``plain``: what ``jax.jit`` gave of the tests not passed."""
    mine = {row["id"]: row for row in ours}
    theirs = {row["id"]: row["outcome"] for row in plain}
    left = [row for row in mine.values() if row["outcome"] != "passed"]
    only = [row for row in left if theirs.get(row["id"]) in ("passed", None)]
    return {
        "file": name,
        "tests": len(mine),
        "passed": len(mine) - len(left),
        "skipped": sum(theirs.get(row["id"]) == "skipped" for row in left),
        "failed_with_both": sum(theirs.get(row["id"]) not in ("passed", "skipped", None) for row in left),
        "only_ours": [{"id": r["id"], "outcome": r["outcome"], "error": _line(r.get("error", ""))} for r in only],
        "wrong_values": [row["id"] for row in only if row.get("values")],
        **{key: sum(row.get(key, 0) for row in mine.values()) for key in ("programs", "planned", "refused")},
        "seconds": round(sum(row.get("seconds", 0) for row in mine.values())),
    }


def _line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return _without_folders(lines[0] if lines else "")[:300]


def _without_folders(text: str) -> str:
    """The text with the names of files alone, where it has paths of this machine."""
    return re.sub(r"/\S*/", "", text)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, library = result["machine"], result.get("library", "JAX")
    lines = [
        f"# {library}'s tests, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, CPU, {m['date']}",
        "",
        f"Tests of {library} {result['tests']}, {m['environment']}. "
        "Only ours: passes with `jax.jit`, does not with `jaxtensile.jit`.",
    ]
    for mode, rows in result["modes"].items():
        keys = ("tests", "passed", "skipped", "failed_with_both", "programs", "planned", "refused", "seconds")
        total = {key: sum(row[key] for row in rows) for key in keys}
        only, wrong = (sum(len(row[key]) for row in rows) for key in ("only_ours", "wrong_values"))
        lines += [
            "",
            f"## Mode {mode}",
            "",
            "| file | tests | passed | skipped | failed with both | only ours | of them wrong values "
            "| programs | planned | refused at first | s |",
            "|---|" + "---|" * 10,
        ]
        for row in [*rows, {**total, "file": "all", "only_ours": [0] * only, "wrong_values": [0] * wrong}]:
            cells = [row["file"], *(row[key] for key in keys[:4]), len(row["only_ours"]), len(row["wrong_values"])]
            lines.append("| " + " | ".join(map(str, [*cells, *(row[key] for key in keys[4:])])) + " |")
        failing = [(row["file"], test) for row in rows for test in row["only_ours"]]
        lines += [f"\nNot run: `{row['file']}`: {row['not_run']}" for row in rows if "not_run" in row]
        if failing:
            lines += ["", "Only ours:", ""]
            lines += [f"- `{file}` `{test['id']}` ({test['outcome']}): {_reason(test)}" for file, test in failing]
    return "\n".join(lines) + "\n"


def describe() -> dict[str, Any]:
    from benchmarks.machine import describe

    return {**describe(), "environment": " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files without _test.py; default: a long list")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    parser.add_argument("--limit", type=float, default=_TEST_LIMIT, help="seconds a test may take")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "jaxtensile-jaxtests")
    parser.add_argument("--again", action="store_true", help="run ours again, whatever is known")
    parser.add_argument("--library", default="JAX", help="whose tests these are")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    options = parser.parse_args(argv)
    if "JAX_TESTS" not in os.environ:
        parser.error("JAX_TESTS is not set: give the folder 'tests' of a checkout of JAX")
    tests = Path(os.environ["JAX_TESTS"]).resolve()
    machine = describe()
    own = options.library == "JAX"
    path: Path = options.out / f"{'results' if own else options.library}-jax{machine['jax']}.json"
    keep: Path = options.keep / ("" if own else options.library) / f"jax{machine['jax']}"
    missing = [f for f in options.files if not _file(tests, f).exists()]
    if missing:
        parser.error(f"no {missing[0]}_test.py in {tests}")
    count = 0
    for name in options.files or dict.fromkeys(FILES if own else _all_of(tests)):
        if not _file(tests, name).exists():
            continue
        for mode in options.mode or MODES:
            log = keep / mode / f"{name}.jsonl"
            if options.again:
                log.unlink(missing_ok=True)
            ours = run(tests, name, mode, log, options.limit)
            left = [row["id"] for row in ours if row["outcome"] != "passed" and not row["id"].startswith("(")]
            plain = run(tests, name, "plain", keep / "plain" / f"{name}.jsonl", options.limit, left)
            row = compared(name, ours, plain)
            if not ours:
                row["not_run"] = _why(log.with_suffix(".out"))
            count += len(row["only_ours"])
            print(json.dumps({"mode": mode, **{k: v for k, v in row.items() if k != "only_ours"}}))
            for test in row["only_ours"]:
                print(f"  only ours: {test['id']} ({test['outcome']}): {test['error']}", flush=True)
            _save(path, machine, options.library, tests, mode, row)
    return int(count > 0)


def _reason(test: dict[str, Any]) -> str:
    """Why only ours fails a test, where that is known; else what it said."""
    return EXPLAINED.get(test["id"].rpartition("::")[2], test["error"])


def _why(told: Path) -> str:
    """Why a file had no test that ran."""
    errors = [line for line in told.read_text(errors="replace").splitlines() if line.startswith("E  ")]
    return _without_folders(errors[-1][1:].strip()) if errors else "no tests"


def _save(path: Path, machine: dict[str, Any], library: str, tests: Path, mode: str, row: dict[str, Any]) -> None:
    """The result with one more row, in place of an earlier one of the same file and mode."""
    known = json.loads(path.read_text()) if path.exists() else {"modes": {}}
    rows = {r["file"]: r for r in known["modes"].get(mode, [])} | {row["file"]: row}
    modes = {**known["modes"], mode: [rows[file] for file in sorted(rows)]}
    version = _version(tests) if library == "JAX" else importlib.metadata.version(library)
    result = {
        "library": library,
        "machine": machine,
        "tests": version,
        "modes": {m: modes[m] for m in MODES if m in modes},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


def _version(tests: Path) -> str:
    """The version of the checkout, where it says so."""
    file = tests.parent / "jax" / "version.py"
    found = [line for line in file.read_text().splitlines() if line.startswith("_version")] if file.exists() else []
    return found[0].partition("=")[2].strip(' "') if found else tests.parent.name


if __name__ == "__main__":
    sys.exit(main())
