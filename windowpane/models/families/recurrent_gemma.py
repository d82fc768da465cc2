"""RecurrentGemma: two gated linear recurrences (RG-LRU) to one layer of local attention. No layer sees everything."""

from __future__ import annotations

from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.retention import Window
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    Shape,
    attention_tensors,
    by_columns,
    by_rows,
    embeddings,
    even_head_dim,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    with_biases,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("RecurrentGemmaForCausalLM",)

BLOCK_TYPES = ("recurrent", "attention")
TRAINED_TOKENS = 8192
LENGTH_NOTE = "the config names no longest length: 8,192 tokens is what the model was trained on, not a limit of memory"


def read(config: Config, name: str) -> ModelSpec:
    defaults = {
        "head_dim": even_head_dim(config),
        "num_key_value_heads": config.integer("num_attention_heads"),
        "max_position_embeddings": TRAINED_TOKENS,
    }
    shape = read_shape(config, config, tied=True, defaults=defaults)
    blocks = config.texts("block_types") or ("recurrent", "recurrent", "attention")
    for block in blocks:
        if block not in BLOCK_TYPES:
            raise config.unknown_value("block_types", block, BLOCK_TYPES)
    window = Window(config.integer("attention_window_size", 2048))
    lru_width = config.integer("lru_width", shape.hidden)
    if lru_width % shape.query_heads:
        raise ModelError(f"lru_width {lru_width} is no multiple of the {shape.query_heads} heads that gate it")
    kernel = config.integer("conv1d_width", 4, minimum=2)
    # The config counts gate and up together.
    width = config.integer("intermediate_size") // 2
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        if blocks[layer % len(blocks)] == "attention":
            caches.append(shape.cache(layer, window))
            tensors += _attention(f"{prefix}temporal_block.", config, shape)
        else:
            caches.append(_state(layer, shape.query_heads, lru_width, kernel))
            tensors += _recurrence(f"{prefix}temporal_block.", shape, lru_width, kernel)
        tensors += mlp_tensors(f"{prefix}mlp_block.", shape.hidden, width, bias=True)
        tensors += norms(prefix, ("temporal_pre_norm", "channel_pre_norm"), shape.hidden)
    tensors += norms("model.", ("final_norm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="recurrent_gemma",
        widest_mlp=width,
        caches=caches,
        tensors=tensors,
        notes=() if config.has("max_position_embeddings") else (LENGTH_NOTE,),
    )


def _state(layer: int, heads: int, lru_width: int, kernel: int) -> StateCache:
    """The convolution remembers kernel - 1 inputs; the recurrence is always kept in float32."""
    per_head = lru_width // heads
    return StateCache(
        layer,
        (StatePart("conv", heads, per_head * (kernel - 1)), StatePart("recurrent", heads, per_head, "float32")),
    )


def _attention(prefix: str, config: Config, shape: Shape) -> list[TensorSpec]:
    """The output always has a bias, the inputs only where the config says so."""
    *inputs, output = attention_tensors(prefix, shape)
    return [*(with_biases(inputs) if config.flag("attention_bias", False) else inputs), *with_biases([output])]


def _recurrence(prefix: str, shape: Shape, lru_width: int, kernel: int) -> list[TensorSpec]:
    heads = shape.query_heads
    per_head = lru_width // heads
    channels, blocks = Shard(0, ((lru_width, heads),)), Shard(0, ((heads, heads),))
    linears = [
        by_rows(f"{prefix}{name}.weight", lru_width, shape.hidden, heads, "state") for name in ("linear_y", "linear_x")
    ]
    linears.append(by_columns(f"{prefix}linear_out.weight", shape.hidden, lru_width, heads, "state"))
    gates: list[TensorSpec] = []
    for gate in ("input_gate", "recurrent_gate"):
        gates += [
            TensorSpec(f"{prefix}rg_lru.{gate}_weight", (heads, per_head, per_head), blocks, part="state"),
            TensorSpec(f"{prefix}rg_lru.{gate}_bias", (heads, per_head), blocks, part="state"),
        ]
    return [
        *with_biases(linears),
        TensorSpec(f"{prefix}conv_1d.weight", (lru_width, 1, kernel), channels, part="state"),
        TensorSpec(f"{prefix}conv_1d.bias", (lru_width,), channels, part="state"),
        TensorSpec(f"{prefix}rg_lru.recurrent_param", (lru_width,), channels, part="state"),
        *gates,
    ]
