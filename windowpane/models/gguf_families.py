"""llama.cpp's architectures as Hugging Face models: the config that a GGUF header amounts to, and names of tensors.

An architecture is one `GgufFamily`. What its converter changed in the weights themselves is said here and undone by
`windowpane.weights.gguf`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import isclose, pi, prod

from windowpane.models.config import ModelError, every
from windowpane.models.ggml import F32, StoredTypes
from windowpane.models.gguf import GgufHeader, GgufTensor, shortest
from windowpane.models.parts import FULL, SLIDING

Fields = dict[str, object]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """`config` gives the fields that are not `_common`; `blocks` has the Hugging Face names of a layer's tensors by
    ggml's, with or without their last part, and `top` those of the others. `{}` stands for an expert's number.

    `layers` is what Hugging Face's names of a layer's tensors begin with. `adds_one`: norms are stored as 1 + w, but
    for those of what a recurrent state gives. `interleaved`: ggml rotates neighbouring rows of queries and keys,
    Hugging Face rows half a head apart.
    """

    config: Callable[[GgufHeader], Fields]
    blocks: Mapping[str, str]
    top: Mapping[str, str]
    adds_one: bool = False
    interleaved: bool = False
    layers: str = "model.layers."

    def hf_name(self, name: str) -> str:
        """ggml's own name for a tensor that the family does not have: it is then unexpected."""
        block = _BLOCK_NAME.fullmatch(name)
        if block is None:
            return self.top.get(name, name)
        number, part = block.groups()
        stem, _, kind = part.rpartition(".")
        known = self.blocks.get(part) or (f"{self.blocks[stem]}.{kind}" if stem in self.blocks else None)
        return name if known is None else f"{self.layers}{number}.{known}"


_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")


def family_of(header: GgufHeader) -> GgufFamily:
    architecture = header.text("general.architecture") or ""
    found = _FAMILIES.get(architecture)
    if found is None:
        names = ", ".join(sorted(_FAMILIES))
        raise ModelError(
            f"{header.path.name}: GGUF files of architecture {architecture!r} are not read; those that are: {names}"
        )
    return _MIXTRAL if architecture == "llama" and "blk.0.ffn_gate_inp.weight" in header.tensors else found


def hf_config(header: GgufHeader) -> Fields:
    """The Hugging Face config.json that this file amounts to, with every field the model code reads."""
    family = family_of(header)
    # What the file leaves out stays out, so that the family's reader names what is missing.
    config = {key: value for key, value in (_common(header) | family.config(header)).items() if value is not None}
    if "num_attention_heads" in config and "num_key_value_heads" not in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def tensors_by_hf_name(header: GgufHeader) -> dict[str, GgufTensor]:
    """The tensors that are loaded, by their Hugging Face names; those of all experts are one, with `{}` in its name."""
    family, layers = family_of(header), _layers(header)
    tensors = [t for t in header.tensors.values() if t.name not in _SKIPPED and not _is_behind(t.name, layers)]
    return {name: _in_hf_axes(name, t) for name, t in ((family.hf_name(t.name), t) for t in tensors)}


# Made anew from the config, so not loaded.
_SKIPPED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CONVOLUTION = re.compile(r"\.conv(1d)?\.weight$")
# The converter gives these an axis more: of length 1, or one for groups of heads.
_VECTOR = re.compile(r"\.(A_log|D|(mamba|mixer)\.norm\.weight)$")


def _layers(header: GgufHeader) -> int | None:
    """Without those behind the model that draft."""
    prefix = _prefix(header)
    blocks = header.integer(f"{prefix}block_count")
    return None if blocks is None else blocks - (header.integer(f"{prefix}nextn_predict_layers") or 0)


def _is_behind(name: str, layers: int | None) -> bool:
    """Whether a tensor is of a layer that drafts, which is not loaded."""
    block = _BLOCK_NAME.fullmatch(name)
    return block is not None and layers is not None and int(block[1]) >= layers


def _in_hf_axes(name: str, tensor: GgufTensor) -> GgufTensor:
    if _CONVOLUTION.search(name):  # the converter takes an axis of length 1 out
        return replace(tensor, shape=(tensor.shape[0], 1, *tensor.shape[1:]))
    if name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return replace(tensor, shape=(prod(tensor.shape),)) if _VECTOR.search(name) else tensor


def stored_types(header: GgufHeader) -> StoredTypes | None:
    """The types of this file's matrices; None where all are float32."""
    return StoredTypes.of({name: (t.shape, t.kind) for name, t in tensors_by_hf_name(header).items()})


# -- configs -------------------------------------------------------------------------------------------------------


def _common(header: GgufHeader) -> Fields:
    prefix = _prefix(header)
    embedding = header.tensors.get("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0] if embedding else header.integer(f"{prefix}vocab_size"),
        "hidden_size": header.integer(f"{prefix}embedding_length"),
        "intermediate_size": _one_number(header, f"{prefix}feed_forward_length"),
        "num_hidden_layers": _layers(header),
        "num_attention_heads": _one_number(header, f"{prefix}attention.head_count"),
        "num_key_value_heads": _one_number(header, f"{prefix}attention.head_count_kv"),
        "head_dim": _head_dim(header, prefix),
        "max_position_embeddings": header.integer(f"{prefix}context_length"),
        "rms_norm_eps": header.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{prefix}rope.freq_base"),
        "rope_scaling": _rope_scaling(header, prefix),
        "hidden_act": "silu",
        # A file without an output matrix uses the embedding.
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
        # Quantized files do not say what they were made from; models of these families are published in bfloat16.
        "torch_dtype": _FILE_DTYPES.get(header.integer("general.file_type"), "bfloat16"),
    }


# ggml's numbers of files that are not quantized.
_FILE_DTYPES: dict[int | None, str] = {0: "float32", 1: "float16"}


def _prefix(header: GgufHeader) -> str:
    return f"{header.text('general.architecture')}."


def _one_number(header: GgufHeader, key: str) -> int | None:
    """One number for all layers, or one for each: layers that have none of it have 0."""
    if not isinstance(header.metadata.get(key), list):
        return header.integer(key)
    counts = set(header.integers(key)) - {0}
    if len(counts) != 1:
        raise ModelError(f"{header.path.name}: {key} must be one number but for zeros, not {sorted(counts)}")
    return counts.pop()


def _head_dim(header: GgufHeader, prefix: str) -> int | None:
    return header.integer(f"{prefix}attention.key_length") or _even_head_dim(header, prefix)


def _even_head_dim(header: GgufHeader, prefix: str) -> int | None:
    heads = _one_number(header, f"{prefix}attention.head_count")
    hidden = header.integer(f"{prefix}embedding_length")
    return hidden // heads if hidden and heads else None


def _rope_scaling(header: GgufHeader, prefix: str) -> Fields | None:
    known = ("linear", "yarn")
    key = f"{prefix}rope.scaling."
    kind = header.text(f"{key}type")
    if kind in (None, "none", "longrope"):  # the last comes with tensors
        return None
    if kind not in known:
        raise ModelError(f"{header.path.name}: {key}type: unknown value {kind!r}; known: {', '.join(known)}, none")
    fields: Fields = {"rope_type": kind, "factor": header.number(f"{key}factor")}
    if kind == "yarn":
        betas = {name: header.number(f"{key}yarn_{name}") for name in ("beta_fast", "beta_slow")}
        fields |= {"original_max_position_embeddings": header.integer(f"{key}original_context_length"), **betas}
    return {name: value for name, value in fields.items() if value is not None}


def _whole_heads_rotate(header: GgufHeader, family: str) -> None:
    prefix = _prefix(header)
    rotated, head_dim = header.integer(f"{prefix}rope.dimension_count"), _head_dim(header, prefix)
    if rotated is not None and rotated != head_dim:
        raise ModelError(
            f"{header.path.name} rotates {rotated} of {head_dim} dimensions per head; {family} rotates all of them"
        )


def _experts(header: GgufHeader) -> Fields:
    """Under all names that families have for them."""
    prefix = _prefix(header)
    count = header.integer(f"{prefix}expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": header.integer(f"{prefix}expert_used_count"),
        "moe_intermediate_size": header.integer(f"{prefix}expert_feed_forward_length"),
    }


def _gemma2(header: GgufHeader) -> Fields:
    # Queries are scaled by the head size, but for the 27B model (46 layers), which takes hidden / heads.
    is_27b = header.integer("gemma2.block_count") == 46
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.integer("gemma2.attention.sliding_window"),
        "rope_theta": header.number("gemma2.rope.freq_base") or 10_000.0,
        "query_pre_attn_scalar": (_even_head_dim if is_27b else _head_dim)(header, "gemma2."),
        "attn_logit_softcapping": header.number("gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": header.number("gemma2.final_logit_softcapping"),
    }


def _gemma3(header: GgufHeader) -> Fields:
    layers = header.integer("gemma3.block_count") or 0
    # llama.cpp fixes what the file does not say: every sixth layer is full, sliding layers rotate with base 10,000.
    interval = header.integer("gemma3.attention.sliding_window_pattern") or 6
    # Queries are scaled by the head size, but for the 27B model (62 layers), which takes hidden / heads.
    scalar = _even_head_dim(header, "gemma3.") if layers == 62 else _head_dim(header, "gemma3.")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": interval,
        "layer_types": list(every(interval, FULL, SLIDING, layers)),
        "rope_theta": header.number("gemma3.rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": header.number("gemma3.rope.freq_base_swa") or 10_000.0,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": header.number("gemma3.final_logit_softcapping"),
    }


def _llama(header: GgufHeader) -> Fields:
    _whole_heads_rotate(header, "Llama")
    theta = header.number("llama.rope.freq_base") or 10_000.0
    scaling = _llama3_scaling(header, theta) if "rope_freqs.weight" in header.tensors else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": theta,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    } | ({"rope_scaling": scaling} if scaling else {})


def _mixtral(header: GgufHeader) -> Fields:
    return _llama(header) | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | _experts(header)


def _smollm3(header: GgufHeader) -> Fields:
    # llama.cpp fixes what the file does not say: every fourth layer does not rotate.
    return {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4}


def _granite(header: GgufHeader) -> Fields:
    prefix = _prefix(header)
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "attention_multiplier": header.number(f"{prefix}attention.scale"),
        "embedding_multiplier": header.number(f"{prefix}embedding_scale"),
        "residual_multiplier": header.number(f"{prefix}residual_scale"),
        "logits_scaling": header.number(f"{prefix}logit_scale"),
    }


def _qwen2(header: GgufHeader) -> Fields:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(header: GgufHeader) -> Fields:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _qwen3moe(header: GgufHeader) -> Fields:
    # llama.cpp renormalises the shares of chosen experts, as every published model of this family asks for.
    own: Fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    return own | _experts(header)


def _gpt_oss(header: GgufHeader) -> Fields:
    scaling = _rope_scaling(header, "gpt-oss.")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": header.integer("gpt-oss.attention.sliding_window"),
        # The published models ask for it, and a file does not say it.
        "rope_scaling": scaling and scaling | {"truncate": False},
        "_windowpane": {"gguf": True},
    } | _experts(header)


def _phi3(header: GgufHeader) -> Fields:
    rotated, head_dim = header.integer("phi3.rope.dimension_count"), _head_dim(header, "phi3.")
    original = header.integer("phi3.rope.scaling.original_context_length")
    scaling: Fields | None = None
    if "rope_factors_long.weight" in header.tensors:
        kinds = ("short", "long")
        scaling = {f"{kind}_factor": list(_floats(header, f"rope_factors_{kind}.weight")) for kind in kinds}
        scaling |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        if (factor := header.number("phi3.rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = factor
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": header.integer("phi3.attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / head_dim if rotated and head_dim else None,
        "rope_scaling": scaling,
    }


def _lfm2(header: GgufHeader) -> Fields:
    kv_heads = header.integers(f"{_prefix(header)}attention.head_count_kv")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": header.number(f"{_prefix(header)}attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else "conv" for count in kv_heads],
        "conv_L_cache": header.integer(f"{_prefix(header)}shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.tensors),
        "block_auto_adjust_ff_dim": False,  # the file has the width that comes of it
    }


def _lfm2moe(header: GgufHeader) -> Fields:
    return {
        **_lfm2(header),
        **_experts(header),
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": header.integer("lfm2moe.leading_dense_block_count"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in header.tensors),
        "norm_topk_prob": True,
    }


def _has(header: GgufHeader, part: str) -> bool:
    """Whether some layer has this tensor."""
    return any(name.endswith(f".{part}") for name in header.tensors)


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
        found = {field.name: header.integer(f"{_prefix(header)}ssm.{field.name}") for field in fields(cls)}
        if missing := [name for name, value in found.items() if not value or value < 1]:
            raise ModelError(
                f"{header.path.name} has no {', '.join(f'{_prefix(header)}ssm.{name}' for name in missing)}"
            )
        states = cls(**{name: value for name, value in found.items() if value is not None})
        if states.inner_size % states.time_step_rank:
            raise ModelError(
                f"{header.path.name}: {_prefix(header)}ssm.inner_size is {states.inner_size}, no multiple of "
                f"ssm.time_step_rank, {states.time_step_rank}"
            )
        return states

    @property
    def head_dim(self) -> int:
        return self.inner_size // self.time_step_rank


def _gated_delta(header: GgufHeader, model_type: str) -> Fields:
    """Sizes of Gated DeltaNet, and of the attention beside it."""
    prefix, states = _prefix(header), _States.of(header)
    rotated, head_dim = header.integer(f"{prefix}rope.dimension_count"), _head_dim(header, prefix)
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
    shared = header.integer(f"{_prefix(header)}expert_shared_feed_forward_length")
    return {**_experts(header), "norm_topk_prob": True, "shared_expert_intermediate_size": shared}


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
        "mamba_conv_bias": _has(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(header, "ssm_in.bias"),
    }


def _granite_hybrid(header: GgufHeader) -> Fields:
    prefix, hidden, states = _prefix(header), header.integer("granitehybrid.embedding_length"), _States.of(header)
    shared = header.integer(f"{prefix}expert_shared_feed_forward_length")
    kv_heads = header.integers(f"{prefix}attention.head_count_kv")
    return {
        **_granite(header),
        **_mamba(header, states),
        **_experts(header),
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
        "mamba_rms_norm": _has(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has(header, "ssm_out.bias"),
        "mlp_bias": _has(header, "ffn_up.bias"),
    }


def _nemotron_h(header: GgufHeader) -> Fields:
    prefix, states = _prefix(header), _States.of(header)
    return {
        **_experts(header),
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": _nemotron_kinds(header),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": states.time_step_rank,
        "mamba_head_dim": states.head_dim,
        "n_groups": states.group_count,
        "ssm_state_size": states.state_size,
        "conv_kernel": states.conv_kernel,
        "use_conv_bias": _has(header, "ssm_conv1d.bias"),
        "use_bias": _has(header, "ssm_in.bias"),
        "mlp_bias": _has(header, "ffn_up.bias"),
        "attention_bias": _has(header, "attn_q.bias"),
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
    prefix, layers = _prefix(header), _layers(header) or 0
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


def _llama3_scaling(header: GgufHeader, theta: float) -> Fields:
    """Llama 3's long-context scaling, which GGUF stores as one factor per frequency instead of its parameters.

    Published models differ in `factor` alone, the largest of the stored values; the rest is checked to be theirs.
    """
    stored = _floats(header, "rope_freqs.weight")
    factor = max(stored)
    for index, value in enumerate(stored):
        wavelength = 2 * pi * theta ** (index / len(stored))
        # 1 below 2,048 tokens, `factor` above 8,192, and in between smoothly from one to the other.
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1) / 3))
        if factor < 1 or not isclose(value * ((1 - smooth) / factor + smooth), 1.0, rel_tol=1e-4):
            raise ModelError(
                f"{header.path.name} scales rotary frequencies (rope_freqs.weight) in another way than Llama 3 does; "
                "use the model's Hugging Face directory"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _floats(header: GgufHeader, name: str) -> tuple[float, ...]:
    """A short vector, which ggml always stores as float32."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.kind != F32 or len(tensor.shape) != 1:
        raise ModelError(f"{header.path.name} has no {name} of float32; fetch it again")
    if tensor.offset + 4 * tensor.shape[0] > tensor.file.stat().st_size:
        raise ModelError(f"{header.path.name} is cut short: {name} passes its end; fetch it again")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(4 * tensor.shape[0])
    return tuple(shortest(value) for value in struct.unpack(f"<{tensor.shape[0]}f", data))


# -- names ---------------------------------------------------------------------------------------------------------

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_GEMMA2 = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2 = {
    **_ATTENTION,
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


def _with_experts(prefix: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    return {f"ffn_{part}_exps": f"{prefix}.experts.{{}}.{name}" for part, name in names.items()} | {
        "ffn_gate_inp": f"{prefix}.{router}"
    }


_PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def _ssm(prefix: str) -> dict[str, str]:
    """What layers with a recurrent state have."""
    names = {"conv1d": "conv1d", "a": "A_log", "dt.bias": "dt_bias", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{theirs}": f"{prefix}.{name}" for theirs, name in names.items()}


def _mamba_2(prefix: str) -> dict[str, str]:
    return {**_ssm(prefix), "ssm_in": f"{prefix}.in_proj", "ssm_d": f"{prefix}.D"}


_GATED_DELTA = {
    **_LLAMA,
    **_HEAD_NORMS,
    **_ssm("linear_attn"),
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "post_attention_norm": "post_attention_layernorm",
}
_SHARED_EXPERT = {
    **_with_experts("mlp", "gate", *_PROJECTIONS),
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GRANITE_HYBRID = {
    **_LLAMA,
    **_mamba_2("mamba"),
    **_with_experts("block_sparse_moe", "router.layer", *_PROJECTIONS),
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for end in ("", "_shexp")},
}
_FALCON_H1 = {
    **_LLAMA,
    **_mamba_2("mamba"),
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),  # llama.cpp leaves the last part out
}
_NEMOTRON_H = {
    **{part: name.replace("self_attn", "mixer") for part, name in _ATTENTION.items()},
    **_mamba_2("mixer"),
    **_with_experts("mixer", "gate", *_PROJECTIONS),
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
_LFM2_TOP = {**_TOP, "token_embd_norm.weight": "model.embedding_norm.weight"}
_MIXTRAL = GgufFamily(
    _mixtral, {**_LLAMA, **_with_experts("block_sparse_moe", "gate", "w1", "w3", "w2")}, _TOP, interleaved=True
)
_NEMOTRON = GgufFamily(_nemotron_h, _NEMOTRON_H, _NEMOTRON_H_TOP, layers="backbone.layers.")
_FAMILIES = {
    "falcon-h1": GgufFamily(_falcon_h1, _FALCON_H1, {**_TOP, "output_norm.weight": "model.final_layernorm.weight"}),
    "gemma2": GgufFamily(_gemma2, _GEMMA2, _TOP, adds_one=True),
    "gemma3": GgufFamily(_gemma3, {**_GEMMA2, **_HEAD_NORMS}, _TOP, adds_one=True),
    "gpt-oss": GgufFamily(
        _gpt_oss,
        {
            **_ATTENTION,
            **_with_experts("mlp", "router", *_PROJECTIONS),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        _TOP,
    ),
    "granite": GgufFamily(_granite, _LLAMA, _TOP, interleaved=True),
    "granitehybrid": GgufFamily(_granite_hybrid, _GRANITE_HYBRID, _TOP, interleaved=True),
    "lfm2": GgufFamily(_lfm2, _LFM2, _LFM2_TOP),
    "lfm2moe": GgufFamily(
        _lfm2moe,
        {
            **_LFM2,
            **_with_experts("feed_forward", "gate", "w1", "w3", "w2"),
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        _LFM2_TOP,
    ),
    "llama": GgufFamily(_llama, _LLAMA, _TOP, interleaved=True),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "phi3": GgufFamily(
        _phi3, {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _TOP
    ),
    "qwen2": GgufFamily(_qwen2, _LLAMA, _TOP),
    "qwen3": GgufFamily(_qwen3, {**_LLAMA, **_HEAD_NORMS}, _TOP),
    "qwen35": GgufFamily(_qwen35, _GATED_DELTA, _TOP, adds_one=True),
    "qwen35moe": GgufFamily(_qwen35moe, {**_GATED_DELTA, **_SHARED_EXPERT}, _TOP, adds_one=True),
    "qwen3moe": GgufFamily(
        _qwen3moe, {**_LLAMA, **_HEAD_NORMS, **_with_experts("mlp", "gate", *_PROJECTIONS)}, _TOP
    ),
    "qwen3next": GgufFamily(_qwen3next, {**_GATED_DELTA, **_SHARED_EXPERT}, _TOP, adds_one=True),
    "smollm3": GgufFamily(_smollm3, _LLAMA, _TOP, interleaved=True),
}  # fmt: skip
