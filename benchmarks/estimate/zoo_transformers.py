"""Models of ``transformers`` 4, in flax: sizes as published, the weights never made.

Every step is what the package's own training scripts do: dropout on, the mask of the padding given where the task
has one, labels beside the tokens. Its T5 is not here: it calls ``jnp.clip`` by a name that jax 0.10 no longer has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.estimate.model import Learner, Model, cross_entropy, floats, integers, labelled_images, learned

Call = Callable[..., Any]
"""The model with its parameters left out: ``call(params, key, **inputs)``."""


def causal(call: Call, config: Any, context: int) -> Any:
    """Each next token."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, input_ids=batch["tokens"]).logits
        return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]), extra

    return loss, lambda size: {"tokens": integers(size, context)}


def masked(call: Call, config: Any, context: int) -> Any:
    """The tokens that were masked out."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, input_ids=batch["tokens"], attention_mask=batch["mask"]).logits
        return cross_entropy(logits, batch["labels"], batch["labels"] > 0), extra

    return loss, lambda size: {name: integers(size, context) for name in ("tokens", "mask", "labels")}


def replaced(call: Call, config: Any, context: int) -> Any:
    """Which tokens were replaced (ELECTRA's discriminator)."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, input_ids=batch["tokens"], attention_mask=batch["mask"]).logits
        return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), batch["labels"]).mean(), extra

    return loss, lambda size: {name: integers(size, context) for name in ("tokens", "mask", "labels")}


def translation(call: Call, config: Any, context: int) -> Any:
    """A sequence from a sequence; the target is a quarter as long as the source."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(
            params,
            key,
            input_ids=batch["tokens"],
            attention_mask=batch["mask"],
            decoder_input_ids=batch["decoder_tokens"],
        ).logits
        return cross_entropy(logits, batch["labels"], batch["labels"] > 0), extra

    def batch(size: int) -> Any:
        short = integers(size, context // 4)
        return {
            "tokens": integers(size, context),
            "mask": integers(size, context),
            "decoder_tokens": short,
            "labels": short,
        }

    return loss, batch


def speech(call: Call, config: Any, context: int) -> Any:
    """A transcript of ``context`` tokens from the spectrogram of half a minute."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, input_features=batch["spectrogram"], decoder_input_ids=batch["tokens"]).logits
        return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]), extra

    frames = 2 * config.max_source_positions
    return loss, lambda size: {
        "spectrogram": floats(size, config.num_mel_bins, frames),
        "tokens": integers(size, context),
    }


def images(call: Call, config: Any, pixels: int) -> Any:
    """A label for each image."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, pixel_values=batch["images"]).logits
        return cross_entropy(logits, batch["labels"]), extra

    return loss, partial(labelled_images, pixels=pixels, channels_first=True)


def images_normed(call: Call, config: Any, pixels: int) -> Any:
    """A label for each image, by a network with batch norm."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        out, updated = call({"params": params, "batch_stats": extra}, None, pixel_values=batch["images"])
        return cross_entropy(out.logits, batch["labels"]), updated["batch_stats"]

    return loss, partial(labelled_images, pixels=pixels, channels_first=True)


def contrastive(call: Call, config: Any, context: int) -> Any:
    """Which caption belongs to which image of the batch."""

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = call(params, key, input_ids=batch["tokens"], pixel_values=batch["images"]).logits_per_image
        each = jnp.arange(logits.shape[0])
        return (cross_entropy(logits, each) + cross_entropy(logits.T, each)) / 2, extra

    pixels = config.vision_config.image_size
    return loss, lambda size: {"tokens": integers(size, context), "images": floats(size, 3, pixels, pixels)}


TASKS: dict[str, Callable[..., Any]] = {
    "causal language model": causal,
    "masked language model": masked,
    "replaced token detection": replaced,
    "sequence to sequence": translation,
    "speech to text": speech,
    "image classification": images,
    "image classification, batch norm": images_normed,
    "contrastive": contrastive,
}


def learner(class_name: str, task: str, context: int, dtype: str, sizes: Mapping[str, Any]) -> Learner:
    """``context``: tokens, or pixels of an image's side."""
    import transformers

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(transformers, class_name)
        labels = {"num_labels": 1000} if task.startswith("image") else {}
        config = kind.config_class(**labels, **sizes)
        model = kind(config, dtype=jnp.dtype(dtype), _do_init=False)
    variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(model.params_shape_tree))

    training = {"train": True} if "train" in signature(model.__call__).parameters else {"deterministic": False}

    def call(params: Any, key: Any, **inputs: Any) -> Any:
        random = {} if key is None else {"dropout_rng": key}
        return model(params=params, **training, **random, **inputs)

    loss, batch = TASKS[task](call, config, context)
    if "batch_stats" in variables:
        return Learner(params=variables["params"], extra=variables["batch_stats"], loss=loss, batch=batch)
    return Learner(params=variables, extra={}, loss=loss, batch=batch)


def models() -> Iterator[Model]:
    def model(
        name: str,
        class_name: str,
        family: str,
        task: str,
        batches: tuple[int, ...],
        context: int = 512,
        dtype: str = "float32",
        **sizes: Any,
    ) -> Model:
        name = f"transformers/{name}"
        return Model(
            name=name,
            requires="transformers",
            family=family,
            task=task,
            batches=batches,
            dtype=dtype,
            workload=learned(name, partial(learner, class_name, task, context, dtype, sizes)),
        )

    few, some, many = (1, 2, 4, 8), (4, 8, 16, 32), (16, 32, 64, 128)
    text, cloze, pixels = "causal language model", "masked language model", "image classification"
    base: Any = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    yield model("resnet50", "FlaxResNetForImageClassification", "resnet", f"{pixels}, batch norm", many, 224)
    yield model("regnet_y_040", "FlaxRegNetForImageClassification", "regnet", f"{pixels}, batch norm", many, 224)
    yield model("vit_base", "FlaxViTForImageClassification", "vit", pixels, (8, 16, 32, 64), 224)
    yield model("beit_base", "FlaxBeitForImageClassification", "beit", pixels, (8, 16, 32, 64), 224, "bfloat16")
    yield model("dinov2_base", "FlaxDinov2ForImageClassification", "dinov2", pixels, (8, 16, 32, 64), 224)
    yield model("clip_vit_b32", "FlaxCLIPModel", "clip", "contrastive", (32, 64, 128, 256), 77)
    yield model("gpt2", "FlaxGPT2LMHeadModel", "gpt2", text, some)
    yield model(
        "gpt2_medium", "FlaxGPT2LMHeadModel", "gpt2", text, few, 1024, "bfloat16", n_embd=1024, n_layer=24, n_head=16
    )
    yield model(
        "gpt_neo_125m",
        "FlaxGPTNeoForCausalLM",
        "gpt-neo",
        text,
        some,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        attention_types=[[["global", "local"], 6]],
    )
    yield model("opt_125m", "FlaxOPTForCausalLM", "opt", text, some, 512, "bfloat16")
    yield model("llama_160m", "FlaxLlamaForCausalLM", "llama", text, some, intermediate_size=3072, **base)
    yield model(
        "mistral_small",
        "FlaxMistralForCausalLM",
        "llama",
        text,
        few,
        1024,
        "bfloat16",
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=3584,
        max_position_embeddings=1024,
        sliding_window=512,
    )
    yield model(
        "gemma_2b",
        "FlaxGemmaForCausalLM",
        "gemma",
        text,
        few,
        512,
        "bfloat16",
        hidden_size=2048,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        intermediate_size=16384,
    )
    yield model("bloom_560m", "FlaxBloomForCausalLM", "bloom", text, few, hidden_size=1024, n_layer=24, n_head=16)
    yield model("bert_base", "FlaxBertForMaskedLM", "bert", cloze, some)
    yield model(
        "roberta_base",
        "FlaxRobertaForMaskedLM",
        "bert",
        cloze,
        some,
        512,
        "bfloat16",
        vocab_size=50265,
        max_position_embeddings=514,
    )
    yield model("distilbert", "FlaxDistilBertForMaskedLM", "bert", cloze, some, 256)
    yield model("electra_small", "FlaxElectraForPreTraining", "electra", "replaced token detection", many, 128)
    yield model(
        "electra_base",
        "FlaxElectraForPreTraining",
        "electra",
        "replaced token detection",
        some,
        embedding_size=768,
        intermediate_size=3072,
        **base,
    )
    yield model("albert_base", "FlaxAlbertForMaskedLM", "albert", cloze, some, intermediate_size=3072, **base)
    yield model("roformer_base", "FlaxRoFormerForMaskedLM", "roformer", cloze, some)
    yield model(
        "bart_base",
        "FlaxBartForConditionalGeneration",
        "bart",
        "sequence to sequence",
        some,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
    )
    yield model("bigbird_base", "FlaxBigBirdForMaskedLM", "bigbird", cloze, some, attention_type="original_full")
    yield model("xglm_564m", "FlaxXGLMForCausalLM", "xglm", text, few)
    yield model(
        "pegasus_small", "FlaxPegasusForConditionalGeneration", "pegasus", "sequence to sequence", some, d_model=512
    )
    yield model(
        "blenderbot_small",
        "FlaxBlenderbotSmallForConditionalGeneration",
        "blenderbot",
        "sequence to sequence",
        some,
        dtype="bfloat16",
    )
    yield model("whisper_tiny", "FlaxWhisperForConditionalGeneration", "whisper", "speech to text", some, 448)
