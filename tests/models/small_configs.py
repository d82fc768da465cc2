"""One small config per architecture, in Hugging Face form: enough layers to show every kind, no more."""

from __future__ import annotations

import copy
from typing import Any

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"

_FLAT: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_GEMMA4_TEXT = {
    **_FLAT,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": 8,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 80,
    "hidden_size_per_layer_input": 8,
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 20,
}
_GEMMA4_AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 40}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {**_FLAT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama with biases": {
        **_FLAT,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "smollm3": {**_FLAT, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": 0},
    "mistral": {**_FLAT, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "ministral": {
        **_FLAT,
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": 8,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
    },
    "gemma2": {**_FLAT, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8},
    "gemma3 text": {
        **_FLAT,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**_FLAT, "sliding_window": 8, "model_type": "gemma3_text"},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "gemma3n": {
        **_FLAT,
        "model_type": "gemma3n_text",
        "architectures": ["Gemma3nForCausalLM"],
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "intermediate_size": [128, 128, 256, 256],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 80,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0, 0.0, 0.0],
    },
    "gemma4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            **_GEMMA4_TEXT,
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "vision_config": {**_GEMMA4_VISION, "standardize": True},
        "audio_config": None,
    },
    "gemma4 with experts": {
        **_GEMMA4_TEXT,
        **_EXPERTS,
        "top_k_experts": 2,
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "enable_moe_block": True,
    },
    "gemma4 with shared KV": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            **_GEMMA4_TEXT,
            "model_type": "gemma4_text",
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        "vision_config": {**_GEMMA4_VISION, "use_clipped_linears": True},
        "audio_config": _GEMMA4_AUDIO,
    },
    "gemma4 unified": {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": {
            **_FLAT,
            "model_type": "gemma4_unified_text",
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 6, "output_proj_dims": 32, "patch_size": 4},
        "audio_config": {"audio_embed_dim": 24},
    },
    "qwen3": {**_FLAT, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3 moe": {
        **_FLAT,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "mlp_only_layers": [2],
    },
    "qwen3 next": {
        **_FLAT,
        **_EXPERTS,
        **_DELTA,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "shared_expert_intermediate_size": 48,
    },
    "qwen3.5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**_FLAT, **_DELTA, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_vision"},
    },
    "qwen3.5 moe": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            **_FLAT,
            **_EXPERTS,
            **_DELTA,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 48,
        },
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_moe_vision"},
    },
    "gpt-oss": {
        **_FLAT,
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "llama4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            **_FLAT,
            "model_type": "llama4_text",
            "intermediate_size_mlp": 160,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 1, 0],
            "pad_token_id": 0,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "projector_input_dim": 40,
            "projector_output_dim": 44,
            "vision_output_dim": 44,
        },
    },
    "nemotron-h": {
        **_FLAT,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 24,
        "use_bias": True,
        "mamba_ssm_cache_dtype": "float32",
    },
}


def small(name: str, **changes: Any) -> dict[str, Any]:
    """A copy of a small config with fields of its text part changed; None removes a field."""
    config = copy.deepcopy(SMALL[name])
    text = config.get("text_config", config)
    for key, value in changes.items():
        if value is None:
            text.pop(key, None)
        else:
            text[key] = value
    return config
