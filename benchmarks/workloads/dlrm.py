"""DLRM click prediction (Naumov et al., arXiv 1906.00091): MLPerf's MLPs and dimension 128, Criteo Kaggle's 26 tables.

Tables are capped at two million rows (10.6 M rows in all) as DLRM's ``--max-ind-range`` does. Gradients are taken with
respect to the gathered rows and scattered back by plain SGD, so no table-sized gradient exists; the MLPs use Adagrad.
float32. ``Config(max_rows=None, dim=16, bottom=(512, 256, 64, 16), top=(512, 256, 1))`` is the original, 540 M.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload

CRITEO_KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 65536
    rows: tuple[int, ...] = CRITEO_KAGGLE_ROWS
    max_rows: int | None = 2_000_000
    dense: int = 13
    dim: int = 128
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    learning_rate: float = 0.1

    @property
    def table_rows(self) -> tuple[int, ...]:
        return self.rows if self.max_rows is None else tuple(min(rows, self.max_rows) for rows in self.rows)

    @property
    def interactions(self) -> int:
        """Pairs among the embeddings and the bottom MLP's output."""
        vectors = len(self.rows) + 1
        return vectors * (vectors - 1) // 2

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=32, rows=(5, 17, 40), dense=4, dim=8, bottom=(16, 8), top=(16, 1))


def init_params(config: Config, key: jax.Array) -> Any:
    key_tables, key_bottom, key_top = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal()

    def table(key, rows):
        bound = rows**-0.5
        return jax.random.uniform(key, (rows, config.dim), minval=-bound, maxval=bound)

    def mlp(key, *widths):
        keys = jax.random.split(key, len(widths) - 1)
        shapes = pairwise(widths)
        return [{"weight": he(k, shape), "bias": jnp.zeros(shape[1])} for k, shape in zip(keys, shapes, strict=True)]

    table_keys = jax.random.split(key_tables, len(config.rows))
    return {
        "tables": [table(k, rows) for k, rows in zip(table_keys, config.table_rows, strict=True)],
        "mlps": {
            "bottom": mlp(key_bottom, config.dense, *config.bottom),
            "top": mlp(key_top, config.dim + config.interactions, *config.top),
        },
    }


def linear(p, x):
    return x @ p["weight"] + p["bias"]


def bottom_mlp(layers, x):
    for p in layers:
        x = jax.nn.relu(linear(p, x))
    return x


def top_mlp(layers, x):
    for p in layers[:-1]:
        x = jax.nn.relu(linear(p, x))
    return linear(layers[-1], x)


def forward(mlps, embedded, dense, remat=None):
    """Logit per example; ``embedded`` lists one [batch, dim] array per table."""
    x = checkpointed(bottom_mlp, remat)(mlps["bottom"], dense)
    vectors = jnp.stack([x, *embedded], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    first, second = np.tril_indices(vectors.shape[1], -1)
    x = jnp.concatenate([x, products[:, first, second]], axis=1)
    return checkpointed(top_mlp, remat)(mlps["top"], x)[:, 0]


def optimizer(config: Config):
    return optax.adagrad(config.learning_rate)


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_dense, key_sparse, key_labels = jax.random.split(key, 4)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params["mlps"])}
    shape = (config.batch, len(config.rows))
    batch = {
        "dense": jax.random.normal(key_dense, (config.batch, config.dense)),
        "sparse": jax.random.randint(key_sparse, shape, 0, jnp.array(config.table_rows)),
        "labels": jax.random.bernoulli(key_labels, 0.25, (config.batch,)).astype(jnp.float32),
    }
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(mlps, embedded, batch):
        logits = forward(mlps, embedded, batch["dense"], remat)
        return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean()

    def train_step(state, batch):
        tables, mlps = state["params"]["tables"], state["params"]["mlps"]
        indices = batch["sparse"].T
        embedded = [table[index] for table, index in zip(tables, indices, strict=True)]
        loss, (grads, row_grads) = jax.value_and_grad(loss_fn, argnums=(0, 1))(mlps, embedded, batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"])
        tables = [
            table.at[index].add(-config.learning_rate * grad)
            for table, index, grad in zip(tables, indices, row_grads, strict=True)
        ]
        params = {"tables": tables, "mlps": optax.apply_updates(mlps, updates)}
        return {"params": params, "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="dlrm")
