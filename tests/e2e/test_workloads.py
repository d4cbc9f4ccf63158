"""The benchmark workloads are the published models, and their tiny versions train."""

import importlib
import math

import jax
import jax.numpy as jnp
import pytest

from jax_lines import in_a_soak
from jaxtensile.program.trace import jaxpr_flops

workloads = importlib.import_module("benchmarks.workloads")

DLRM_KAGGLE = {"max_rows": None, "dim": 16, "bottom": (512, 256, 64, 16), "top": (512, 256, 1)}
PUBLISHED = {  # name -> (parameters, sizes to set, where the figure stands)
    "gpt2_small": (124.4e6, {}, "released checkpoint"),
    "llama": (1.100e9, {}, "TinyLlama, table 1"),
    "vit_b": (86.6e6, {}, "ViT, table 1: 86M; released checkpoint"),
    "resnet50": (25.6e6, {}, "released checkpoint"),
    "unet": (35.7e6, {}, "DDPM, appendix B"),
    "bert_base": (110e6, {}, "BERT, section 3"),
    "lstm": (66e6, {}, "Zaremba et al., large LSTM"),
    "mixer": (59.9e6, {}, "MLP-Mixer, table 1: 59M; released checkpoint"),
    "dlrm": (540e6, DLRM_KAGGLE, "DLRM on Criteo Kaggle, d=16"),
    "vgg16": (138_357_544, {}, "VGG, table 2: 138M; released checkpoint"),
    "inception_v3": (23_834_568, {}, "released checkpoint, without the auxiliary head"),
    "densenet121": (7_978_856, {}, "released checkpoint"),
}
EVERY = (*workloads.NAMES, *workloads.IN_PAPERS)


def describe(tree):
    """Structure, and shape, dtype and weak type of every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves]  # keys have none


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"llama.*vgg16"):
        workloads.load("alexnet")
    assert len(workloads.NAMES) == 11 and not set(workloads.NAMES) & set(workloads.IN_PAPERS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    published, sizes, _ = PUBLISHED[name]
    module = workloads.load(name)
    config = module.Config(**sizes)
    params = jax.eval_shape(lambda: module.init_params(config, jax.random.key(0)))
    rel = 0 if isinstance(published, int) else 0.01  # exact where a count was published, else a rounded figure
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == pytest.approx(published, rel=rel)


@pytest.mark.parametrize("name", EVERY)
def test_published_size_traces_and_returns_the_state_it_took(name):
    work = workloads.workload(name)
    state, loss = jax.eval_shape(work.fun, *work.args)
    assert work.name == name
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(work.args))
    assert describe(state) == describe(work.args[0])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    "name", [*workloads.NAMES, *(pytest.param(name, marks=in_a_soak) for name in workloads.IN_PAPERS)]
)
def test_tiny_arguments_match_the_abstract_ones_and_train(name):
    """Five donated steps on one batch; randomness, where the model has any, is the same in every step."""
    module = workloads.load(name)
    config = module.Config.tiny()
    work = module.workload(config)
    fast = {"compiler_options": {"xla_backend_optimization_level": 0}}  # most of a tiny model's time is LLVM's
    args = jax.jit(module.init_args, static_argnums=0, **fast)(config, jax.random.key(1))
    assert describe(args) == describe(work.args)

    step = jax.jit(work.fun, **work.jit_options, **fast)
    state, batch = args
    losses = []
    for _ in range(5):
        if "key" in state:
            state = state | {"key": jax.random.key(2)}
        given = jax.tree.leaves(state["params"])
        state, loss = step(state, batch)
        assert all(leaf.is_deleted() for leaf in given)
        losses.append(float(loss))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0], losses


BLOCKS = {"gpt2_small": 12, "llama": 22, "vit_b": 12, "resnet50": 16, "unet": 22, "bert_base": 12, "moe": 12}
BLOCKS |= {"lstm": 1, "mixer": 12, "dlrm": 2, "ode": 1}  # a loop's body once, one of each MLP


def equations(jaxpr, name):
    """How often a primitive stands in a jaxpr, bodies included."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == name
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            body = getattr(part, "jaxpr", part)
            found += equations(body, name) if hasattr(body, "eqns") else 0
    return found


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_policy_stands_on_every_block_and_nowhere_without_the_option(name):
    def traced(remat):
        work = workloads.workload(name, remat=remat)
        return jax.jit(work.fun, **work.jit_options).trace(*work.args).jaxpr

    plain, recomputing = traced(None), traced(jax.checkpoint_policies.nothing_saveable)
    assert [equations(plain.jaxpr, p) for p in ("remat2", "checkpoint", "name")] == [0, 0, 0]
    assert sum(equations(recomputing.jaxpr, p) for p in ("remat2", "checkpoint")) == BLOCKS[name]
    assert jaxpr_flops(recomputing) > jaxpr_flops(plain)
    assert recomputing.out_avals == plain.out_avals


@pytest.mark.parametrize("name", ["gpt2_small", "lstm", "resnet50", "mixer"])
def test_a_policy_changes_no_value(name):
    """One block in plain JAX, in flax.linen, in flax.nnx, and a scan's body: two steps, the second by the gradients."""
    module = workloads.load(name)
    config = module.Config.tiny()
    fast = {"compiler_options": {"xla_backend_optimization_level": 0}}
    args = jax.jit(module.init_args, static_argnums=0, **fast)(config, jax.random.key(1))
    losses = []
    for remat in (None, jax.checkpoint_policies.nothing_saveable):
        step = jax.jit(module.step(config, remat), **fast)
        state, first = step(*args)
        losses.append([first, step(state | ({"key": args[0]["key"]} if "key" in state else {}), args[1])[1]])
    assert losses[0][1] != losses[0][0]
    assert jnp.allclose(jnp.array(losses[0]), jnp.array(losses[1]), rtol=2e-3)
