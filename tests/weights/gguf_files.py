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

from tests.running.small_models import CONFIGS, FULL, LINEAR, build

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
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_EVERY_THIRD = [LINEAR, LINEAR, FULL, LINEAR, LINEAR]
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
    "qwen35": ("qwen35", "qwen3.5", {"layer_types": _EVERY_THIRD, "full_attention_interval": 3}),
    "qwen35moe": ("qwen35moe", "qwen3.5 experts", {"layer_types": _EVERY_THIRD, "full_attention_interval": 3}),
    "qwen3next": (
        "qwen3next",
        "qwen3-next",
        {"layer_types": _EVERY_THIRD, "full_attention_interval": 3, "mlp_only_layers": []},
    ),
    "granite hybrid": ("granitehybrid", "granite hybrid", {}),
    "granite hybrid without experts": ("granitehybrid", "granite hybrid without experts", {}),
    "nemotron-h": (
        "nemotron_h_moe",
        "nemotron-h",
        {"n_group": 1, "topk_group": 1, "hybrid_override_pattern": "MEM*ME"},
    ),
    "nemotron-h without experts": (
        "nemotron_h",
        "nemotron-h",
        {"hybrid_override_pattern": "M-M*M-", "intermediate_size": 96},
    ),
    "falcon-h1": ("falcon-h1", "falcon-h1", {}),
}
_INTERLEAVED = ("llama", "granite", "smollm3", "granitehybrid")


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
    for key, tensor in _converted(_of_states(state, architecture, config), architecture, config).items():
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
    if partial := (config.get("rope_parameters") or config).get("partial_rotary_factor"):
        settings["rope.dimension_count"] = int(partial * config["head_dim"])
    settings |= _state_settings(architecture, config)
    add = {
        str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array,
        bool: writer.add_bool,
    }  # fmt: skip
    for key, value in settings.items():
        add[type(value)](f"{architecture}.{key}", value)


def _state_settings(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    if "linear_num_key_heads" in config:
        return {
            "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "full_attention_interval": config["full_attention_interval"],
            "rope.freq_base": config["rope_parameters"]["rope_theta"],
        }
    of_mamba = {
        "ssm.conv_kernel": config.get("mamba_d_conv", config.get("conv_kernel")),
        "ssm.state_size": config.get("mamba_d_state", config.get("ssm_state_size")),
        "ssm.group_count": config.get("mamba_n_groups", config.get("n_groups")),
        "ssm.time_step_rank": config.get("mamba_n_heads", config.get("mamba_num_heads")),
    }
    kv_heads = config["num_key_value_heads"]
    if architecture == "granitehybrid":
        kinds = config["layer_types"]
        return of_mamba | {
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
            "attention.head_count_kv": [kv_heads if kind == "attention" else 0 for kind in kinds],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        }
    if architecture == "falcon-h1":
        return of_mamba | {"ssm.inner_size": config["mamba_d_ssm"]}
    if not architecture.startswith("nemotron_h"):
        return {}
    pattern = config["hybrid_override_pattern"]
    of_mamba |= {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": [kv_heads if kind == "*" else 0 for kind in pattern],
        "feed_forward_length": [config["intermediate_size"] if kind in "-E" else 0 for kind in pattern],
    }
    if architecture == "nemotron_h":
        return of_mamba
    return of_mamba | {
        "feed_forward_length": [config["moe_intermediate_size"] if kind in "-E" else 0 for kind in pattern],
        "expert_count": config["n_routed_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
    }


def _of_states(state: dict[str, torch.Tensor], architecture: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the converter does with layers that have a recurrent state: decays, vectors, the order of heads; and with
    what else only such models have.
    """
    found: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if key.endswith(".A_log"):
            tensor = -torch.exp(tensor)
        key = key.replace(".dt_bias", ".dt_proj.bias")
        key = key.replace(".e_score_correction_bias", ".e_score_correction.bias")
        if "linear_num_key_heads" in config and key.endswith("norm.weight") and "linear_attn" not in key:
            tensor = tensor + 1
        if architecture.startswith("qwen35") and "linear_attn." in key:
            tensor = _tiled(key, tensor, config)
        if ".in_proj_qkvz." in key:
            qkv, z = _split_by_key_head(tensor, config)
            found[key.replace("qkvz", "qkv")], found[key.replace("qkvz", "z")] = qkv, z
            continue
        if ".input_linear." in key:
            gate, up = tensor.chunk(2, dim=-2)
            stem = key.replace("input_linear", "{}_proj")
            if "shared_mlp" in key and not config["num_local_experts"]:
                stem = stem.replace("shared_mlp", "mlp")
            stem = stem.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", "mlp.shared_expert")
            found[stem.format("gate")], found[stem.format("up")] = gate, up
            continue
        if ".output_linear." in key:
            key = key.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")
            shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            key = key.replace("shared_mlp.output_linear", f"{shared}.down_proj")
        if architecture == "falcon-h1":
            tensor = _multiplied(key, tensor, config)
        found[key] = tensor
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    for key in [key for key in found if key.endswith((".mamba.norm.weight", ".mixer.norm.weight"))]:
        found[key] = found[key].reshape(groups, -1)
    for key in [key for key in found if key.endswith((".A_log", ".D")) and "linear_attn" not in key]:
        found[key] = found[key][:, None]
    return found


def _tiled(key: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Value heads [key heads, value heads of each] as [value heads of each, key heads]."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]

    def swapped(rows: torch.Tensor) -> torch.Tensor:
        return (
            rows.reshape(key_heads, value_heads // key_heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
        )

    if "in_proj_qkv" in key or "conv1d" in key:
        return torch.cat([tensor[:keys], swapped(tensor[keys:])])
    if "out_proj" in key:
        return swapped(tensor.t()).t()
    return tensor if key.endswith("norm.weight") else swapped(tensor)


def _split_by_key_head(tensor: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    parts = tensor.view(key_heads, -1, tensor.shape[1]).split([key_dim, key_dim, values, values], dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return torch.cat([q, k, v]), z


def _multiplied(key: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Falcon-H1's multipliers are those of its weights in a file."""
    gate, down = config["mlp_multipliers"]
    inputs = config["attention_in_multiplier"]
    multipliers = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": inputs * config["key_multiplier"],
        "q_proj": inputs,
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    tensor = tensor * multipliers.get(key.split(".")[-2], 1.0)
    if ".in_proj." in key:
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sections = torch.tensor([inner, inner, states, states, config["mamba_n_heads"]])
        tensor = tensor * torch.tensor(config["ssm_multipliers"]).repeat_interleave(sections)[:, None]
    return tensor


_EPSILON = dict.fromkeys(("gpt-oss", "phi3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "falcon-h1"), 1e-5)
_THETA = {"gpt-oss": 150_000.0, "lfm2": 1e6, "lfm2moe": 1e6, "smollm3": 2e6}


def _converted(state: dict[str, torch.Tensor], architecture: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Experts in one tensor, gate and up apart, rows in the order that ggml rotates, and norms as 1 + w."""
    found: dict[str, torch.Tensor] = {}
    of_experts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for key, tensor in state.items():
        if (expert := _EXPERT.fullmatch(key)) is not None:
            of_experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = tensor
        elif ".experts.gate_up_proj" in key and architecture.startswith("qwen35"):
            gate, up = tensor.chunk(2, dim=1)
            stem = key.removesuffix("gate_up_proj")
            found[f"{stem}gate_proj.weight"], found[f"{stem}up_proj.weight"] = gate, up
        elif ".experts.gate_up_proj" in key:
            outputs_last = tensor.transpose(-1, -2) if tensor.ndim == 3 else tensor
            suffix = ".bias" if key.endswith("_bias") else ".weight"
            stem = key.removesuffix("_bias").removesuffix("gate_up_proj")
            found[f"{stem}gate_proj{suffix}"], found[f"{stem}up_proj{suffix}"] = (
                outputs_last[:, first::2] for first in (0, 1)
            )
        elif ".experts.down_proj" in key and not key.endswith(".weight"):
            name = key.replace("_bias", ".bias") if key.endswith("_bias") else f"{key}.weight"
            turned = tensor.ndim == 3 and not architecture.startswith("qwen35")
            found[name] = tensor.transpose(-1, -2) if turned else tensor
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
    key = re.sub(r"backbone\.(layers\.\d+)\.mixer\.experts", r"model.\1.mlp.experts", key)
    return key.replace(".sinks", ".sinks.weight").replace(".expert_bias", ".expert_bias.bias")
