"""Of two plans for a short step, the kernels that XLA made of them decide."""

import pytest

import jaxtensile
from benchmarks.workloads import gpt2
from jaxtensile import switches

TARGET = "nvidia-h100-80gb"
CONFIG = gpt2.Config(layers=2, width=128, heads=2, vocab=512, context=256, batch=8)
BUDGET = 33_800_000
"""0.7 of what it needs: enough for all its products to be kept, if all else is computed twice."""


def planned(**given):
    work = gpt2.workload(CONFIG)
    step = jaxtensile.jit(work.fun, budget=BUDGET, target=TARGET, **given, **work.jit_options)
    return step.plan(*work.args)


@pytest.mark.cuda_aot
def test_the_plan_with_the_shorter_kernels_is_taken():
    with switches.off("contest"):
        alone = planned()
    found = planned()
    assert alone.compiled.device <= BUDGET and found.compiled.device <= BUDGET
    assert alone.recompute_flops > 0 == found.recompute_flops
    assert found.kernels.seconds < 0.98 * alone.kernels.seconds and found.rounds == alone.rounds + 1
