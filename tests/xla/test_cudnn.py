"""cuDNN's attention is traced and compiled for a card that is not here, and for no other."""

import threading

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.spmd.location import as_for
from jaxtensile.xla.compile import memory_of
from jaxtensile.xla.target import tracing_for

TARGET = "nvidia-h100-80gb"
pytestmark = pytest.mark.xdist_group("cudnn")


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def loss(weights, x):
    for w in weights:
        heads = (x @ w["qkv"]).reshape(*x.shape[:2], 12, 64)
        x = x + attend(*jnp.split(heads, 3, axis=2)).reshape(x.shape) @ w["out"]
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return (x.astype(jnp.float32) ** 2).mean()


def step(weights, x):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))


def shapes(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


LAYER = {"qkv": shapes(256, 768), "out": shapes(256, 256), "up": shapes(256, 1024), "down": shapes(1024, 256)}
ARGS = [LAYER] * 2, shapes(8, 512, 256)
HEADS = [shapes(2, 128, 4, 256)] * 3
"""256 wide, which cuDNN takes from Hopper on."""


def refused():
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(attend)(*[shapes(2, 64, 4, 64)] * 3)


@pytest.mark.cuda_aot
def test_a_step_with_it_is_planned():
    static = jaxtensile.estimate(step, *ARGS, target=TARGET, donate_argnums=0)
    budget = int(0.9 * static.device)
    report = jaxtensile.jit(step, target=TARGET, donate_argnums=0, budget=budget).plan(*ARGS)
    assert report.fits and report.compiled.device <= budget < report.baseline.device
    assert static.low <= report.baseline.device <= static.high
    refused()


@pytest.mark.cuda_aot
@pytest.mark.parametrize("named", [True, False])
def test_it_is_lowered_and_compiled(named):
    planned = jaxtensile.jit(attend, target=TARGET if named else None)
    args = HEADS if named else as_for(TARGET, jax.jit(attend), HEADS, {})[0]
    assert planned.eval_shape(*args).shape == HEADS[0].shape
    compiled = planned.lower(*args).compile()
    assert "__cudnn$fmha" in compiled.as_text()
    found = jaxtensile.estimate(attend, *args, target=TARGET if named else None, exact=True)
    assert found.use == memory_of(compiled)


def test_it_is_estimated_from_the_jaxpr_without_a_target():
    found = jaxtensile.estimate(attend, *HEADS)
    assert found.device >= 4 * 2 * 128 * 4 * 256 * 2, "three operands and the result"
    refused()


def test_each_target_answers_with_its_own_capability():
    assert jaxtensile.estimate(attend, *HEADS, target="nvidia-h200").device > 0
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        jaxtensile.estimate(lambda *heads: attend(*heads), *HEADS, target="nvidia-a100-40gb")
    with pytest.raises(RuntimeError, match="cuDNN"):
        jaxtensile.estimate(lambda *heads: attend(*heads), *HEADS, target="tpu-v5e")


def test_only_the_thread_that_traces_for_it_is_answered():
    with tracing_for(TARGET):
        jax.make_jaxpr(attend)(*HEADS)
        found = []

        def elsewhere():
            try:
                refused()
                found.append("refused")
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found == ["refused"]
        with pytest.raises(ValueError, match="inside"), tracing_for("nvidia-h200"):
            raise ValueError("inside")
        jax.make_jaxpr(lambda *heads: attend(*heads))(*HEADS)
    refused()


def test_a_card_that_is_here_answers_for_itself(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with tracing_for():
        refused()
