"""Mixtral and MiniMax M2: Llama's attention, experts in every layer. MiniMax norms queries and keys across heads."""

from __future__ import annotations

from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    attention_tensors,
    embeddings,
    even_head_dim,
    experts_per_token,
    model_spec,
    mtp_notes,
    norms,
    read_shape,
    retention,
    separate_experts,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

MINIMAX = "MiniMaxM2ForCausalLM"
ARCHITECTURES = ("MixtralForCausalLM", MINIMAX)


def read(config: Config, name: str) -> ModelSpec:
    is_minimax = config.texts("architectures") == (MINIMAX,)
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    if is_minimax:
        _check_minimax(config, shape.layers)
    kind = SLIDING if config.has("sliding_window") and not is_minimax else FULL
    experts, width = config.integer("num_local_experts"), config.integer("intermediate_size")
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(shape.cache(layer, retention(kind, config)))
        tensors += attention_tensors(f"{prefix}self_attn.", shape)
        if is_minimax:
            tensors += _norms_across_heads(f"{prefix}self_attn.", shape) if config.flag("use_qk_norm", True) else []
            tensors.append(whole(f"{prefix}block_sparse_moe.e_score_correction_bias", experts))
        tensors.append(whole(f"{prefix}block_sparse_moe.gate.weight", experts, shape.hidden))
        tensors += separate_experts(
            f"{prefix}block_sparse_moe.experts.", experts, shape.hidden, width, names=("w1", "w3", "w2")
        )
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="mixtral",
        widest_mlp=experts_per_token(config, experts) * width,
        caches=caches,
        tensors=tensors,
        notes=mtp_notes(config, "num_mtp_modules") if is_minimax and config.flag("use_mtp", True) else (),
    )


def _check_minimax(config: Config, layers: int) -> None:
    """Earlier models of MiniMax have linear attention (0) and shared experts, of which M2 has neither."""
    kinds = config.integers("attn_type_list", layers) or ()
    if set(kinds) - {1}:
        raise ModelError(f"attn_type_list: unknown value {next(k for k in kinds if k != 1)}; known: 1 (full attention)")
    if shared := config.integer("shared_intermediate_size", 0, minimum=0):
        raise ModelError(f"shared_intermediate_size is {shared}; MiniMax M2 is known without shared experts (0)")
    config.choice("qk_norm_type", ("per_layer",))


def _norms_across_heads(prefix: str, shape: Shape) -> list[TensorSpec]:
    heads = {"q_norm": shape.query_heads, "k_norm": shape.kv_heads}
    widths = {name: count * shape.head_dim for name, count in heads.items()}
    return [
        TensorSpec(f"{prefix}{name}.weight", (width,), Shard(0, ((width, heads[name]),)))
        for name, width in widths.items()
    ]
