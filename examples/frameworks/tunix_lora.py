"""tunix: LoRA of a small Qwen3 by ``PeftTrainer``.

jaxtensile exec --budget 72MiB -- python examples/frameworks/tunix_lora.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils


def with_lora(model):
    rules = ".*q_proj|.*kv_proj|.*gate_proj|.*up_proj|.*down_proj"
    provider = qwix.LoraProvider(module_path=rules, rank=8, alpha=16.0)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())


def model_input(example):
    mask = example.input_tokens != 0
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    config = qwen3.ModelConfig(
        num_layers=4,
        vocab_size=256,
        embed_dim=128,
        hidden_dim=512,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        norm_eps=1e-6,
        rope_theta=10_000,
        use_tied_embedding=True,
    )
    text = np.frombuffer(b"what fits is run as it is; what does not is computed again. " * 64, np.uint8)
    random = np.random.default_rng(0)
    batches = []
    for _ in range(options.steps):
        starts = random.integers(0, len(text) - options.context, options.batch)
        rows = np.stack([text[start : start + options.context] for start in starts]).astype(np.int32)
        batches.append(peft_trainer.TrainingInput(input_tokens=rows, input_mask=np.ones_like(rows)))

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = with_lora(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
        trainer = peft_trainer.PeftTrainer(
            model, optax.adamw(1e-2), peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=options.steps)
        ).with_gen_model_input_fn(model_input)
        trainer.train(batches)
        found = model_input(batches[0])
        logits, _ = model(found["input_tokens"], found["positions"], None, found["attention_mask"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], jnp.asarray(batches[0].input_tokens[:, 1:])
    )
    print(f"loss after {options.steps} steps {losses.mean():.6f}")


if __name__ == "__main__":
    main()
