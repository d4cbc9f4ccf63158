"""Planned steps over eight devices give the values, shardings and donations of ``jax.jit``, within their budget.

The steps are those of ``tests/sharded_programs.py``: a few here, others in a soak.
"""

import pytest

import sharded_programs
from four_devices import on_devices
from jax_lines import in_a_soak

FEW = (7, 10, 13, 18)
"""Loops divided by types and by constraints, under FSDP alone and with tensor parallelism, in and around a
``shard_map``: of those that are planned in seconds."""


@pytest.mark.parametrize("seeds", [FEW, *(pytest.param(range(k, k + 20), marks=in_a_soak) for k in (0, 100, 200))])
def test_values(seeds, tmp_path):
    done = on_devices(8, (sharded_programs.__file__, *map(str, seeds)), tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.count("right") == len(seeds)
