"""diffrax: a neural ODE learns the paths of oscillators.

jaxtensile exec --budget 16MiB -- python examples/frameworks/diffrax_ode.py
"""

import argparse

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Field(eqx.Module):
    scale: jax.Array
    mlp: eqx.nn.MLP

    def __init__(self, size, width, depth, key):
        self.scale = jnp.array(1.0)
        self.mlp = eqx.nn.MLP(size, size, width, depth, jax.nn.softplus, jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.scale * self.mlp(y)


class NeuralODE(eqx.Module):
    field: Field

    def __call__(self, ts, start):
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(self.field),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
        )
        return found.ys


def paths(ts, starts):
    def field(t, y, args):
        x = y / (1 + y)
        return jnp.stack([x[1], -x[0]], axis=-1)

    def solve(start):
        saveat = diffrax.SaveAt(ts=ts)
        return diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Tsit5(), ts[0], ts[-1], 0.1, start, saveat=saveat).ys

    return jax.vmap(solve)(starts)


@eqx.filter_value_and_grad
def grad_loss(model, ts, ys):
    predicted = jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0])
    return jnp.mean((ys - predicted) ** 2)


@eqx.filter_jit
def make_step(ts, ys, model, state, optimizer):
    loss, grads = grad_loss(model, ts, ys)
    updates, state = optimizer.update(grads, state)
    return loss, eqx.apply_updates(model, updates), state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    ts = jnp.linspace(0.0, 5.0, 40)
    ys = paths(ts, jax.random.uniform(jax.random.key(1), (options.rows, 2), minval=0.2, maxval=1.0))
    model = NeuralODE(Field(2, options.width, 2, jax.random.key(0)))
    optimizer = optax.adabelief(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(options.steps):
        loss, model, state = make_step(ts, ys, model, state, optimizer)
        print(f"step {step} loss {loss:.6f}")


if __name__ == "__main__":
    main()
