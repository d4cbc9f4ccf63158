import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxtensile


class Block(nnx.Module):
    def __init__(self, d, h, *, rngs):
        self.ln1 = nnx.LayerNorm(d, rngs=rngs)
        self.ln2 = nnx.LayerNorm(d, rngs=rngs)
        self.att = nnx.MultiHeadAttention(num_heads=h, in_features=d, decode=False, rngs=rngs, dtype=jnp.bfloat16)
        self.up = nnx.Linear(d, 4 * d, rngs=rngs, dtype=jnp.bfloat16)
        self.down = nnx.Linear(4 * d, d, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x, mask):
        x = x + self.att(self.ln1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class LM(nnx.Module):
    def __init__(self, v=32000, d=768, h=12, n=12, t=1024, *, rngs):
        self.emb = nnx.Embed(v, d, rngs=rngs, dtype=jnp.bfloat16)
        self.pos = nnx.Embed(t, d, rngs=rngs, dtype=jnp.bfloat16)
        self.blocks = nnx.List([Block(d, h, rngs=rngs) for _ in range(n)])
        self.ln = nnx.LayerNorm(d, rngs=rngs)
        self.out = nnx.Linear(d, v, rngs=rngs, dtype=jnp.bfloat16)

    remat = False

    def __call__(self, ids):
        t = ids.shape[1]
        x = self.emb(ids) + self.pos(jnp.arange(t))
        m = nnx.make_causal_mask(ids)
        f = nnx.remat(lambda b, x, m: b(x, m)) if self.remat else (lambda b, x, m: b(x, m))
        for b in self.blocks:
            x = f(b, x, m)
        return self.out(self.ln(x))


def loss_fn(model, x, y):
    lo = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(lo, y).mean()


def make(batch=32, **kw):
    def init():
        m = LM(rngs=nnx.Rngs(0), **kw)
        o = nnx.Optimizer(m, optax.adamw(1e-3), wrt=nnx.Param)
        return m, o

    graph, state = nnx.split(nnx.eval_shape(init))

    def train_step(state, x, y):
        model, opt = nnx.merge(graph, state)
        loss, g = nnx.value_and_grad(loss_fn)(model, x, y)
        opt.update(model, g)
        return nnx.state((model, opt)), loss

    ids = jax.ShapeDtypeStruct((batch, 1024), jnp.int32)
    return train_step, (state, ids, ids)


def step(batch=32):
    f, a = make(batch)
    return jaxtensile.Workload(fun=f, args=a, jit_options={"donate_argnums": 0})


def step_ckpt(batch=32):
    LM.remat = True
    f, a = make(batch)
    return jaxtensile.Workload(fun=f, args=a, jit_options={"donate_argnums": 0})


def step27():
    return step(27)


def step20():
    return step(20)


def step64():
    return step(64)


def ck64():
    return step_ckpt(64)
