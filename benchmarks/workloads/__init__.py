"""Whole training steps of published models, as abstract `Workload`s and as tiny runnable ones.

One file per model, each readable and loadable on its own, all with the same five names:

* ``Config``: frozen dataclass of sizes. The defaults are the published model; ``Config.tiny()`` trains on a CPU;
* ``init_params(config, key)``: the trainable parameters;
* ``init_args(config, key)``: concrete ``(state, batch)``. ``state["params"]`` is always there, next to the optimizer's
  state and, where the model has them, ``"key"`` (a typed PRNG key), ``"ema"``, ``"batch_stats"``, ``"carry"``;
* ``step(config, remat)``: the function ``(state, batch) -> (state, loss)``, that is loss, gradients and optimizer
  update; ``remat`` is a ``jax.checkpoint`` policy for every block, layer or iteration, none by default;
* ``workload(config)``: the `Workload` of a config (of the published sizes without one): arguments abstract, so nothing
  is allocated, state donated. All files but gpt2 also take single sizes, ``workload(batch=8)``, and this package's
  ``workload(name, batch=8)`` does so for every name.

``load(name)`` imports a module on first use. ``NAMES`` lists the suite; ``IN_PAPERS`` are networks
that others report, which benchmarks of the suite leave out, as they do ``ON_NVIDIA``.
"""

import importlib
from types import ModuleType
from typing import Any

from jaxtensile.program.workload import Workload

MODULES = {
    "gpt2_small": "gpt2",
    "llama": "llama",
    "vit_b": "vit",
    "resnet50": "resnet",
    "unet": "unet",
    "bert_base": "bert",
    "moe": "moe",
    "lstm": "lstm",
    "mixer": "mixer",
    "dlrm": "dlrm",
    "ode": "ode",
}
NAMES = tuple(MODULES)
ON_NVIDIA = {"flash": "flash"}
"""Whose kernels only an NVIDIA GPU has."""
IN_PAPERS = {"vgg16": "vgg", "inception_v3": "inception", "densenet121": "densenet"}


def load(name: str) -> ModuleType:
    """The module of one workload."""
    known = MODULES | ON_NVIDIA | IN_PAPERS
    if name not in known:
        raise KeyError(f"no workload named {name!r}; there are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{known[name]}")


def workload(name: str, *, remat: Any = None, **sizes: Any) -> Workload:
    """The named workload at its published sizes, or with some of its ``Config``'s fields changed.

    ``remat``: a ``jax.checkpoint`` policy, applied to every block as a user would (in the suite's workloads).
    """
    module = load(name)
    config = module.Config(**sizes)
    return module.workload(config) if remat is None else module.workload(config, remat=remat)
