"""What CI tests on which JAX line: everything on the newest, on the oldest what JAX or XLA has a part in.

``pytest --oldest`` runs what `ALL`, `EVERY_EIGHTH` and `SOME` name, by file; a file in none of them decides on plain
data, or reaches JAX through code that others test there. Without the option all tests run, whatever JAX there is.
``JAXTENSILE_SOAK=1`` adds the long sweeps.
"""

import os
from collections import Counter
from collections.abc import Mapping

import pytest

from paths import TESTS

SOAK = bool(os.environ.get("JAXTENSILE_SOAK"))
in_a_soak = pytest.mark.skipif(not SOAK, reason="minutes: with JAXTENSILE_SOAK=1")
"""A mark for tests and parameters."""
ALL = {
    "JAX's own interface: jits, stages, transformations, what a jaxpr holds and how one is made": """
        agreement api as_jax_jit bodies cse emit filter_jit hoist_invariants hosted merge_branches
        numbered parity references rows sink
        sink_invariants split state streaming trace undo undo_loops variants""",
    "what XLA allocates, in which order, for whom, and how it is asked": """
        build_report compile heap kernels lowered output_reuse own_stacks prologue shardings sums widened""",
    "what outlives a process, and may meet another JAX in the next": "plan_cache recipe",
    "what a user sees first": "package readme",
}
EVERY_EIGHTH = {
    "programs one like the other: of any fault that is JAX's, several show": """
        chunk control differential differential_loops early_updates host_stacks libraries loops
        strip_mine target workloads""",
    "the front door, entered through the API that is tested as a whole": """
        bad_input calibration checkpoint_nests cli cudnn estimation faults feedback offload_state one_plan pipeline
        report solvers threads wrapping""",
}
SOME = {
    "test_deviceless": """
        test_what_fits_an_h200_is_left_alone[mlp] test_a_step_fits_a_smaller_budget[mlp-0.6]
        test_what_a_loop_stacks_waits_on_the_host[nvidia-h200]""",
    "test_in_order": "test_bodies_in_their_order_have_the_same_bits[runge_kutta]",
}
"""Of files whose other tests compile for many seconds, or have no JAX."""


def _files(table: Mapping[str, str]) -> set[str]:
    return {f"test_{name}" for names in table.values() for name in names.split()}


def split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests of the oldest line, and the others."""
    here = {path.stem: path for path in TESTS.rglob("test_*.py")}
    unknown = (_files(ALL) | _files(EVERY_EIGHTH) | SOME.keys()) - here.keys()
    for file in SOME.keys() & here.keys():
        text = here[file].read_text()
        unknown |= {name for name in SOME[file].split() if f"def {name.partition('[')[0]}(" not in text}
    if unknown:
        raise pytest.UsageError(f"jax_lines.py names what is not there: {', '.join(sorted(unknown))}")
    whole, eighth, seen = _files(ALL), _files(EVERY_EIGHTH), Counter[str]()
    parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        file, name = item.path.stem, item.name.partition("@")[0]  # xdist adds the group
        belongs = file in whole or (file in eighth and seen[file] % 8 == 0) or name in SOME.get(file, "").split()
        seen[file] += 1
        parts[not belongs].append(item)
    return parts
