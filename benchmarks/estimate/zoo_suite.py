"""The suite's own training steps (``benchmarks.workloads``), each with the optimizer it has, at four batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import workloads
from benchmarks.estimate.model import OWN, Model
from jaxtensile.program.workload import Workload

STEPS: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "resnet50": ("resnet", "image classification", "bfloat16", (32, 64, 128, 256)),
    "vgg16": ("vgg", "image classification", "float32", (8, 16, 32, 64)),
    "densenet121": ("densenet", "image classification", "float32", (8, 16, 32, 64)),
    "inception_v3": ("inception", "image classification", "float32", (8, 16, 32, 64)),
    "vit_b": ("vit", "image classification", "bfloat16", (16, 32, 64, 128)),
    "mixer": ("mixer", "image classification", "bfloat16", (16, 32, 64, 128)),
    "gpt2_small": ("gpt2", "causal language model", "bfloat16", (2, 4, 8, 16)),
    "llama": ("llama", "causal language model", "bfloat16", (1, 2, 4, 8)),
    "moe": ("moe", "causal language model", "bfloat16", (2, 4, 8, 16)),
    "lstm": ("lstm", "causal language model", "float32", (16, 32, 64, 128)),
    "bert_base": ("bert", "masked language model", "bfloat16", (8, 16, 32, 64)),
    "unet": ("u-net", "diffusion", "float32", (32, 64, 128, 256)),
    "dlrm": ("dlrm", "click prediction", "float32", (8192, 16384, 32768, 65536)),
    "ode": ("ode", "neural differential equation", "float32", (1, 2, 4, 8)),
}
"""Family, task, type of the computation, batch sizes."""


def step(name: str) -> Callable[[int, str], Workload]:
    def workload(batch: int, optimizer: str) -> Workload:
        if optimizer != OWN:
            raise ValueError(f"{name} is a whole train step with its own optimizer, not {optimizer}")
        return workloads.workload(name, batch=batch)

    return workload


def models() -> Iterator[Model]:
    suite = partial(Model, requires="", optimizers=(OWN,))
    for name, (family, task, dtype, batches) in STEPS.items():
        yield suite(name=f"suite/{name}", family=family, task=task, dtype=dtype, batches=batches, workload=step(name))
