"""Mixtral and MiniMax M2: Llama's attention, experts in every layer. MiniMax norms queries and keys across heads."""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.blocks import SIGMOID, Norm, Router
from windowpane.models.building import Norms, attention, decoder, described_spec, experts
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    even_head_dim,
    experts_per_token,
    mtp_notes,
    read_shape,
    retention,
    separate_experts,
    whole,
)
from windowpane.models.rope import read_rope
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
    count, width = config.integer("num_local_experts"), config.integer("intermediate_size")
    block_norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6 if is_minimax else 1e-5))
    partial = config.integer("rotary_dim", shape.head_dim) / shape.head_dim if is_minimax else None
    rope = read_rope(config, shape.head_dim, shape.max_position, 5e6 if is_minimax else 1e6, partial)
    layers = []
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        mixer = attention(f"{at}self_attn.", shape, shape.cache(layer, retention(kind, config)), rope=rope)
        if is_minimax and config.flag("use_qk_norm", True):
            q_norm, k_norm = _norms_across_heads(f"{at}self_attn.", shape, block_norms.eps)
            mixer = replace(mixer, q_norm=q_norm, k_norm=k_norm)
        router = _router(config, f"{at}block_sparse_moe.", count, shape.hidden, is_minimax)
        tensors = separate_experts(
            f"{at}block_sparse_moe.experts.", count, shape.hidden, width, names=("w1", "w3", "w2")
        )
        activation = config.text("hidden_act") or "silu"
        layers.append(block_norms.pre(at, mixer, experts(layer, router, tensors, activation)))
    described = decoder("model.", shape, layers, block_norms("model.norm"))
    notes = mtp_notes(config, "num_mtp_modules") if is_minimax and config.flag("use_mtp", True) else ()
    return described_spec(config, config, shape, name=name, family="mixtral", decoder=described, notes=notes)


def _router(config: Config, at: str, count: int, hidden: int, is_minimax: bool) -> Router:
    weight, chosen = whole(f"{at}gate.weight", count, hidden), experts_per_token(config, count)
    if not is_minimax:
        return Router(weight, chosen, renormalizes=True)
    correction = whole(f"{at}e_score_correction_bias", count, dtype="float32")
    return Router(weight, chosen, SIGMOID, correction=correction, renormalizes=True)


def _check_minimax(config: Config, layers: int) -> None:
    """Earlier models of MiniMax have linear attention (0) and shared experts, of which M2 has neither."""
    kinds = config.integers("attn_type_list", layers) or ()
    if set(kinds) - {1}:
        raise ModelError(f"attn_type_list: unknown value {next(k for k in kinds if k != 1)}; known: 1 (full attention)")
    if shared := config.integer("shared_intermediate_size", 0, minimum=0):
        raise ModelError(f"shared_intermediate_size is {shared}; MiniMax M2 is known without shared experts (0)")
    config.choice("qk_norm_type", ("per_layer",))
    config.choice("scoring_func", ("sigmoid",))


def _norms_across_heads(prefix: str, shape: Shape, eps: float) -> list[Norm]:
    heads = {"q_norm": shape.query_heads, "k_norm": shape.kv_heads}
    widths = {name: count * shape.head_dim for name, count in heads.items()}
    return [
        Norm(eps, TensorSpec(f"{prefix}{name}.weight", (width,), Shard(0, ((width, heads[name]),))), across_heads=True)
        for name, width in widths.items()
    ]
