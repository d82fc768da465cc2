"""MiniMax M3: grouped attention, block-sparse on most layers with an index key per token, and experts."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config
from windowpane.models.families import towers
from windowpane.models.families.mla import latent_cache
from windowpane.models.parts import (
    FULL,
    attention_tensors,
    embeddings,
    experts_per_token,
    listed_sparse,
    mlp_tensors,
    model_spec,
    mtp_notes,
    norms,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration",)

SPARSE = "minimax_m3_sparse"
PREFIX = "language_model.model."


def read(config: Config, name: str) -> ModelSpec:
    text = config.section("text_config")
    shape = read_shape(config, text, tied=False, defaults={"max_position_embeddings": 524_288})
    kinds = _kinds(text, shape.layers)
    sparse = listed_sparse(text, shape.layers)
    if sparse is None:
        flags = text.integers("moe_layer_freq", shape.layers) or (1,) * shape.layers
        sparse = frozenset(layer for layer, flag in enumerate(flags) if flag)
    width = text.integer("intermediate_size")
    index_heads, index_dim = _indexer_sizes(text)
    caches: list[TokenCache] = []
    tensors: list[TensorSpec] = embeddings(PREFIX, shape, head="language_model.lm_head.weight")
    for layer, kind in enumerate(kinds):
        prefix = f"{PREFIX}layers.{layer}."
        # Which blocks are read changes with every token, so a sparse layer keeps them all.
        caches.append(shape.cache(layer, Full()))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, qk_norm=True)
        if kind == SPARSE:
            caches.append(latent_cache(layer, index_dim))
            tensors += _indexer(f"{prefix}self_attn.index_", shape.hidden, index_heads, index_dim)
        if layer in sparse:
            tensors += _experts(f"{prefix}block_sparse_moe.", text, shape.hidden, width)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, text.integer("dense_intermediate_size"))
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms(PREFIX, ("norm",), shape.hidden)
    if config.has("vision_config"):
        tensors += towers.minimax_m3(config, shape.hidden)
    routed = experts_per_token(text, text.integer("num_local_experts")) * width + _shared_width(text)
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family="minimax_m3",
        widest_mlp=max(routed, 0 if len(sparse) == shape.layers else text.integer("dense_intermediate_size")),
        caches=caches,
        tensors=tensors,
        notes=mtp_notes(text, "num_mtp_modules"),
    )


def _kinds(text: Config, layers: int) -> tuple[str, ...]:
    rule = [FULL] * layers
    if text.has("sparse_attention_config"):
        sparse = text.section("sparse_attention_config").integers("sparse_attention_freq", layers)
        rule = [SPARSE if flag else FULL for flag in sparse or ()] or rule
    return text.layer_types(layers, (FULL, SPARSE), rule)


def _indexer_sizes(text: Config) -> tuple[int, int]:
    """(heads, width); older configs nest them under other names."""
    if not text.has("sparse_attention_config"):
        return text.integer("index_n_heads", 4), text.integer("index_head_dim", 128)
    sparse = text.section("sparse_attention_config")
    return sparse.integer("sparse_num_index_heads", 4), sparse.integer("sparse_index_dim", 128)


def _indexer(prefix: str, hidden: int, heads: int, width: int) -> list[TensorSpec]:
    """It picks the blocks that attention reads, so every rank runs it whole."""
    return [
        whole(f"{prefix}q_proj.weight", heads * width, hidden, part="attention", linear=True),
        whole(f"{prefix}k_proj.weight", width, hidden, part="attention", linear=True),
        *norms(prefix, ("q_norm", "k_norm"), width),
    ]


def _shared_width(text: Config) -> int:
    return text.integer("n_shared_experts", 1) * text.integer("shared_intermediate_size")


def _experts(prefix: str, text: Config, hidden: int, width: int) -> list[TensorSpec]:
    experts = text.integer("num_local_experts")
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        whole(f"{prefix}e_score_correction_bias", experts),
        *separate_experts(f"{prefix}experts.", experts, hidden, width, names=("w1", "w3", "w2")),
        *mlp_tensors(f"{prefix}shared_experts.", hidden, _shared_width(text)),
    ]
