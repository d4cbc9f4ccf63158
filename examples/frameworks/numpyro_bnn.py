"""numpyro: a Bayesian neural network, fitted by SVI, then sampled by NUTS.

jaxtensile exec --budget 24MiB -- python examples/frameworks/numpyro_bnn.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide


def model(x, y, hidden):
    for layer in range(6):
        w = numpyro.sample(f"w{layer}", dist.Normal(0, 1).expand([x.shape[1], hidden]).to_event(2))
        x = jnp.tanh(x @ w / jnp.sqrt(x.shape[1]))
    w = numpyro.sample("last", dist.Normal(0, 1).expand([hidden, 1]).to_event(2))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1 / jnp.sqrt(precision)).to_event(1), obs=y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    x = jax.random.normal(jax.random.key(1), (options.rows, 4))
    y = jnp.sin(2 * x[:, :1]) + 0.1 * jax.random.normal(jax.random.key(2), (options.rows, 1))

    guide = autoguide.AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    found = svi.run(jax.random.key(3), options.steps, x, y, options.hidden, progress_bar=False)
    print(f"SVI loss {found.losses[0]:.3f} to {found.losses[-1]:.3f}")

    kernel = NUTS(model, max_tree_depth=4, init_strategy=numpyro.infer.init_to_median)
    mcmc = MCMC(kernel, num_warmup=options.samples, num_samples=options.samples, num_chains=1, progress_bar=False)
    mcmc.run(jax.random.key(4), x, y, options.hidden)
    energy = mcmc.get_samples()["precision"]
    print(f"NUTS precision {energy.mean():.6f}")


if __name__ == "__main__":
    main()
