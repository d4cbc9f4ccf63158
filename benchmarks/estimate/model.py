"""What a model of the zoo is: how to learn with it, and the whole train step made of that.

A package's file says how its models compute a loss (a `Learner`); the step around it, with gradients and an
optimizer of optax, is the same for all, so that packages differ only in their own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from jaxtensile.program.workload import Workload

OPTIMIZERS: Final[dict[str, Callable[[], Any]]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
}
OWN: Final = "own"
"""The optimizer of a model that is a whole train step already."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model as its package builds it, all shapes abstract.

    ``loss(params, extra, batch, key) -> (loss, extra)``; ``extra`` is what a step carries on beside the
    parameters: running statistics, the package's own random state. ``batch(size)``: one abstract batch.
    """

    params: Any
    extra: Any
    loss: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    batch: Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """One configuration: ``workload(batch, optimizer)`` is its train step.

    ``name``: ``package/model``; ``requires``: the module that must be importable, none for our own; ``family``: models
    that share a design, and so a half; ``batches``: the ladder the truth is taken at; ``dtype``: of the computation.
    """

    name: str
    requires: str
    family: str
    task: str
    batches: tuple[int, ...]
    workload: Callable[[int, str], Workload]
    dtype: str = "float32"
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


def learned(name: str, make: Callable[[], Learner]) -> Callable[[int, str], Workload]:
    """``Model.workload`` of a learner that is made once, when first asked for."""
    made = cache(make)

    def workload(batch: int, optimizer: str) -> Workload:
        learner = made()
        rule = OPTIMIZERS[optimizer]()
        state = {
            "params": learner.params,
            "extra": learner.extra,
            "opt_state": jax.eval_shape(rule.init, learner.params),
            "key": jax.eval_shape(lambda: jax.random.key(0)),
        }
        return Workload(
            fun=partial(train_step, learner.loss, rule),
            args=(state, learner.batch(batch)),
            jit_options={"donate_argnums": (0,)},
            name=f"{name}@{batch}",
        )

    return workload


def train_step(loss: Callable[..., Any], rule: Any, state: Any, batch: Any) -> Any:
    """``(state, loss)`` after one update."""
    key, used = jax.random.split(state["key"])
    (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state["extra"], batch, used)
    updates, opt_state = rule.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "extra": extra, "opt_state": opt_state, "key": key}, value


def cross_entropy(logits: Any, labels: Any, weights: Any = None) -> Any:
    """Mean cross-entropy in float32; ``weights``: which positions count."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean() if weights is None else (losses * weights).sum() / jnp.maximum(weights.sum(), 1)


def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def labelled_images(size: int, *, pixels: int = 224, channels_first: bool = False) -> Any:
    """A batch of colour images with one label each."""
    shape = (size, 3, pixels, pixels) if channels_first else (size, pixels, pixels, 3)
    return {"images": floats(*shape), "labels": integers(size)}
