"""Training steps of public model code, whose peak estimates are checked on: ``workload(name, batch, optimizer)``.

    python -m benchmarks.estimate.zoo        the models, their halves and batch sizes

Packages that may not be installed are imported when a model of theirs is asked for; ``pip install
"jaxtensile[zoo]"`` brings them. Nothing is downloaded and no weight is made: all arguments are abstract.

An estimator is calibrated on one half of the models and reported on the other. The halves were fixed before
anything was estimated: ``FAMILIES`` lists designs, similar ones side by side, and they alternate, so that no design
is in both halves. A new family goes to the end, and one whose compiled programs have been looked into is reported
no more.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Final

from benchmarks.estimate import zoo_equimo, zoo_haiku, zoo_keras, zoo_suite, zoo_transformers
from benchmarks.estimate.model import Model
from jaxtensile.program.workload import Workload

CALIBRATION: Final = "calibration"
REPORT: Final = "report"
HALVES: Final = (CALIBRATION, REPORT)
FAMILIES: Final = tuple(
    """resnet mobilenet vgg densenet efficientnet convnext inception xception regnet nasnet
    vit beit dinov2 clip mixer mlla iformer attnet
    gpt2 llama gpt-neo opt gemma bloom moe
    bert electra albert roformer bart whisper
    lstm gru u-net vq-vae mlp dlrm ode
    bigbird xglm pegasus blenderbot vssd inception-resnet""".split()
)
"""By kind of network, the last ones as they came; even places calibrate, odd ones are reported."""
EXAMINED: Final = frozenset({"mobilenet", "densenet"})
"""Whose compiled programs have been looked into since, for rules that hold for all: they calibrate, too."""
PACKAGES: Final = {
    module.__name__.rpartition("zoo_")[2]: module
    for module in (zoo_transformers, zoo_keras, zoo_haiku, zoo_equimo, zoo_suite)
}


@cache
def models() -> dict[str, Model]:
    """Every model by its name, ``package/model``."""
    return {model.name: model for module in PACKAGES.values() for model in module.models()}


def half(model: Model) -> str:
    """Which half the model's family is in."""
    return CALIBRATION if model.family in EXAMINED else HALVES[FAMILIES.index(model.family) % 2]


def available(model: Model) -> bool:
    """Is the package there?"""
    return not model.requires or find_spec(model.requires) is not None


def workload(name: str, batch: int, optimizer: str) -> Workload:
    """The train step of a model at a batch size, with one of its ``optimizers``."""
    known = models()
    if name not in known:
        raise KeyError(f"no model named {name!r}; there are {', '.join(known)}")
    if optimizer not in known[name].optimizers:
        raise ValueError(f"{name} takes the optimizers {', '.join(known[name].optimizers)}, not {optimizer!r}")
    return known[name].workload(batch, optimizer)


def main() -> None:
    for model in models().values():
        print(
            f"{model.name:34} {model.family:14} {half(model):12} {model.dtype:9} {model.task:34}",
            *model.batches,
            "" if available(model) else "(package not installed)",
        )


if __name__ == "__main__":
    main()
