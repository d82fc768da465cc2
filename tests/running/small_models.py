"""Small random models of every family that runs, built by transformers, and the same weights for the runner.

Untied embeddings and large weights: tied random models echo a few tokens, and equality of those proves little.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from windowpane.lowering.linear import Weights
from windowpane.models import ModelSpec, from_config
from windowpane.weights import load_weights

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WINDOW = 24
_CPU = torch.device("cpu")

_BASE: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA4 = {
    **_BASE,
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "initializer_range": 0.08,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
}
_PLE = {"hidden_size_per_layer_input": 16}
_SHARED = {"num_hidden_layers": 9, "layer_types": [SLIDING, SLIDING, FULL] * 3, "num_kv_shared_layers": 5}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "initializer_range": 0.2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 10000.0,
    },
    "llama with biases": {
        **_BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "initializer_range": 0.2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {**_BASE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "qwen3": {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {
        **_BASE,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "initializer_range": 0.2,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
    },
    "qwen2": {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 128},
    "phi3": {
        **_BASE,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 128,
        "original_max_position_embeddings": 2048,
        "sliding_window": WINDOW,
    },
    "phi3 long rope, three quarters of each head": {
        **_BASE,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 128,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(12)],
            "long_factor": [1.0 + 0.4 * i for i in range(12)],
        },
        "sliding_window": None,
    },
    "olmo3": {
        **_BASE,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 128,
        "sliding_window": WINDOW,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "gemma2": {
        **_BASE,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "initializer_range": 0.2,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "exaone4": {
        **_BASE,
        "model_type": "exaone4",
        "architectures": ["Exaone4ForCausalLM"],
        "hidden_size": 128,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    },
    "cohere2": {
        **_BASE,
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        "initializer_range": 0.2,
        "hidden_size": 128,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "logit_scale": 0.25,
    },
    "smollm3": {
        **_BASE,
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_size": 128,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "granite": {
        **_BASE,
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "hidden_size": 128,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
    },
    "mistral small 3": {
        **_BASE,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "initializer_range": 0.2,
        "sliding_window": None,
        "rope_theta": 1e8,
    },
    "seed oss": {**_BASE, "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "initializer_range": 0.2},
    "ernie": {
        **_BASE,
        "model_type": "ernie4_5",
        "architectures": ["Ernie4_5ForCausalLM"],
        "initializer_range": 0.2,
        "use_bias": True,
    },
    "gemma4": _GEMMA4,
    "gemma4 K = V": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4 per-layer embeddings": {**_GEMMA4, **_PLE},
    "gemma4 shared KV": {**_GEMMA4, **_SHARED, "use_double_wide_mlp": True},
    "gemma4 everything": {
        **_GEMMA4,
        **_SHARED,
        **_PLE,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_double_wide_mlp": True,
    },
}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
# Saved by transformers and read from the file: files have these tensors otherwise than its modules.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3 experts": {
        **_BASE,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
        "initializer_range": 0.2,
        "mlp_only_layers": [1],
    },
    "qwen3 experts, shares as they are": {
        **_BASE,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": False,
        "initializer_range": 0.2,
    },
    "mixtral": {
        **_BASE,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "minimax m2": {
        **_BASE,
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "initializer_range": 0.2,
    },
    "gpt-oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "initializer_range": 0.2,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.5,
    },
    "glm 4.5": {
        **_BASE,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "llama 4": {
        **_BASE,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": WINDOW,
        "floor_scale": 16,
        "attn_scale": 0.3,
        "use_qk_norm": True,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma4 experts": {
        **_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}
_DELTA = {
    "num_hidden_layers": 5,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 32}
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        **_BASE,
        **_EXPERTS,
        **_DELTA,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3.5": {
        **_BASE,
        **_DELTA,
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
        "linear_value_head_dim": 32,
    },
    "qwen3.5 experts": {
        **_BASE,
        **_EXPERTS,
        **_DELTA,
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": 48,
    },
    "lfm2": {
        **_BASE,
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 128,
        "layer_types": ["conv", FULL, "conv", "conv"],
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2 experts": {
        **_BASE,
        **_EXPERTS,
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "hidden_size": 128,
        "layer_types": ["conv", "conv", FULL, "conv"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "granite hybrid": {
        **_BASE,
        **_MAMBA,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "attention", "mamba"],
        "hidden_size": 128,
        "mamba_expand": 1,
        "shared_intermediate_size": 96,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
    },
    "granite hybrid without experts": {
        **_BASE,
        **_MAMBA,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "hidden_size": 128,
        "mamba_expand": 1,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.2,
    },
    "nemotron-h": {
        **_BASE,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M-M*ME",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
        "initializer_range": 0.06,
    },
    "falcon-h1": {
        **_BASE,
        **_MAMBA,
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 96,
        "mamba_d_head": 24,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.7, 1.4],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [1.1, 0.8, 1.2, 0.7, 0.9],
    },
    "falcon-h1, gates without norms": {
        **_BASE,
        **_MAMBA,
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 96,
        "mamba_d_head": 24,
        "mamba_rms_norm": False,
        "projectors_bias": True,
        "initializer_range": 0.3,
    },
}
CONFIGS |= WITH_EXPERTS | WITH_STATES

_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_TOWER = {**_QWEN_TOWER, "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": [0]}
_HEADS_FROM_WIDTH = {**{key: value for key, value in _BASE.items() if key != "head_dim"}, "hidden_size": 128}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
# The text part of models that also see, saved with their towers and read from the file; and MiMo, which is Qwen2 with
# heads that draft.
TEXT_PARTS: dict[str, dict[str, Any]] = {
    "qwen2 vl": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        **_HEADS_FROM_WIDTH,
        "rope_scaling": _MROPE,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2},
    },
    "qwen2.5 vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **_HEADS_FROM_WIDTH,
        "rope_scaling": _MROPE,
        "vision_config": {**_QWEN_TOWER, "out_hidden_size": 128},
    },
    "qwen3 vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **_BASE,
            "model_type": "qwen3_vl_text",
            "initializer_range": 0.2,
            "rope_scaling": {**_MROPE, "mrope_interleaved": True},
        },
        "vision_config": _QWEN3_TOWER,
    },
    "qwen3 vl experts": {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **_BASE,
            **_EXPERTS,
            "model_type": "qwen3_vl_moe_text",
            "initializer_range": 0.2,
            "rope_scaling": {**_MROPE, "mrope_interleaved": True},
        },
        "vision_config": _QWEN3_TOWER,
    },
    "mistral 3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {**_BASE, "model_type": "mistral", "sliding_window": None, "initializer_range": 0.2},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "mimo": {**_HEADS_FROM_WIDTH, "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True},
}
# transformers saves these experts one by one, unlike the published files, whose tensors are those of its modules.
AS_IN_MODULES = ("qwen3.5 experts",)

# Heads of real sizes, so that kernels made for those take them: for checks on a GPU.
WIDE_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4 K = V, wide heads": {
        **_GEMMA4,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 500,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
# Quantized ones are random as they are, packed: transformers does not make them.
QUANTIZED: dict[str, dict[str, Any]] = {
    "llama int4": {
        **CONFIGS["llama with biases"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": _INT4}},
            "ignore": ["lm_head", "re:.*k_proj"],
        },
    },
    "gemma4 int4": {
        **CONFIGS["gemma4 K = V"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": {**_INT4, "symmetric": True}}},
            "ignore": ["lm_head"],
        },
    },
    "qwen3 experts int4": {
        **CONFIGS["qwen3 experts"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": _INT4}},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    },
    "qwen3 experts fp8": {
        **CONFIGS["qwen3 experts"],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    },
    "gpt-oss mxfp4": {
        **CONFIGS["gpt-oss"],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "qwen3 fp8": {**CONFIGS["qwen3"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}},
}
# Wide enough that a GPU takes all between two layers' attention at once.
WIDE_QUANTIZED: dict[str, dict[str, Any]] = {
    "gemma4 int4, wide": {
        **WIDE_CONFIGS["gemma4 K = V, wide heads"],
        "hidden_size": 2304,
        "intermediate_size": 8192,
        "quantization_config": QUANTIZED["gemma4 int4"]["quantization_config"],
    },
}


@cache
def reference(name: str) -> torch.nn.Module:
    """transformers' own model, float32, with norms and scalars away from their trivial initial values."""
    return build((CONFIGS | WIDE_CONFIGS | TEXT_PARTS)[name])


def build(described: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(7)
    fields = dict(described)
    model_type = fields.pop("model_type")
    config = AutoConfig.for_model("qwen2" if model_type == "mimo" else model_type, **fields)
    config.architectures = described["architectures"]
    auto = AutoModelForImageTextToText if "vision_config" in described else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if any(word in key for word in ("norm", "layer_scalar", "router.scale", "expert_scale")):
                tensor.add_(0.1 * torch.randn_like(tensor))
            if any(word in key for word in ("correction_bias", "expert_bias", "router.bias", "proj_bias", "sinks")):
                tensor.copy_(0.5 * torch.randn_like(tensor))
            if "A_log" in key:
                tensor.sub_(3.0)  # states that decay as slowly as trained ones: what is left of fast ones is noise
            if "q_norm" in key and described["model_type"].startswith("gemma4"):
                tensor.mul_(0.3)  # its attention has no scale: trained norms keep scores small
    return model


def spec_of(name: str) -> ModelSpec:
    return from_config((CONFIGS | WIDE_CONFIGS | TEXT_PARTS | QUANTIZED | WIDE_QUANTIZED)[name], name)


def save(name: str, directory: str | Path) -> None:
    """Write a checkpoint: with the tensors of its files where transformers has other ones in its modules."""
    if name == "qwen3 vl experts":
        # transformers turns the published experts around when it loads them, and does not turn them back.
        state = reference(name).state_dict()
        turned = {k: t.transpose(1, 2) if ".experts." in k else t for k, t in state.items()}
        save_file({k: t.contiguous() for k, t in turned.items()}, Path(directory) / "model.safetensors")
        return
    if name in WITH_EXPERTS | WITH_STATES | TEXT_PARTS and name not in AS_IN_MODULES:
        reference(name).save_pretrained(directory)
        return
    state = {key: tensor.contiguous() for key, tensor in reference(name).state_dict().items()}
    save_file(state, Path(directory) / "model.safetensors")


def weights_of(name: str, dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> Weights:
    """A dictionary of its own for each caller; the tensors are shared, as no lowering changes what it is given."""
    return dict(_weights_of(name, dtype, device))


@cache
def _weights_of(name: str, dtype: torch.dtype, device: torch.device) -> Weights:
    if name in QUANTIZED | WIDE_QUANTIZED:
        return load_weights(None, spec_of(name), dtype=dtype, device=device, load_format="dummy", seed=7)
    if name in WITH_EXPERTS | WITH_STATES | TEXT_PARTS:
        with tempfile.TemporaryDirectory() as directory:
            save(name, directory)
            return load_weights(directory, spec_of(name), dtype=dtype, device=device)
    state = reference(name).state_dict()
    return {key: tensor.detach().to(device, dtype, copy=True) for key, tensor in state.items()}
