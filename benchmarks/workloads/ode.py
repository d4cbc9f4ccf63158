"""Gray-Scott reaction-diffusion on a periodic grid, RK4 by ``lax.scan``, differentiated through time; sizes are ours.

Learns the four physical coefficients and a per-cell neural correction (2-16-2 tanh MLP) from the field that the true
coefficients produce; float32, Adam. Patterns and coefficients after Pearson, Science 261 (1993).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload

TRUE_PHYSICS = {"diffusion": (0.16, 0.08), "feed": 0.035, "kill": 0.065}


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 4
    grid: int = 256
    steps: int = 200
    hidden: int = 16
    dt: float = 1.0
    learning_rate: float = 1e-3

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=2, grid=8, steps=5, hidden=4)


def true_physics():
    return {name: jnp.array(value, jnp.float32) for name, value in TRUE_PHYSICS.items()}


def init_params(config: Config, key: jax.Array) -> Any:
    """A guess 20 % off the true coefficients, and a correction that starts at zero."""
    weight = jax.random.normal(key, (2, config.hidden))
    return {
        "physics": jax.tree.map(lambda value: 0.8 * value, true_physics()),
        "up": {"weight": weight, "bias": jnp.zeros(config.hidden)},
        "down": {"weight": jnp.zeros((config.hidden, 2)), "bias": jnp.zeros(2)},
    }


def laplacian(fields):
    """Five-point stencil on a periodic grid; fields is [batch, grid, grid, 2]."""
    neighbours = sum(jnp.roll(fields, shift, axis) for axis in (1, 2) for shift in (1, -1))
    return neighbours - 4 * fields


def reaction(physics, fields):
    u, v = fields[..., 0], fields[..., 1]
    converted = u * v**2
    feed, kill = physics["feed"], physics["kill"]
    return jnp.stack([feed * (1 - u) - converted, converted - (feed + kill) * v], axis=-1)


def correction(params, fields):
    hidden = jnp.tanh(fields @ params["up"]["weight"] + params["up"]["bias"])
    return hidden @ params["down"]["weight"] + params["down"]["bias"]


def physical_rate(physics, fields):
    return physics["diffusion"] * laplacian(fields) + reaction(physics, fields)


def learned_rate(params, fields):
    return physical_rate(params["physics"], fields) + correction(params, fields)


def integrate(config: Config, rate, fields, remat=None):
    """The field after ``config.steps`` classical Runge-Kutta steps."""

    def body(fields, _):
        k1 = rate(fields)
        k2 = rate(fields + config.dt / 2 * k1)
        k3 = rate(fields + config.dt / 2 * k2)
        k4 = rate(fields + config.dt * k3)
        return fields + config.dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jax.lax.scan(checkpointed(body, remat, stream=0, loop=True), fields, length=config.steps)[0]


def optimizer(config: Config):
    return optax.adam(config.learning_rate)


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    """Noisy spots of v in a sea of u, and the field the true physics makes of them."""
    key_params, key_spots = jax.random.split(key)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params)}
    spots = jax.random.bernoulli(key_spots, 0.1, (config.batch, config.grid // 4, config.grid // 4))
    v = jnp.repeat(jnp.repeat(spots, 4, axis=1), 4, axis=2).astype(jnp.float32) / 2
    start = jnp.stack([1 - v, v / 2], axis=-1)
    target = integrate(config, lambda fields: physical_rate(true_physics(), fields), start)
    return state, {"start": start, "target": target}


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, batch):
        final = integrate(config, lambda fields: learned_rate(params, fields), batch["start"], remat)
        return jnp.mean((final - batch["target"]) ** 2)

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="ode")
