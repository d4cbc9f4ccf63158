"""Static estimates of small ordinary steps beside --exact: how often is XLA's figure between LOW and HIGH?"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp

import jaxtensile

S = jax.ShapeDtypeStruct
f32 = jnp.float32


def mlp(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def scan(ws, x):
    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def scan_ckpt(ws, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)


def conv(ws, x):
    for w in ws:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.mean(x**2)


def sgd(loss):
    def train_step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, ws, grads), value

    return train_step


def forward(loss):
    return lambda ws, x: loss(ws, x)


stack = {"up": S((12, 256, 1024), f32), "down": S((12, 1024, 256), f32)}
cases = {
    "mlp 4 x 512, batch 1024": (sgd(mlp), ([S((512, 512), f32)] * 4, S((1024, 512), f32)), 0),
    "mlp 8 x 1024, batch 8192": (sgd(mlp), ([S((1024, 1024), f32)] * 8, S((8192, 1024), f32)), 0),
    "mlp, bf16": (sgd(mlp), ([S((1024, 1024), jnp.bfloat16)] * 8, S((8192, 1024), jnp.bfloat16)), 0),
    "mlp, forward": (forward(mlp), ([S((1024, 1024), f32)] * 8, S((8192, 1024), f32)), None),
    "scan": (sgd(scan), (stack, S((8, 256, 256), f32)), 0),
    "scan, checkpoint": (sgd(scan_ckpt), (stack, S((8, 256, 256), f32)), 0),
    "conv": (sgd(conv), ([S((3, 3, 64, 64), f32)] * 6, S((16, 64, 64, 64), f32)), 0),
}
hits = total = 0
for target in ("cpu", "nvidia-l4", "nvidia-h200"):
    for name, (fun, args, donate) in cases.items():
        options = {} if donate is None else {"donate_argnums": donate}
        e = jaxtensile.estimate(fun, *args, target=target, **options)
        x = jaxtensile.estimate(fun, *args, target=target, exact=True, **options)
        inside = e.low <= x.device <= e.high
        hits, total = hits + inside, total + 1
        print(
            f"{target:<12} {name:<25} {e.low / 2**20:8.1f} .. {e.high / 2**20:8.1f} (static {e.device / 2**20:8.1f})",
            f" XLA {x.device / 2**20:8.1f}  {'' if inside else 'OUTSIDE'}",
            flush=True,
        )
print(f"inside: {hits} of {total}")
