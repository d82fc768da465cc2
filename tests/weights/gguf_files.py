"""Small models as llama.cpp's converter writes them: its names come from the `gguf` package's own tables."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.running.small_models import CONFIGS, FULL, build

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_TIED = {"tie_word_embeddings": True, "tie_embedding": True}
# A model's name here, ggml's architecture, the small model that it is, and what its files cannot say otherwise.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3 yarn": (
        "qwen3",
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3moe": ("qwen3moe", "qwen3 experts", {"mlp_only_layers": []}),
    "gpt-oss": (
        "gpt-oss",
        "gpt-oss",
        {
            "initializer_range": 0.06,
            "swiglu_limit": 7.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "granite": ("granite", "granite", {}),
    "phi3": ("phi3", "phi3", {}),
    "phi3 long rope": ("phi3", "phi3 long rope, three quarters of each head", {}),
    "lfm2": ("lfm2", "lfm2", {"conv_bias": False, "num_key_value_heads": 4}),
    "lfm2moe": ("lfm2moe", "lfm2 experts", {**_TIED, "routed_scaling_factor": 1.0, "num_key_value_heads": 4}),
    "mixtral": ("llama", "mixtral", {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "llama with biases": ("llama", "llama with biases", {}),
    "gemma2": ("gemma2", "gemma2", {**_TIED, "query_pre_attn_scalar": 32}),
    "smollm3": ("smollm3", "smollm3", {}),
}
_INTERLEAVED = ("llama", "granite", "smollm3")


def described(name: str) -> dict[str, Any]:
    _, small, changes = MODELS[name]
    return CONFIGS[small] | changes


def write(path: Path, name: str, kind: gguf.GGMLQuantizationType, plain: str = "") -> torch.nn.Module:
    """The model, whose matrices are written in `kind` as far as its blocks divide their inputs, those called `plain`
    apart.
    """
    architecture, config = MODELS[name][0], described(name)
    model = build(config)
    model.save_pretrained(path.parent / "saved")
    state = load_file(path.parent / "saved" / "model.safetensors")
    arch = next(a for a, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, architecture, config)
    for key, tensor in _converted(state, architecture, config).items():
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        is_plain = bool(plain) and plain in found
        _add(writer, found, tensor, gguf.GGMLQuantizationType.F32 if is_plain else kind)
    for part in ("long", "short") if "long_factor" in config.get("rope_scaling", {}) else ():
        factors = np.array(config["rope_scaling"][f"{part}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{part}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    values = tensor.squeeze().contiguous().numpy()
    plain = values.ndim == 1 or "shortconv.conv" in name or "ffn_gate_inp" in name or name.endswith(".bias")
    if plain or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _add_settings(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    settings = {key: config[field] for key, field in _SETTINGS.items() if config.get(field) is not None}
    settings["attention.layer_norm_rms_epsilon"] = config.get("rms_norm_eps", _EPSILON.get(architecture, 1e-6))
    settings["rope.freq_base"] = config.get("rope_theta", _THETA.get(architecture, 1e4))
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        settings["expert_count"] = experts
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        settings["rope.scaling.type"] = "yarn"
        settings["rope.scaling.factor"] = scaling["factor"]
        settings["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if "conv" in config.get("layer_types", ()):
        kv_heads = config["num_key_value_heads"]
        settings["attention.head_count_kv"] = [kv_heads if kind == FULL else 0 for kind in config["layer_types"]]
        settings["shortconv.l_cache"] = config.get("conv_L_cache", 3)
        settings["rope.dimension_count"] = settings["attention.key_length"] = config["hidden_size"] // 4
    if partial := config.get("partial_rotary_factor"):
        settings["rope.dimension_count"] = int(partial * config["head_dim"])
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    for key, value in settings.items():
        add[type(value)](f"{architecture}.{key}", value)


_EPSILON = {"gpt-oss": 1e-5, "phi3": 1e-5, "lfm2": 1e-5, "lfm2moe": 1e-5}
_THETA = {"gpt-oss": 150_000.0, "lfm2": 1e6, "lfm2moe": 1e6, "smollm3": 2e6}


def _converted(state: dict[str, torch.Tensor], architecture: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Experts in one tensor, gate and up apart, rows in the order that ggml rotates, and norms as 1 + w."""
    found: dict[str, torch.Tensor] = {}
    of_experts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for key, tensor in state.items():
        if (expert := _EXPERT.fullmatch(key)) is not None:
            of_experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = tensor
        elif ".experts.gate_up_proj" in key:
            outputs_last = tensor.transpose(-1, -2) if tensor.ndim == 3 else tensor
            suffix = ".bias" if key.endswith("_bias") else ".weight"
            stem = key.removesuffix("_bias").removesuffix("gate_up_proj")
            found[f"{stem}gate_proj{suffix}"], found[f"{stem}up_proj{suffix}"] = (
                outputs_last[:, first::2] for first in (0, 1)
            )
        elif ".experts.down_proj" in key:
            name = key.replace("_bias", ".bias") if key.endswith("_bias") else f"{key}.weight"
            found[name] = tensor.transpose(-1, -2) if tensor.ndim == 3 else tensor
        elif architecture in _INTERLEAVED and re.search(r"\.[qk]_proj\.", key):
            heads = config["num_attention_heads" if ".q_proj." in key else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            found[key] = halves.transpose(1, 2).reshape(tensor.shape)
        elif architecture.startswith("gemma") and key.endswith("norm.weight"):
            found[key] = tensor + 1
        else:
            found[key] = tensor
    merged = {key: torch.stack([each[i] for i in range(len(each))]) for key, each in of_experts.items()}
    return {_name_for_tables(key): tensor for key, tensor in (found | merged).items()}


def _name_for_tables(key: str) -> str:
    """What the converter calls a tensor before it looks it up: some of Hugging Face's names are not in the tables."""
    key = re.sub(
        r"model\.(layers\.\d+)\.(?:block_sparse_moe|feed_forward)\.experts\.w", r"\1.feed_forward.experts.w", key
    )
    return key.replace(".sinks", ".sinks.weight").replace(".expert_bias", ".expert_bias.bias")
