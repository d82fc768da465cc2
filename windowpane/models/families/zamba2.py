"""Zamba2: Mamba-2 everywhere, and on some layers first one of a few shared attention blocks, used in turn.

The blocks share weights (each use has small adapters of its own), but every use keeps its own K and V.
"""

from __future__ import annotations

from windowpane.kv.caches import StateCache, TokenCache
from windowpane.kv.retention import Full
from windowpane.models.blocks import tensors_of
from windowpane.models.config import Config, ModelError
from windowpane.models.families.mamba import Mamba, read_heads
from windowpane.models.parts import (
    LINEAR,
    Shape,
    by_columns,
    by_rows,
    embeddings,
    fused_mlp_tensors,
    model_spec,
    norms,
    read_shape,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("Zamba2ForCausalLM",)

HYBRID = "hybrid"
BLOCK_TYPES = {"mamba": LINEAR, LINEAR: LINEAR, HYBRID: HYBRID}


def read(config: Config, name: str) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    # Attention sees the hidden state and the embedding side by side, and is twice as wide.
    defaults = {"num_key_value_heads": heads, "head_dim": 2 * hidden // heads}
    shape = read_shape(config, config, tied=True, defaults=defaults)
    hybrid = _hybrid_layers(config, shape.layers)
    mamba = _mamba(config, hidden)
    bias = config.flag("add_bias_linear", False)
    width = config.integer("intermediate_size", 4 * hidden)
    blocks = config.integer("num_mem_blocks", 1)
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = own = f"model.layers.{layer}."
        if layer in hybrid:
            use = hybrid.index(layer)
            caches.append(shape.cache(layer, Full()))
            tensors.append(whole(f"{prefix}linear.weight", hidden, hidden, part="attention", linear=True))
            own = f"{prefix}mamba_decoder."
            if use < blocks:  # later uses are the same tensors
                uses = range(use, len(hybrid), blocks)
                tensors += _shared_block(f"{prefix}shared_transformer.", config, shape, width, uses)
        caches.append(mamba.cache(layer))
        mixer = mamba.mixer(f"{own}mamba.", hidden, layer, 1e-5, in_bias=bias, out_bias=bias)
        tensors += tensors_of(mixer).values()
        tensors += norms(own, ("input_layernorm",), hidden)
    tensors += norms("model.", ("final_layernorm",), hidden)
    return model_spec(
        config, config, shape, name=name, family="zamba2", widest_mlp=width, caches=caches, tensors=tensors
    )


def _hybrid_layers(config: Config, layers: int) -> list[int]:
    kinds = config.texts("layers_block_type")
    if kinds is None:
        raise ModelError("the config has no layers_block_type, so it is unknown which layers have attention")
    if len(kinds) != layers:
        raise ModelError(f"layers_block_type has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in BLOCK_TYPES:
            raise config.unknown_value("layers_block_type", kind, BLOCK_TYPES)
    return [layer for layer, kind in enumerate(kinds) if kind == HYBRID]


def _mamba(config: Config, hidden: int) -> Mamba:
    heads, groups = read_heads(config, "n_mamba_heads", "mamba_ngroups", 1)
    return Mamba(
        heads=heads,
        head_dim=config.integer("mamba_expand", 2) * hidden // heads,
        groups=groups,
        state=config.integer("mamba_d_state", 64),
        kernel=config.integer("mamba_d_conv", 4, minimum=2),
        state_dtype=config.dtype("mamba_ssm_cache_dtype"),
    )


def _shared_block(prefix: str, config: Config, shape: Shape, width: int, uses: range) -> list[TensorSpec]:
    """One block, with adapters for those uses of any block that are its own."""
    both = 2 * shape.hidden
    rank = config.integer("adapter_rank", 128)
    queries = shape.query_heads * shape.head_dim
    heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    attends = f"{prefix}self_attn."
    tensors = [
        by_rows(f"{attends}{name}_proj.weight", count * shape.head_dim, both, count, "attention")
        for name, count in heads.items()
    ]
    tensors.append(by_columns(f"{attends}o_proj.weight", shape.hidden, queries, shape.query_heads, "attention"))
    if config.flag("use_shared_attention_adapter", False):
        for name, count in heads.items():
            for use in uses:
                tensors += _adapter(f"{attends}linear_{name}_adapter_list.{use}.", both, rank, both, count, "attention")
    forward = f"{prefix}feed_forward."
    tensors += fused_mlp_tensors(forward, shape.hidden, width, bias=config.flag("add_bias_linear", False))
    for use in uses:
        adapter = f"{forward}gate_up_proj_adapter_list.{use}."
        tensors += _adapter(adapter, shape.hidden, rank, 2 * width, 2 * width, "mlp")
    return [*tensors, *norms(prefix, ("input_layernorm",), both), *norms(prefix, ("pre_ff_layernorm",), shape.hidden)]


def _adapter(prefix: str, columns: int, rank: int, rows: int, units: int, part: str) -> list[TensorSpec]:
    return [
        whole(f"{prefix}0.weight", rank, columns, part=part, linear=True),
        by_rows(f"{prefix}1.weight", rows, rank, units, part),
    ]
