"""Families with recurrent states as llama.cpp has them: Gated DeltaNet, Mamba-2 and short convolutions.

The converter stores decays as −exp(A_log), puts the value heads of Qwen3.5 in another order, multiplies Falcon-H1's
weights by its multipliers and takes fused weights of Granite apart.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from windowpane.models.config import ModelError
from windowpane.models.gguf import GgufHeader
from windowpane.models.gguf_parts import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA,
    PROJECTIONS,
    TOP,
    Fields,
    GgufFamily,
    expert_sizes,
    granite,
    has_tensor,
    head_dim_of,
    layers_of,
    prefix_of,
    with_experts,
)
from windowpane.models.parts import FULL


@dataclass(frozen=True, slots=True)
class _States:
    """Sizes of layers with a recurrent state, under ggml's names."""

    conv_kernel: int
    state_size: int
    group_count: int
    time_step_rank: int  # heads
    inner_size: int

    @classmethod
    def of(cls, header: GgufHeader) -> _States:
        """All of them: readers of configs would take a class's defaults for what is missing."""
        found = {field.name: header.integer(f"{prefix_of(header)}ssm.{field.name}") for field in fields(cls)}
        if missing := [name for name, value in found.items() if not value or value < 1]:
            raise ModelError(
                f"{header.path.name} has no {', '.join(f'{prefix_of(header)}ssm.{name}' for name in missing)}"
            )
        states = cls(**{name: value for name, value in found.items() if value is not None})
        if states.inner_size % states.time_step_rank:
            raise ModelError(
                f"{header.path.name}: {prefix_of(header)}ssm.inner_size is {states.inner_size}, no multiple of "
                f"ssm.time_step_rank, {states.time_step_rank}"
            )
        return states

    @property
    def head_dim(self) -> int:
        return self.inner_size // self.time_step_rank


def _gated_delta(header: GgufHeader, model_type: str) -> Fields:
    """Sizes of Gated DeltaNet, and of the attention beside it."""
    prefix, states = prefix_of(header), _States.of(header)
    rotated, head_dim = header.integer(f"{prefix}rope.dimension_count"), head_dim_of(header, prefix)
    return {
        "model_type": model_type,
        "full_attention_interval": header.integer(f"{prefix}full_attention_interval"),
        "partial_rotary_factor": rotated / head_dim if rotated and head_dim else None,
        "linear_num_key_heads": states.group_count,
        "linear_num_value_heads": states.time_step_rank,
        "linear_key_head_dim": states.state_size,
        "linear_value_head_dim": states.head_dim,
        "linear_conv_kernel_dim": states.conv_kernel,
        "_windowpane": {"gguf": True},
    }


def _with_shared_expert(header: GgufHeader) -> Fields:
    shared = header.integer(f"{prefix_of(header)}expert_shared_feed_forward_length")
    return {**expert_sizes(header), "norm_topk_prob": True, "shared_expert_intermediate_size": shared}


def _qwen35(header: GgufHeader) -> Fields:
    # The published models keep states in float32, and a file does not say it.
    states: Fields = {"architectures": ["Qwen3_5ForCausalLM"], "mamba_ssm_dtype": "float32"}
    return _gated_delta(header, "qwen3_5_text") | states


def _qwen35moe(header: GgufHeader) -> Fields:
    own: Fields = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    return _qwen35(header) | own | _with_shared_expert(header)


def _qwen3next(header: GgufHeader) -> Fields:
    own: Fields = {"architectures": ["Qwen3NextForCausalLM"]}
    return _gated_delta(header, "qwen3_next") | own | _with_shared_expert(header)


def _mamba(header: GgufHeader, states: _States) -> Fields:
    """Sizes of Mamba-2 under Granite's and Falcon's names."""
    return {
        "mamba_n_heads": states.time_step_rank,
        "mamba_d_head": states.head_dim,
        "mamba_n_groups": states.group_count,
        "mamba_d_state": states.state_size,
        "mamba_d_conv": states.conv_kernel,
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(header, "ssm_in.bias"),
    }


def _granite_hybrid(header: GgufHeader) -> Fields:
    prefix, hidden, states = prefix_of(header), header.integer("granitehybrid.embedding_length"), _States.of(header)
    shared = header.integer(f"{prefix}expert_shared_feed_forward_length")
    kv_heads = header.integers(f"{prefix}attention.head_count_kv")
    return {
        **granite(header),
        **_mamba(header, states),
        **expert_sizes(header),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if header.flag(f"{prefix}rope.scaling.finetuned", True) else "nope",
        "mamba_expand": states.inner_size // hidden if hidden else None,
        "num_local_experts": header.integer(f"{prefix}expert_count") or 0,
        "shared_intermediate_size": shared or header.integer(f"{prefix}feed_forward_length"),
        "_windowpane": {"gguf": True},
    }


def _falcon_h1(header: GgufHeader) -> Fields:
    # The converter multiplies weights by all of the config's multipliers.
    states = _States.of(header)
    return {
        **_mamba(header, states),
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": states.inner_size,
        "mamba_rms_norm": has_tensor(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_tensor(header, "ssm_out.bias"),
        "mlp_bias": has_tensor(header, "ffn_up.bias"),
    }


def _nemotron_h(header: GgufHeader) -> Fields:
    prefix, states = prefix_of(header), _States.of(header)
    return {
        **expert_sizes(header),
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": _nemotron_kinds(header),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": states.time_step_rank,
        "mamba_head_dim": states.head_dim,
        "n_groups": states.group_count,
        "ssm_state_size": states.state_size,
        "conv_kernel": states.conv_kernel,
        "use_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "use_bias": has_tensor(header, "ssm_in.bias"),
        "mlp_bias": has_tensor(header, "ffn_up.bias"),
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "n_routed_experts": header.integer(f"{prefix}expert_count"),
        "moe_shared_expert_intermediate_size": header.integer(f"{prefix}expert_shared_feed_forward_length"),
        "moe_latent_size": header.integer(f"{prefix}moe_latent_size"),
        "norm_topk_prob": header.flag(f"{prefix}expert_weights_norm", True),
        "routed_scaling_factor": header.number(f"{prefix}expert_weights_scale"),
        "n_group": header.integer(f"{prefix}expert_group_count"),
        "topk_group": header.integer(f"{prefix}expert_group_used_count"),
    }


def _nemotron_kinds(header: GgufHeader) -> list[str]:
    """Layers are told apart by how many KV heads they have, and how wide their MLPs are."""
    prefix, layers = prefix_of(header), layers_of(header) or 0
    kv_heads, widths = (header.integers(f"{prefix}{key}") for key in ("attention.head_count_kv", "feed_forward_length"))
    if min(len(kv_heads), len(widths)) < layers:
        raise ModelError(
            f"{header.path.name}: {prefix}attention.head_count_kv and feed_forward_length must have a number for each "
            f"of {layers} layers"
        )
    kinds = []
    for layer in range(layers):
        if kv_heads[layer]:
            kinds.append("attention")
        elif not widths[layer]:
            kinds.append("mamba")
        else:
            kinds.append("moe" if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors else "mlp")
    return kinds


def _lfm2(header: GgufHeader) -> Fields:
    kv_heads = header.integers(f"{prefix_of(header)}attention.head_count_kv")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": header.number(f"{prefix_of(header)}attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else "conv" for count in kv_heads],
        "conv_L_cache": header.integer(f"{prefix_of(header)}shortconv.l_cache"),
        "conv_bias": has_tensor(header, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,  # the file has the width that comes of it
    }


def _lfm2moe(header: GgufHeader) -> Fields:
    return {
        **_lfm2(header),
        **expert_sizes(header),
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": header.integer("lfm2moe.leading_dense_block_count"),
        "use_expert_bias": has_tensor(header, "exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


# -- names ---------------------------------------------------------------------------------------------------------

_LFM2 = {
    **ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}


def _ssm(prefix: str) -> dict[str, str]:
    """What layers with a recurrent state have."""
    names = {"conv1d": "conv1d", "a": "A_log", "dt.bias": "dt_bias", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{theirs}": f"{prefix}.{name}" for theirs, name in names.items()}


def _mamba_2(prefix: str) -> dict[str, str]:
    return {**_ssm(prefix), "ssm_in": f"{prefix}.in_proj", "ssm_d": f"{prefix}.D"}


_GATED_DELTA = {
    **LLAMA,
    **HEAD_NORMS,
    **_ssm("linear_attn"),
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "post_attention_norm": "post_attention_layernorm",
}
_SHARED_EXPERT = {
    **with_experts("mlp", "gate", *PROJECTIONS),
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GRANITE_HYBRID = {
    **LLAMA,
    **_mamba_2("mamba"),
    **with_experts("block_sparse_moe", "router.layer", *PROJECTIONS),
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for end in ("", "_shexp")},
}
_FALCON_H1 = {
    **LLAMA,
    **_mamba_2("mamba"),
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),  # llama.cpp leaves the last part out
}
_NEMOTRON_H = {
    **{part: name.replace("self_attn", "mixer") for part, name in ATTENTION.items()},
    **_mamba_2("mixer"),
    **with_experts("mixer", "gate", *PROJECTIONS),
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "attn_norm": "norm",
}
_NEMOTRON_H_TOP = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_LFM2_TOP = {**TOP, "token_embd_norm.weight": "model.embedding_norm.weight"}
_NEMOTRON = GgufFamily(_nemotron_h, _NEMOTRON_H, _NEMOTRON_H_TOP, layers="backbone.layers.")
STATE_FAMILIES = {
    "falcon-h1": GgufFamily(_falcon_h1, _FALCON_H1, {**TOP, "output_norm.weight": "model.final_layernorm.weight"}),
    "granitehybrid": GgufFamily(_granite_hybrid, _GRANITE_HYBRID, TOP, interleaved=True),
    "lfm2": GgufFamily(_lfm2, _LFM2, _LFM2_TOP),
    "lfm2moe": GgufFamily(
        _lfm2moe,
        {
            **_LFM2,
            **with_experts("feed_forward", "gate", "w1", "w3", "w2"),
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        _LFM2_TOP,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": GgufFamily(_qwen35, _GATED_DELTA, TOP, adds_one=True),
    "qwen35moe": GgufFamily(_qwen35moe, {**_GATED_DELTA, **_SHARED_EXPERT}, TOP, adds_one=True),
    "qwen3next": GgufFamily(_qwen3next, {**_GATED_DELTA, **_SHARED_EXPERT}, TOP, adds_one=True),
}  # fmt: skip
