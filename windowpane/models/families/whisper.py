"""Whisper: a decoder whose layers keep their own tokens and, once, those of the audio encoder.

The encoder is loaded like the rest, because without it there is nothing to decode.
"""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Cross, Full
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import Shape, by_columns, by_rows, embeddings, model_spec, norms, whole, with_biases
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("WhisperForConditionalGeneration",)


def read(config: Config, name: str) -> ModelSpec:
    shape = _shape(config)
    encoder_tokens = config.integer("max_source_positions", 1500)
    caches: list[TokenCache] = []
    for layer in range(shape.layers):
        for keeps in (Full(), Cross(encoder_tokens)):
            caches.append(shape.cache(layer, keeps))
    width = config.integer("decoder_ffn_dim")
    tensors: list[TensorSpec] = embeddings("model.decoder.", shape, head="proj_out.weight")
    tensors.append(_positions("model.decoder.", shape.max_position, shape.hidden))
    for layer in range(shape.layers):
        prefix = f"model.decoder.layers.{layer}."
        tensors += _attention(f"{prefix}self_attn", shape.hidden, shape.query_heads)
        tensors += _attention(f"{prefix}encoder_attn", shape.hidden, shape.query_heads)
        tensors += _mlp(prefix, shape.hidden, width)
    tensors += _layer_norm("model.decoder.layer_norm", shape.hidden)
    tensors += _encoder(config, shape.hidden, encoder_tokens)
    return model_spec(
        config, config, shape, name=name, family="whisper", widest_mlp=width, caches=caches, tensors=tensors
    )


def _shape(config: Config) -> Shape:
    hidden, heads = config.integer("d_model"), config.integer("decoder_attention_heads")
    if hidden % heads:
        raise ModelError(f"d_model {hidden} is no multiple of the {heads} decoder_attention_heads")
    return Shape(
        hidden=hidden,
        layers=config.layers("decoder_layers"),
        query_heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.integer("vocab_size"),
        max_position=config.integer("max_target_positions", 448),
        tied=config.flag("tie_word_embeddings", True),
    )


def _encoder(config: Config, hidden: int, tokens: int) -> list[TensorSpec]:
    prefix = "model.encoder."
    heads, width = config.integer("encoder_attention_heads"), config.integer("encoder_ffn_dim")
    tensors = with_biases(
        [
            whole(f"{prefix}conv1.weight", hidden, config.integer("num_mel_bins", 80), 3),
            whole(f"{prefix}conv2.weight", hidden, hidden, 3),
        ]
    )
    tensors.append(_positions(prefix, tokens, hidden))
    for layer in range(config.layers("encoder_layers")):
        tensors += _attention(f"{prefix}layers.{layer}.self_attn", hidden, heads)
        tensors += _mlp(f"{prefix}layers.{layer}.", hidden, width)
    return [*tensors, *_layer_norm(f"{prefix}layer_norm", hidden)]


def _positions(prefix: str, tokens: int, hidden: int) -> TensorSpec:
    return whole(f"{prefix}embed_positions.weight", tokens, hidden, part="embedding")


def _attention(block: str, hidden: int, heads: int) -> list[TensorSpec]:
    """An attention block and the norm before it. Keys alone have no bias: it would cancel out in the softmax."""
    biased = [by_rows(f"{block}.{name}_proj.weight", hidden, hidden, heads, "attention") for name in "vq"]
    biased.append(by_columns(f"{block}.out_proj.weight", hidden, hidden, heads, "attention"))
    keys = by_rows(f"{block}.k_proj.weight", hidden, hidden, heads, "attention")
    return [keys, *with_biases(biased), *_layer_norm(f"{block}_layer_norm", hidden)]


def _mlp(prefix: str, hidden: int, width: int) -> list[TensorSpec]:
    linears = [
        by_rows(f"{prefix}fc1.weight", width, hidden, width, "mlp"),
        by_columns(f"{prefix}fc2.weight", hidden, width, width, "mlp"),
    ]
    return [*with_biases(linears), *_layer_norm(f"{prefix}final_layer_norm", hidden)]


def _layer_norm(name: str, width: int) -> list[TensorSpec]:
    return [*norms("", (name,), width), whole(f"{name}.bias", width)]
