"""A step that 'fits as it is' only because XLA itself recomputes: neither estimate nor report says so.

python xla_remat_hidden.py; XLA_FLAGS=--xla_disable_hlo_passes=rematerialization python xla_remat_hidden.py
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp

import jaxtensile

TARGET, BATCH, WIDTH, LAYERS = "nvidia-a100-40gb", 65536, 4096, 16


def loss(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def train_step(ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, ws, grads), value


S = jax.ShapeDtypeStruct
args = ([S((WIDTH, WIDTH), jnp.float32)] * LAYERS, S((BATCH, WIDTH), jnp.float32))
e = jaxtensile.estimate(train_step, *args, target=TARGET, donate_argnums=0)
print(
    f"estimate        {e.device / 2**30:6.2f} GiB, between {e.low / 2**30:.2f} and {e.high / 2**30:.2f},",
    f"fits: {e.fits()}",
)
e = jaxtensile.estimate(train_step, *args, target=TARGET, donate_argnums=0, exact=True)
print(f"estimate, exact {e.device / 2**30:6.2f} GiB, fits: {e.fits()}")
step = jaxtensile.jit(train_step, budget="38GiB", target=TARGET, donate_argnums=0)
r = step.plan(*args)
print(str(r).splitlines()[0])
text = step.lower(*args).compile().as_text()
print("instructions that XLA made a second time (.remat in the HLO):", text.count(".remat"))
