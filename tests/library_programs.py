"""Programs of public libraries: their layers, solvers and losses in whole training steps.

Arguments are small beside what a step keeps, so that a budget
bites; a step returns all that a user would read, gradients in the form of updated parameters included.
"""

import functools
from itertools import pairwise

import blackjax
import diffrax
import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import optimistix as optx
from flax import nnx
from numpyro.contrib.control_flow import scan as numpyro_scan
from numpyro.infer import SVI, Trace_ELBO, autoguide
from optax import contrib

from jax_lines import SOAK

PROGRAMS = {}
"""Name → maker of ``(step, args)``, share of the plain program's temporary bytes to ask for."""
KEY = jax.random.key(0)


def program(make=None, *, share=0.75, soak=False):
    """Registers a maker; ``share``: what a plan reaches without a second search; ``soak``: only for ``make soak``."""
    if make is None:
        return functools.partial(program, share=share, soak=soak)
    if not soak or SOAK:
        PROGRAMS[make.__name__] = make, share
    return make


def normal(n, *shape):
    return jnp.asarray(np.random.default_rng(n).normal(size=shape), jnp.float32)


def labels(n, size, classes=10):
    return jnp.asarray(np.random.default_rng(n).integers(0, classes, size), jnp.int32)


def filled(abstract):
    """Arrays for abstract ones, without compiling an initializer: kernels by fan, scales and variances around 1."""
    random = np.random.default_rng(0)

    def fill(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(KEY, x.shape) if x.shape else KEY
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        if len(x.shape) < 2:
            return jnp.asarray(random.uniform(0.5, 1, x.shape), x.dtype)
        return jnp.asarray(random.normal(size=x.shape) / np.prod(x.shape[:-1]) ** 0.5, x.dtype)

    return jax.tree.map(fill, abstract)


def variables(model, x, *names):
    """Variables of a linen model."""
    return filled(jax.eval_shape(model.init, dict.fromkeys(("params", *names), KEY), x))


def module(make, *args, **kwargs):
    """An equinox module."""
    return filled(eqx.filter_eval_shape(make, *args, **kwargs))


def descent(loss, params, *rest, optimizer=None):
    """A step of ``optimizer`` on ``loss(params, *rest)`` and its arguments."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def step(params, state, *rest):
        value, grads = jax.value_and_grad(loss)(params, *rest)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.jit(optimizer.init)(params), *rest)


def square(x):
    return (x * x).mean()


# ---- flax.linen -----------------------------------------------------------------------------------


def fitted(model, x, y, **rngs):
    """A step of cross entropy on a linen model, with dropout where there are ``rngs``."""
    params = variables(model, x, *rngs)["params"]

    def loss(params, x, y, rngs):
        logits = model.apply({"params": params}, x, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return descent(loss, params, x, y, rngs)


@program
def linen_mlp():
    model = nn.Sequential([f for _ in range(6) for f in (nn.Dense(32), nn.gelu)] + [nn.Dense(10)])
    return fitted(model, normal(1, 512, 16), labels(2, 512))


@program
def linen_convolutions_with_batch_norm_and_dropout():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (8, 8, 16):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3))(x)))
            x = nn.Dropout(0.3, deterministic=False)(nn.avg_pool(x, (2, 2), (2, 2)))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    model, x, y = Net(), normal(1, 16, 16, 16, 3), labels(2, 16)
    start = variables(model, x, "dropout")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def step(params, stats, state, key, x, y):
        def loss(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, x, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), (logits, new["batch_stats"])

        (value, (logits, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), new, state, value, (logits.argmax(-1) == y).mean()

    params, stats = start["params"], start["batch_stats"]
    return step, (params, stats, optimizer.init(params), jax.random.key(7), x, y)


class Block(nn.Module):
    """A transformer's block with dropout."""

    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(nn.LayerNorm()(x))
        x = x + y
        y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(y)


@program(share=0.85)
def linen_transformer():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, 32)(tokens)
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(10)(x.mean(1))

    return fitted(Net(), labels(1, 8 * 24, 50).reshape(8, 24), labels(2, 8), dropout=KEY)


@program(share=0.9)
def linen_scan_over_rematerialized_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block()(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            split = {"params": True, "dropout": True}
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs=split, length=4)
            return nn.Dense(10)(layers()(x, None)[0].mean(1))

    return fitted(Net(), normal(1, 8, 16, 32), labels(2, 8), dropout=KEY)


@program(share=0.9)
def linen_remat_of_blocks():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.remat(Block)()(x)
            return nn.Dense(10)(x.mean(1))

    return fitted(Net(), normal(1, 8, 16, 32), labels(2, 8), dropout=KEY)


@program
def linen_lstm_in_both_directions():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(16)), nn.RNN(nn.OptimizedLSTMCell(16)))(x)
            return nn.Dense(10)(x[:, -1])

    return fitted(Net(), normal(1, 16, 64, 8), labels(2, 16))


@program(soak=True)
def linen_gru_with_lengths():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            lengths = 1 + jnp.arange(x.shape[0]) % x.shape[1]
            carry, x = nn.RNN(nn.GRUCell(16), return_carry=True)(x, seq_lengths=lengths)
            return nn.Dense(10)(carry + x.mean(1))

    return fitted(Net(), normal(1, 16, 64, 8), labels(2, 16))


@program(soak=True)
def linen_variational_autoencoder():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = x
            for width in (8, 16):
                h = nn.relu(nn.Conv(width, (3, 3), strides=2)(h))
            h = h.reshape(x.shape[0], -1)
            mean, logvar = nn.Dense(8)(h), nn.Dense(8)(h)
            z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.make_rng("noise"), mean.shape)
            h = nn.Dense(4 * 4 * 16)(z).reshape(-1, 4, 4, 16)
            h = nn.relu(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(h))
            return nn.ConvTranspose(1, (3, 3), strides=(2, 2))(h), mean, logvar

    model, x = Net(), jax.nn.sigmoid(normal(1, 32, 16, 16, 1))
    params = variables(model, x, "noise")["params"]

    def loss(params, key, x):
        logits, mean, logvar = model.apply({"params": params}, x, rngs={"noise": key})
        divergence = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1)
        return (optax.sigmoid_binary_cross_entropy(logits, x).sum((1, 2, 3)) + divergence).mean() / 256

    return descent(loss, params, KEY, x)


@program
def linen_mixture_by_switch():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(4):
                experts = [nn.Dense(32, name=f"e{i}{k}") for k in range(2)]
                if self.is_initializing():
                    for e in experts:
                        e(x)
                first, second = (lambda _, x, e=e: e(x) for e in experts)
                x = x + nn.tanh(nn.cond(x.mean() > 0, first, second, self, x))
            return nn.Dense(10)(x)

    return fitted(Net(), normal(1, 512, 32), labels(2, 512))


# ---- flax.nnx -------------------------------------------------------------------------------------


def fitted_nnx(make, x, y):
    """A step on an nnx model and its optimizer: split into what jit takes, merged again inside."""

    def both():
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(both))

    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, (filled(state), x, y)


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 64, rngs=rngs), nnx.Linear(64, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


@program
def nnx_batch_norm_and_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            widths = [16, 32, 32, 32, 32]
            self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(widths))
            self.norms = nnx.List(nnx.BatchNorm(b, rngs=rngs) for b in widths[1:])
            self.dropout, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = self.dropout(nnx.relu(norm(layer(x))))
            return self.out(x)

    return fitted_nnx(Net, normal(1, 512, 16), labels(2, 512))


@program(share=0.85)
def nnx_transformer():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List(NnxBlock(32, rngs) for _ in range(2))
            self.out = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.out(x.mean(1))

    return fitted_nnx(Net, normal(1, 8, 24, 32), labels(2, 8))


@program(share=0.92, soak=True)
def nnx_scan_over_rematerialized_layers():
    class Net(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=4)
            @nnx.vmap
            def blocks(rngs):
                return NnxBlock(32, rngs)

            self.blocks, self.out = blocks(rngs), nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def forward(block, x):
                return block(x)

            return self.out(forward(self.blocks, x).mean(1))

    return fitted_nnx(Net, normal(1, 8, 16, 32), labels(2, 8))


@program
def nnx_recurrent():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=rngs))
            self.out = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x):
            return self.out(self.rnn(x)[:, -1])

    return fitted_nnx(Net, normal(1, 16, 64, 8), labels(2, 16))


# ---- equinox --------------------------------------------------------------------------------------


def fitted_eqx(model, loss, *rest, optimizer=None):
    """A step on an equinox model, its arrays apart from the rest: ``loss(model, *rest)``."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return descent(lambda params, *rest: loss(eqx.combine(params, static), *rest), params, *rest, optimizer=optimizer)


@program
def equinox_mlp():
    model = module(eqx.nn.MLP, 16, 10, 32, 5, activation=jax.nn.silu, key=KEY)
    return fitted_eqx(model, lambda m, x, y: square(jax.vmap(m)(x) - y), normal(1, 512, 16), normal(2, 512, 10))


@program
def equinox_lstm():
    class Net(eqx.Module):
        cell: eqx.nn.LSTMCell
        out: eqx.nn.Linear

        def __call__(self, xs):
            start = jnp.zeros(16), jnp.zeros(16)
            (h, _), _ = jax.lax.scan(lambda c, x: (self.cell(x, c), None), start, xs)
            return self.out(h)

    model = module(lambda: Net(eqx.nn.LSTMCell(8, 16, key=KEY), eqx.nn.Linear(16, 10, key=KEY)))
    return fitted_eqx(model, lambda m, x, y: square(jax.vmap(m)(x) - y), normal(1, 16, 64, 8), normal(2, 16, 10))


@program
def equinox_convolutions_with_state():
    class Net(eqx.Module):
        layers: list
        norms: list

        def __call__(self, x, state):
            for conv, norm in zip(self.layers, self.norms, strict=True):
                x, state = norm(conv(x), state)
                x = jax.nn.relu(x)
            return x.mean((1, 2)), state

    def make():
        widths = [3, 8, 8, 16]
        return Net(
            [eqx.nn.Conv2d(a, b, 3, padding=1, key=KEY) for a, b in pairwise(widths)],
            [eqx.nn.BatchNorm(b, "batch", mode="batch") for b in widths[1:]],
        )

    model, state = module(eqx.nn.make_with_state(make))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(params, state, x, y):
        def loss(params, state):
            model = eqx.combine(params, static)
            logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(params, state)
        return eqx.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), state, value

    return step, (params, state, normal(1, 16, 3, 16, 16), labels(2, 16))


@program(share=0.9)
def equinox_attention_with_dropout():
    class Layer(eqx.Module):
        attend: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            y = jax.vmap(self.norm)(x)
            x = x + self.dropout(self.attend(y, y, y), key=key)
            return x + jax.vmap(self.mlp)(x)

    def layer(key):
        a, b = jax.random.split(key)
        attend = eqx.nn.MultiheadAttention(4, 32, key=a)
        return Layer(attend, eqx.nn.LayerNorm(32), eqx.nn.MLP(32, 32, 64, 1, key=b), eqx.nn.Dropout(0.1))

    def loss(layers, x, keys):
        def one(x, key):
            for layer in layers:
                key, now = jax.random.split(key)
                x = layer(x, now)
            return square(x)

        return jax.vmap(one)(x, keys).mean()

    model = module(lambda: [layer(k) for k in jax.random.split(KEY, 2)])
    return fitted_eqx(model, loss, normal(1, 8, 24, 32), jax.random.split(KEY, 8))


@program
def equinox_stacked_layers_with_filter_checkpoint():
    stack = module(eqx.filter_vmap(lambda k: eqx.nn.MLP(32, 32, 64, 1, key=k)), jax.random.split(KEY, 6))

    def loss(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)

        @eqx.filter_checkpoint
        def layer(arrays, x):
            return x + jax.vmap(eqx.combine(arrays, static))(x)

        return square(jax.lax.scan(lambda x, a: (layer(a, x), None), x, arrays)[0])

    return fitted_eqx(stack, loss, normal(1, 256, 32))


@program(soak=True)
def equinox_ensemble():
    models = module(eqx.filter_vmap(lambda k: eqx.nn.MLP(8, 4, 16, 4, key=k)), jax.random.split(KEY, 4))

    def loss(models, x):
        return square(eqx.filter_vmap(lambda m: jax.vmap(m)(x))(models).std(0))

    return fitted_eqx(models, loss, normal(1, 256, 8))


@program
def equinox_checkpointed_while():
    model = module(eqx.nn.MLP, 16, 16, 32, 2, key=KEY)

    def loss(model, x):
        def body(c):
            return c[0] + 1, c[1] + 0.1 * jax.vmap(model)(c[1])

        def go(c):
            return (c[0] < 20) & (jnp.abs(c[1]).max() < 100)

        return square(eqxi.while_loop(go, body, (0, x), kind="checkpointed", max_steps=32, checkpoints=6)[1])

    return fitted_eqx(model, loss, normal(1, 128, 16))


@program
def equinox_bounded_while():
    model = module(eqx.nn.MLP, 16, 16, 32, 2, key=KEY)

    def loss(model, x):
        def body(c):
            return c[0] + 1, c[1] + 0.1 * jax.vmap(model)(c[1])

        return square(eqxi.while_loop(lambda c: c[0] < 5, body, (0, x), kind="bounded", max_steps=8)[1])

    return fitted_eqx(model, loss, normal(1, 128, 16))


@program
def equinox_graph_of_gates():
    """Spectral norms' state, weight norms, a PReLU, and rotary embeddings."""

    class Net(eqx.Module):
        first: eqx.nn.WeightNorm
        middle: list
        rope: eqx.nn.RotaryPositionalEmbedding

        def __call__(self, x):
            x = jax.vmap(self.first)(self.rope(x))
            for linear, act in self.middle:
                x = x + jax.vmap(act)(jax.vmap(linear)(x))
            return x

    def make():
        gates = [(eqx.nn.Linear(32, 32, key=KEY), eqx.nn.PReLU(0.1)) for _ in range(4)]
        return Net(eqx.nn.WeightNorm(eqx.nn.Linear(16, 32, key=KEY)), gates, eqx.nn.RotaryPositionalEmbedding(16))

    model = module(make)
    return fitted_eqx(model, lambda m, x: square(jax.vmap(m)(x)), normal(1, 16, 32, 16))


# ---- diffrax --------------------------------------------------------------------------------------


def neural_ode(adjoint, solver=None, *, steps=20):
    """A latent equation between an encoder and a decoder."""
    encode, decode = (module(eqx.nn.MLP, a, b, 32, 4, key=KEY) for a, b in ((8, 4), (4, 8)))
    model = module(eqx.nn.MLP, 4, 4, 8, 1, activation=jnp.tanh, key=KEY)

    def loss(models, x):
        encode, model, decode = models

        def one(x):
            term = diffrax.ODETerm(lambda t, y, model: model(y))
            method, limits = solver or diffrax.Heun(), {"adjoint": adjoint, "max_steps": steps}
            out = diffrax.diffeqsolve(term, method, 0.0, 1.0, 1 / 16, encode(x), args=model, **limits)
            return decode(out.ys[-1])

        return square(jax.vmap(one)(x) - x)

    return fitted_eqx((encode, model, decode), loss, normal(1, 256, 8))


@program
def diffrax_recursive_checkpoints():
    return neural_ode(diffrax.RecursiveCheckpointAdjoint(checkpoints=8))


@program(share=0.9)
def diffrax_direct():
    return neural_ode(diffrax.DirectAdjoint())


@program
def diffrax_backsolve():
    return neural_ode(diffrax.BacksolveAdjoint(), diffrax.Euler())


@program(soak=True)
def diffrax_forward_mode():
    def loss(w, y0):
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
        out = diffrax.diffeqsolve(
            term, diffrax.Midpoint(), 0.0, 1.0, 1 / 8, y0, args=w, adjoint=diffrax.ForwardMode(), max_steps=16
        )
        return square(out.ys)

    def step(w, y0):
        return w - 0.1 * jax.jacfwd(loss)(w, y0)

    return step, (normal(1, 6, 6) / 3, normal(2, 64, 6))


@program
def diffrax_implicit():
    finder = diffrax.VeryChord(rtol=1e-3, atol=1e-3, norm=optx.max_norm)
    return neural_ode(diffrax.RecursiveCheckpointAdjoint(checkpoints=4), diffrax.ImplicitEuler(root_finder=finder))


@program(soak=True)
def diffrax_stochastic():
    drift = module(eqx.nn.MLP, 4, 4, 16, 1, key=KEY)
    noise = module(eqx.nn.MLP, 4, 4, 16, 1, final_activation=jnp.tanh, key=KEY)

    def loss(model, y0, keys):
        drift, noise = model

        def one(y0, key):
            path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(4,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: drift(y)),
                diffrax.ControlTerm(lambda t, y, args: lx.DiagonalLinearOperator(noise(y)), path),
            )
            return diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 1 / 16, y0, max_steps=20).ys

        return square(jax.vmap(one)(y0, keys))

    return fitted_eqx((drift, noise), loss, normal(1, 64, 4), jax.random.split(KEY, 64))


# ---- lineax and optimistix ------------------------------------------------------------------------


@program
def lineax_conjugate_gradients():
    model = module(eqx.nn.MLP, 16, 16, 32, 3, activation=jnp.tanh, key=KEY)

    def loss(model, x, b):
        features = jax.vmap(model)(x)
        matrix = features @ features.T / 16 + jnp.eye(len(x))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        return square(lx.linear_solve(operator, b, lx.CG(rtol=1e-5, atol=1e-5)).value)

    return fitted_eqx(model, loss, normal(1, 128, 16), normal(2, 128))


@program(soak=True)
def lineax_gmres_and_least_squares():
    model = module(eqx.nn.MLP, 16, 16, 32, 3, activation=jnp.tanh, key=KEY)

    def loss(model, x, b):
        features = jax.vmap(model)(x)
        fit = lx.linear_solve(lx.MatrixLinearOperator(features), b, lx.QR()).value
        small = lx.MatrixLinearOperator(jnp.eye(16) + 0.1 * jnp.outer(fit, fit))
        return square(lx.linear_solve(small, fit, lx.GMRES(rtol=1e-4, atol=1e-4), throw=False).value)

    return fitted_eqx(model, loss, normal(1, 256, 16), normal(2, 256))


@program
def optimistix_levenberg_marquardt():
    model = module(eqx.nn.MLP, 16, 4, 32, 4, key=KEY)

    def loss(model, x):
        def residual(y, features):
            return jnp.tanh(features @ y) - 0.5

        features = jax.vmap(model)(x)
        found = optx.least_squares(
            residual, optx.LevenbergMarquardt(1e-3, 1e-3), jnp.zeros(4), args=features, max_steps=8, throw=False
        )
        return square(found.value) + square(features)

    return fitted_eqx(model, loss, normal(1, 256, 16))


@program
def optimistix_equilibrium():
    """A deep equilibrium: a fixed point differentiated implicitly, behind and before ordinary layers."""
    before, inner = module(eqx.nn.MLP, 16, 8, 32, 3, key=KEY), module(eqx.nn.Linear, 8, 8, key=KEY)

    def loss(model, x):
        before, inner = model

        def one(z, x):
            return jnp.tanh(0.3 * jax.vmap(inner)(z) + x)

        x = jax.vmap(before)(x)
        solver = optx.FixedPointIteration(rtol=1e-4, atol=1e-4)
        return square(optx.fixed_point(one, solver, jnp.zeros_like(x), args=x, max_steps=30, throw=False).value)

    return fitted_eqx((before, inner), loss, normal(1, 256, 16))


@program(share=0.9, soak=True)
def optimistix_bfgs_unrolled():
    model = module(eqx.nn.MLP, 8, 8, 16, 2, key=KEY)

    def loss(model, x):
        def inner(y, features):
            return square(jnp.sin(features @ y) - 0.3) + 0.1 * square(y)

        found = optx.minimise(
            inner,
            optx.GradientDescent(0.5, rtol=1e-6, atol=1e-6),
            jnp.ones(8),
            args=jax.vmap(model)(x),
            max_steps=12,
            adjoint=optx.RecursiveCheckpointAdjoint(checkpoints=4),
            throw=False,
        )
        return square(found.value)

    return fitted_eqx(model, loss, normal(1, 256, 8))


# ---- optax ----------------------------------------------------------------------------------------


def dense_loss(params, x, y):
    for w, b in params:
        x = x + jnp.tanh(x @ w + b)
    return square(x - y)


def dense(optimizer, loss=dense_loss, layers=6, rows=384):
    params = [(normal(i, 24, 24) / 5, jnp.zeros(24)) for i in range(layers)]
    return descent(loss, params, normal(21, rows, 24), normal(22, rows, 24), optimizer=optimizer)


@program
def optax_adamw_with_schedule_and_clipping():
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 5, 50)
    return dense(optax.chain(optax.adaptive_grad_clip(0.1), optax.adamw(schedule, eps=1e-4)))


@program
def optax_one_optimizer_per_layer():
    makers = [
        optax.adafactor(1e-2),
        optax.lamb(1e-2, eps=1e-4),
        optax.novograd(1e-2),
        optax.yogi(1e-2),
        optax.radam(1e-2, eps=1e-4),
        optax.nadamw(1e-2, eps=1e-4),
    ]
    names = [(str(i), str(i)) for i in range(len(makers))]
    return dense(optax.partition({str(i): m for i, m in enumerate(makers)}, names))


@program
def optax_accumulated_and_guarded():
    return dense(optax.apply_if_finite(optax.MultiSteps(optax.rmsprop(1e-2, eps=1e-4), 2).gradient_transformation(), 3))


@program(share=0.95)
def optax_lbfgs():
    params = [(normal(i, 24, 24) / 5, jnp.zeros(24)) for i in range(4)]
    optimizer = optax.lbfgs(memory_size=4, linesearch=optax.scale_by_zoom_linesearch(6))

    def step(params, state, x, y):
        def fun(p):
            return dense_loss(p, x, y)

        value, grads = optax.value_and_grad_from_state(fun)(params, state=state)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=fun)
        return optax.apply_updates(params, updates), value

    return step, (params, optimizer.init(params), normal(21, 384, 24), normal(22, 384, 24))


@program(soak=True)
def optax_muon_and_prodigy():
    return dense(
        optax.partition({"m": contrib.muon(1e-2), "p": contrib.prodigy(1e-2, eps=1e-4)}, [("m", "p") for _ in range(6)])
    )


@program(soak=True)
def optax_sharpness_aware_and_schedule_free():
    inner = contrib.schedule_free_adamw(1e-2, eps=1e-3)
    return dense(contrib.sam(inner, optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2))


@program
def optax_ctc():
    """Connectionist temporal classification behind a convolution over time."""
    params = {"conv": normal(1, 5, 8, 32) / 5, "out": normal(2, 32, 12) / 5}

    def loss(params, x, y):
        h = jax.lax.conv_general_dilated(x, params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        logits = jax.nn.gelu(h) @ params["out"]
        return optax.ctc_loss(logits, jnp.zeros(x.shape[:2]), y, jnp.zeros(y.shape)).mean()

    return descent(loss, params, normal(3, 8, 40, 8), 1 + labels(4, 8 * 6, 10).reshape(8, 6))


@program(soak=True)
def optax_many_losses():
    def loss(params, x, y):
        for w, b in params:
            x = x + jax.nn.gelu(x @ w + b)
        return (
            optax.huber_loss(x, y).mean()
            + optax.cosine_distance(x, y, epsilon=1e-3).mean()
            + optax.log_cosh(x, y).mean()
            + optax.kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(y)).mean()
            + optax.sigmoid_focal_loss(x, jax.nn.sigmoid(y)).mean()
            + optax.losses.ntxent(x[:32], jnp.arange(32) // 2).mean()
            + optax.losses.poly_loss_cross_entropy(x, jax.nn.softmax(y)).mean()
            + optax.squared_error(x, y).mean()
        )

    return dense(optax.noisy_sgd(1e-2, key=jax.random.key(3)), loss)


# ---- numpyro --------------------------------------------------------------------------------------


def bayesian_network(x, y):
    for i, width in enumerate((16, 16, 16)):
        w = numpyro.sample(f"w{i}", dist.Normal(0, 1).expand([x.shape[-1], width]).to_event(2))
        x = x + jnp.tanh(x @ w / 4)
    numpyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=y)


def inference(model, guide, *data, particles=1):
    svi = SVI(model, guide, numpyro.optim.Momentum(1e-3, 0.9), Trace_ELBO(num_particles=particles))
    state = jax.jit(svi.init)(KEY, *data)
    return lambda state, *data: svi.update(state, *data), (state, *data)


@program
def numpyro_variational_network():
    guide = autoguide.AutoNormal(bayesian_network)
    return inference(bayesian_network, guide, normal(1, 512, 16), normal(2, 512))


@program(soak=True)
def numpyro_flow():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([12]).to_event(1))
        numpyro.sample("y", dist.StudentT(3.0, z.sum(), 1.0), obs=y)

    return inference(model, autoguide.AutoIAFNormal(model, hidden_dims=[24, 24]), normal(2, 256), particles=16)


@program(share=0.85, soak=True)
def numpyro_time_series():
    """A scan with sample sites inside, its latent walk integrated by a guide."""

    def model(ys):
        drift = numpyro.sample("drift", dist.Normal(0, 1).expand([8]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(-2, 0.5))

        def move(z, y):
            z = numpyro.sample("z", dist.Normal(jnp.tanh(z + 0.1 * drift), 0.1 + scale).to_event(1))
            numpyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y)
            return z, None

        numpyro_scan(move, jnp.zeros(8), ys)

    return inference(model, autoguide.AutoNormal(model), normal(2, 64), particles=8)


# ---- blackjax -------------------------------------------------------------------------------------


def posterior(weights, x, y):
    for w in weights:
        x = x + jnp.tanh(x @ w / 4)
    return -0.5 * ((x.sum(-1) - y) ** 2).sum() / 100 - 0.5 * sum((w * w).sum() for w in weights)


def sampled(make):
    weights, x, y = [normal(i, 16, 16) for i in range(5)], normal(21, 512, 16), normal(22, 512)

    def step(key, state, x, y):
        return make(functools.partial(posterior, x=x, y=y)).step(key, state)

    return step, (KEY, jax.jit(make(functools.partial(posterior, x=x, y=y)).init)(weights), x, y)


@program
def blackjax_hmc():
    return sampled(lambda f: blackjax.hmc(f, 1e-2, jnp.ones(5 * 256), 4))


@program(share=0.9, soak=True)
def blackjax_nuts():
    return sampled(lambda f: blackjax.nuts(f, 5e-2, jnp.ones(5 * 256), max_num_doublings=3))


@program(soak=True)
def blackjax_mala():
    return sampled(lambda f: blackjax.mala(f, 1e-3))


@program(soak=True)
def blackjax_langevin():
    def step(key, weights, x, y):
        estimate = blackjax.sgmcmc.gradients.grad_estimator(
            lambda w: -0.5 * sum((v * v).sum() for v in w), lambda w, d: posterior(w, d[0][None], d[1][None]), 5000
        )
        return blackjax.sgld(estimate).step(key, weights, (x, y), 1e-4)

    return step, (KEY, [normal(i, 16, 16) for i in range(5)], normal(21, 512, 16), normal(22, 512))
