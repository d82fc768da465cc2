"""llama.cpp's architectures as Hugging Face models: the config that a GGUF header amounts to, and names of tensors.

An architecture is one `GgufFamily`. What its converter changed in the weights themselves is said here and undone by
`windowpane.weights.gguf`. Those with recurrent states are in `gguf_states`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from math import isclose, pi, prod

from windowpane.models.config import ModelError, every
from windowpane.models.ggml import F32, StoredTypes
from windowpane.models.gguf import GgufHeader, GgufTensor, shortest
from windowpane.models.gguf_parts import (
    ATTENTION,
    BLOCK_NAME,
    HEAD_NORMS,
    LLAMA,
    MLP,
    PROJECTIONS,
    TOP,
    Fields,
    GgufFamily,
    even_head_dim,
    expert_sizes,
    granite,
    head_dim_of,
    layers_of,
    one_number,
    prefix_of,
    with_experts,
)
from windowpane.models.gguf_states import STATE_FAMILIES
from windowpane.models.parts import FULL, SLIDING


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
    family = family_of(header)
    tensors = [t for t in header.tensors.values() if t.name not in _SKIPPED and not _drafts(t.name, header)]
    return {name: _in_hf_axes(name, t) for name, t in ((family.hf_name(t.name), t) for t in tensors)}


# Made anew from the config, so not loaded.
_SKIPPED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CONVOLUTION = re.compile(r"\.conv(1d)?\.weight$")
# The converter gives these an axis more: of length 1, or one for groups of heads.
_VECTOR = re.compile(r"\.(A_log|D|(mamba|mixer)\.norm\.weight)$")


def _drafts(name: str, header: GgufHeader) -> bool:
    """Whether a tensor is of a layer that drafts, which is not loaded. Any beyond these is unexpected."""
    block, layers = BLOCK_NAME.fullmatch(name), layers_of(header)
    blocks = header.integer(f"{prefix_of(header)}block_count")
    return block is not None and layers is not None and blocks is not None and layers <= int(block[1]) < blocks


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
    prefix = prefix_of(header)
    embedding = header.tensors.get("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0] if embedding else header.integer(f"{prefix}vocab_size"),
        "hidden_size": header.integer(f"{prefix}embedding_length"),
        "intermediate_size": one_number(header, f"{prefix}feed_forward_length"),
        "num_hidden_layers": layers_of(header),
        "num_attention_heads": one_number(header, f"{prefix}attention.head_count"),
        "num_key_value_heads": one_number(header, f"{prefix}attention.head_count_kv"),
        "head_dim": head_dim_of(header, prefix),
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
    prefix = prefix_of(header)
    rotated, head_dim = header.integer(f"{prefix}rope.dimension_count"), head_dim_of(header, prefix)
    if rotated is not None and rotated != head_dim:
        raise ModelError(
            f"{header.path.name} rotates {rotated} of {head_dim} dimensions per head; {family} rotates all of them"
        )


def _gemma2(header: GgufHeader) -> Fields:
    # Queries are scaled by the head size, but for the 27B model (46 layers), which takes hidden / heads.
    is_27b = header.integer("gemma2.block_count") == 46
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.integer("gemma2.attention.sliding_window"),
        "rope_theta": header.number("gemma2.rope.freq_base") or 10_000.0,
        "query_pre_attn_scalar": (even_head_dim if is_27b else head_dim_of)(header, "gemma2."),
        "attn_logit_softcapping": header.number("gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": header.number("gemma2.final_logit_softcapping"),
    }


def _gemma3(header: GgufHeader) -> Fields:
    layers = header.integer("gemma3.block_count") or 0
    # llama.cpp fixes what the file does not say: every sixth layer is full, sliding layers rotate with base 10,000.
    interval = header.integer("gemma3.attention.sliding_window_pattern") or 6
    # Queries are scaled by the head size, but for the 27B model (62 layers), which takes hidden / heads.
    scalar = even_head_dim(header, "gemma3.") if layers == 62 else head_dim_of(header, "gemma3.")
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
    return _llama(header) | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | expert_sizes(header)


def _smollm3(header: GgufHeader) -> Fields:
    # llama.cpp fixes what the file does not say: every fourth layer does not rotate.
    return {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4}


def _qwen2(header: GgufHeader) -> Fields:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(header: GgufHeader) -> Fields:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _qwen3moe(header: GgufHeader) -> Fields:
    # llama.cpp renormalises the shares of chosen experts, as every published model of this family asks for.
    own: Fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    return own | expert_sizes(header)


def _gpt_oss(header: GgufHeader) -> Fields:
    scaling = _rope_scaling(header, "gpt-oss.")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": header.integer("gpt-oss.attention.sliding_window"),
        # The published models ask for it, and a file does not say it.
        "rope_scaling": scaling and scaling | {"truncate": False},
        "_windowpane": {"gguf": True},
    } | expert_sizes(header)


def _phi3(header: GgufHeader) -> Fields:
    rotated, head_dim = header.integer("phi3.rope.dimension_count"), head_dim_of(header, "phi3.")
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

_GEMMA2 = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = GgufFamily(
    _mixtral, {**LLAMA, **with_experts("block_sparse_moe", "gate", "w1", "w3", "w2")}, TOP, interleaved=True
)
_FAMILIES = {
    **STATE_FAMILIES,
    "gemma2": GgufFamily(_gemma2, _GEMMA2, TOP, adds_one=True),
    "gemma3": GgufFamily(_gemma3, {**_GEMMA2, **HEAD_NORMS}, TOP, adds_one=True),
    "gpt-oss": GgufFamily(
        _gpt_oss,
        {
            **ATTENTION,
            **with_experts("mlp", "router", *PROJECTIONS),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        TOP,
    ),
    "granite": GgufFamily(granite, LLAMA, TOP, interleaved=True),
    "llama": GgufFamily(_llama, LLAMA, TOP, interleaved=True),
    "phi3": GgufFamily(
        _phi3, {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, TOP
    ),
    "qwen2": GgufFamily(_qwen2, LLAMA, TOP),
    "qwen3": GgufFamily(_qwen3, {**LLAMA, **HEAD_NORMS}, TOP),
    "qwen3moe": GgufFamily(
        _qwen3moe, {**LLAMA, **HEAD_NORMS, **with_experts("mlp", "gate", *PROJECTIONS)}, TOP
    ),
    "smollm3": GgufFamily(_smollm3, LLAMA, TOP, interleaved=True),
}  # fmt: skip
