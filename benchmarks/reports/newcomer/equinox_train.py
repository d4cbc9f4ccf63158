import os

os.environ["JAX_PLATFORMS"] = "cpu"
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxtensile


class Block(eqx.Module):
    a: eqx.nn.MultiheadAttention
    l1: eqx.nn.LayerNorm
    l2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    dn: eqx.nn.Linear

    def __init__(s, d, h, key):
        k = jax.random.split(key, 3)
        s.a = eqx.nn.MultiheadAttention(h, d, key=k[0])
        s.l1 = eqx.nn.LayerNorm(d)
        s.l2 = eqx.nn.LayerNorm(d)
        s.up = eqx.nn.Linear(d, 4 * d, key=k[1])
        s.dn = eqx.nn.Linear(4 * d, d, key=k[2])

    def __call__(s, x):
        y = jax.vmap(s.l1)(x)
        m = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
        x = x + s.a(y, y, y, mask=m)
        return x + jax.vmap(s.dn)(jax.nn.gelu(jax.vmap(s.up)(jax.vmap(s.l2)(x))))


class LM(eqx.Module):
    e: eqx.nn.Embedding
    bs: list
    o: eqx.nn.Linear
    ck: bool = eqx.field(static=True)

    def __init__(s, v, d, h, n, key, ck=False):
        k = jax.random.split(key, n + 2)
        s.e = eqx.nn.Embedding(v, d, key=k[0])
        s.bs = [Block(d, h, kk) for kk in k[2:]]
        s.o = eqx.nn.Linear(d, v, key=k[1])
        s.ck = ck

    def __call__(s, ids):
        x = jax.vmap(s.e)(ids)
        for b in s.bs:
            x = eqx.filter_checkpoint(b)(x) if s.ck else b(x)
        return jax.vmap(s.o)(x)


opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss(m, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(x), y).mean()


def step(m, o, x, y):
    value, g = eqx.filter_value_and_grad(loss)(m, x, y)
    u, o = opt.update(g, o, eqx.filter(m, eqx.is_array))
    return eqx.apply_updates(m, u), o, value


def run(budget, ck, target, cfg, B, T):
    m = eqx.filter_eval_shape(lambda: LM(*cfg, jax.random.key(0), ck))
    o = eqx.filter_eval_shape(lambda m: opt.init(eqx.filter(m, eqx.is_array)), m)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    f = jaxtensile.filter_jit(step, budget=budget, donate="all", target=target)
    t = time.time()
    try:
        print(f.plan(m, o, ids, ids))
    except Exception as e:
        print(type(e).__name__, str(e)[:500])
    print("wall", round(time.time() - t, 1), flush=True)


if __name__ == "__main__":
    print("== A100 estimate")
    cfg = (32000, 1024, 16, 12)
    m = eqx.filter_eval_shape(lambda: LM(*cfg, jax.random.key(0)))
    o = eqx.filter_eval_shape(lambda m: opt.init(eqx.filter(m, eqx.is_array)), m)
    ids = jax.ShapeDtypeStruct((16, 1024), jnp.int32)
    try:
        e = jaxtensile.estimate(step, m, o, ids, ids, target="nvidia-a100-40gb", donate_argnums=(0, 1))
        print(e)
    except Exception as ex:
        print(type(ex).__name__, str(ex)[:600])
    run("39GiB", False, "nvidia-a100-40gb", cfg, 16, 1024)
    run("39GiB", True, "nvidia-a100-40gb", cfg, 16, 1024)
