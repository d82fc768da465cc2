"""Shapes of released models, as their config.json files say them, and how many parameters their makers name.

Fields that decide nothing here (token ids, dropout, initializers) are left out. Parameters are those of the text model,
in billions, without vision and without layers for multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Published:
    """`caches` counts layers by what they keep; `runs` says whether all parts of it are known to the engine."""

    config: dict[str, Any]
    billions: float
    caches: dict[str, int]
    runs: bool = False


def _shape(
    architecture: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    width: int | None,
    vocab: int,
    longest: int,
    **fields: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        **fields,
    }


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "architectures"}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

# What the search left of Llama 3.3 70B: KV heads (0: no attention) and the MLP's multiplier of each layer.
_NAS_LAYERS = (
    [(8, 2.625)]
    + [(8, 5.25)] * 5
    + [(0, 2.625)] * 2
    + [(8, 5.25)] * 3
    + [(0, 3.28125)]
    + [(8, 5.25)] * 30
    + [(0, m) for m in (1.3125, 2.625, 2.625, 1.3125, 5.25, 1.3125, 2.625, 1.3125, 1.3125, 1.3125)]
    + [(8, 5.25)]
    + [(0, m) for m in (1.3125, 1.0, 1.0, 1.3125, 1.0, 1.0, 1.0, 1.3125, 1.3125)]
    + [(0, m) for m in (0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5)]
    + [(8, 5.25)] * 9
)


def nas_block(heads_in_group: int, multiplier: float) -> dict[str, Any]:
    attention = {"n_heads_in_group": heads_in_group or None, "no_op": not heads_in_group, "replace_with_linear": False}
    unused = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False, "window_length": None}
    ffn = {"ffn_mult": multiplier, "no_op": False, "replace_with_linear": False, "sparsify": None}
    return {"attention": attention | unused, "ffn": ffn}


_KIMI_TEXT = _text(
    _shape(
        "",
        7168,
        61,
        64,
        64,
        18432,
        163_840,
        262_144,
        model_type="kimi_k2",
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=8,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None,
        },
    )
)

PUBLISHED: dict[str, Published] = {
    "zai-org/GLM-4.5-Air": Published(
        _shape(
            "Glm4MoeForCausalLM",
            4096,
            46,
            96,
            8,
            10944,
            151_552,
            131_072,
            head_dim=128,
            attention_bias=True,
            use_qk_norm=False,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
            partial_rotary_factor=0.5,
            rope_scaling=None,
            rope_theta=1_000_000,
        ),
        106.0,
        {"full 8x128": 46},
        runs=True,
    ),
    "zai-org/GLM-4.7": Published(
        _shape(
            "Glm4MoeForCausalLM",
            5120,
            92,
            96,
            8,
            12288,
            151_552,
            202_752,
            head_dim=128,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=3,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            n_shared_experts=1,
            num_experts_per_tok=8,
        ),
        355.0,
        {"full 8x128": 92},
        runs=True,
    ),
    "zai-org/GLM-4.7-Flash": Published(
        _shape(
            "Glm4MoeLiteForCausalLM",
            2048,
            47,
            20,
            20,
            10240,
            154_880,
            202_752,
            head_dim=64,
            first_k_dense_replace=1,
            kv_lora_rank=512,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            moe_intermediate_size=1536,
            n_routed_experts=64,
            n_shared_experts=1,
            num_experts_per_tok=4,
            num_nextn_predict_layers=1,
        ),
        29.94,
        {"full 1x576 latent": 47},
    ),
    "MiniMaxAI/MiniMax-M2": Published(
        _shape(
            "MiniMaxM2ForCausalLM",
            3072,
            62,
            48,
            8,
            1536,
            200_064,
            196_608,
            head_dim=128,
            rotary_dim=64,
            rope_theta=5_000_000,
            num_local_experts=256,
            num_experts_per_tok=8,
            shared_intermediate_size=0,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            use_mtp=True,
            num_mtp_modules=3,
            attn_type_list=[1] * 62,
            quantization_config={
                **_FP8,
                "fmt": "float8_e4m3fn",
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            },
        ),
        228.7,
        {"full 8x128": 62},
        runs=True,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Published(
        _shape(
            "MixtralForCausalLM",
            4096,
            32,
            32,
            8,
            14336,
            32_000,
            32_768,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            rope_theta=1_000_000.0,
        ),
        46.7,
        {"full 8x128": 32},
        runs=True,
    ),
    "mistralai/Mixtral-8x22B-v0.1": Published(
        _shape(
            "MixtralForCausalLM",
            6144,
            56,
            48,
            8,
            16384,
            32_768,
            65_536,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            rope_theta=1_000_000.0,
        ),
        140.6,
        {"full 8x128": 56},
        runs=True,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Published(
        _shape(
            "SeedOssForCausalLM",
            5120,
            64,
            80,
            8,
            27648,
            155_136,
            524_288,
            head_dim=128,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            rope_theta=10_000_000.0,
            rope_scaling={"rope_type": "default"},
        ),
        36.15,
        {"full 8x128": 64},
        runs=True,
    ),
    "tencent/Hunyuan-A13B-Instruct": Published(
        _shape(
            "HunYuanMoEV1ForCausalLM",
            4096,
            32,
            32,
            8,
            3072,
            128_167,
            32_768,
            head_dim=128,
            num_experts=64,
            moe_topk=[8] * 32,
            moe_intermediate_size=[3072] * 32,
            num_shared_expert=[1] * 32,
            use_qk_norm=True,
            use_cla=False,
            tie_word_embeddings=True,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        ),
        80.4,
        {"full 8x128": 32},
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": Published(
        _shape(
            "Ernie4_5_MoeForCausalLM",
            2560,
            28,
            20,
            4,
            12288,
            103_424,
            131_072,
            moe_intermediate_size=1536,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_k=6,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            use_bias=False,
            tie_word_embeddings=True,
        ),
        21.8,
        {"full 4x128": 28},
    ),
    "baidu/ERNIE-4.5-0.3B-PT": Published(
        _shape("Ernie4_5ForCausalLM", 1024, 18, 16, 2, 3072, 103_424, 131_072, head_dim=128, tie_word_embeddings=True),
        0.36,
        {"full 2x128": 18},
        runs=True,
    ),
    "LiquidAI/LFM2-8B-A1B": Published(
        _shape(
            "Lfm2MoeForCausalLM",
            2048,
            24,
            32,
            8,
            7168,
            65_536,
            128_000,
            moe_intermediate_size=1792,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            use_expert_bias=True,
            conv_L_cache=3,
            conv_bias=False,
            layer_types=[FULL if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        ),
        8.34,
        {"state": 18, "full 8x64": 6},
        runs=True,
    ),
    "XiaomiMiMo/MiMo-7B-RL": Published(
        _shape(
            "MiMoForCausalLM",
            4096,
            36,
            32,
            8,
            11008,
            151_680,
            32_768,
            head_dim=128,
            attention_bias=True,
            num_nextn_predict_layers=1,
            rope_theta=640_000,
            use_sliding_window=False,
            tie_word_embeddings=False,
        ),
        7.62,
        {"full 8x128": 36},
        runs=True,
    ),
    "XiaomiMiMo/MiMo-V2-Flash": Published(
        _shape(
            "MiMoV2FlashForCausalLM",
            4096,
            48,
            64,
            4,
            16384,
            152_576,
            262_144,
            head_dim=192,
            v_head_dim=128,
            swa_num_attention_heads=64,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            sliding_window=128,
            sliding_window_size=128,
            hybrid_layer_pattern=[0 if layer == 0 or (layer + 1) % 6 == 0 else 1 for layer in range(48)],
            moe_layer_freq=[0] + [1] * 47,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=None,
            num_experts_per_tok=8,
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            quantization_config={**_FP8, "fmt": "e4m3"},
        ),
        308.8,
        {"window-129 8x192": 39, "full 4x192": 9},
    ),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Published(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "torch_dtype": "bfloat16",
            "text_config": _text(
                _shape(
                    "",
                    5120,
                    40,
                    32,
                    8,
                    32768,
                    131_072,
                    131_072,
                    model_type="mistral",
                    head_dim=128,
                    rope_theta=1_000_000_000.0,
                    sliding_window=None,
                )
            ),
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24},
        },
        23.57,
        {"full 8x128": 40},
        runs=True,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": Published(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "text_config": _text(
                _shape(
                    "",
                    4096,
                    34,
                    32,
                    8,
                    14336,
                    131_072,
                    262_144,
                    model_type="ministral3",
                    head_dim=128,
                    rope_parameters={
                        "rope_type": "yarn",
                        "type": "yarn",
                        "rope_theta": 1_000_000.0,
                        "factor": 16.0,
                        "original_max_position_embeddings": 16_384,
                        "llama_4_scaling_beta": 0.1,
                        "mscale": 1.0,
                        "mscale_all_dim": 1.0,
                    },
                    sliding_window=None,
                    tie_word_embeddings=False,
                )
            ),
        },
        8.5,
        {"full 8x128": 34},
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": Published(
        _shape(
            "Qwen2_5_VLForConditionalGeneration",
            3584,
            28,
            28,
            4,
            18944,
            152_064,
            128_000,
            max_window_layers=28,
            sliding_window=32_768,
            use_sliding_window=False,
            rope_theta=1_000_000.0,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            tie_word_embeddings=False,
            vision_config={"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14},
        ),
        7.62,
        {"full 4x128": 28},
        runs=True,
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": Published(
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "text_config": _text(
                _shape(
                    "",
                    2048,
                    36,
                    16,
                    2,
                    11008,
                    151_936,
                    128_000,
                    rope_parameters={
                        "type": "mrope",
                        "mrope_section": [16, 24, 24],
                        "rope_theta": 1_000_000.0,
                        "rope_type": "default",
                    },
                    use_sliding_window=False,
                    sliding_window=None,
                )
            ),
        },
        3.09,
        {"full 2x128": 36},
        runs=True,
    ),
    "Qwen/Qwen3-VL-235B-A22B-Thinking": Published(
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": _text(
                _shape(
                    "",
                    4096,
                    94,
                    64,
                    4,
                    12288,
                    151_936,
                    262_144,
                    head_dim=128,
                    decoder_sparse_step=1,
                    mlp_only_layers=[],
                    moe_intermediate_size=1536,
                    num_experts=128,
                    num_experts_per_tok=8,
                    rope_theta=5_000_000,
                )
            ),
            "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 4096},
        },
        235.1,
        {"full 4x128": 94},
        runs=True,
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Published(
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": _text(
                _shape(
                    "",
                    4096,
                    36,
                    32,
                    8,
                    12288,
                    151_936,
                    262_144,
                    head_dim=128,
                    rope_theta=5_000_000,
                    rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                )
            ),
        },
        8.19,
        {"full 8x128": 36},
        runs=True,
    ),
    "stepfun-ai/step3": Published(
        {
            "architectures": ["Step3VLForConditionalGeneration"],
            "torch_dtype": "bfloat16",
            "text_config": {
                "architectures": ["Step3TextForCausalLM"],
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "num_attention_heads": 64,
                "num_attention_groups": 1,
                "num_hidden_layers": 61,
                "max_position_embedding": 65_536,
                "vocab_size": 128_815,
                "head_dim": 256,
                "share_q_dim": 2048,
                "moe_intermediate_size": 5120,
                "moe_num_experts": 48,
                "moe_top_k": 3,
                "share_expert_dim": 5120,
                "moe_layers_enum": ",".join(map(str, range(4, 60))),
            },
        },
        316.0,
        {"full 1x256": 61},
    ),
    "stepfun-ai/Step-3.5-Flash": Published(
        _shape(
            "Step3p5ForCausalLM",
            4096,
            45,
            64,
            None,
            11264,
            128_896,
            262_144,
            num_attention_groups=8,
            head_dim=128,
            sliding_window=512,
            layer_types=[FULL if layer % 4 == 0 else SLIDING for layer in range(48)],
            attention_other_setting={
                "attention_type": SLIDING,
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            moe_layers_enum=",".join(map(str, range(3, 45))),
            moe_num_experts=288,
            moe_top_k=8,
            moe_intermediate_size=1280,
            share_expert_dim=1280,
            num_nextn_predict_layers=3,
        ),
        196.0,
        {"window-512 8x128": 33, "full 8x128": 12},
    ),
    "moonshotai/Kimi-K2.5": Published(
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "text_config": {**_KIMI_TEXT, "architectures": ["DeepseekV3ForCausalLM"]},
            "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
        },
        1026.4,
        {"full 1x576 latent": 61},
    ),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": Published(
        _shape(
            "DeciLMForCausalLM",
            8192,
            80,
            64,
            None,
            None,
            128_256,
            131_072,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            rope_theta=500_000.0,
            block_configs=[nas_block(heads, multiplier) for heads, multiplier in _NAS_LAYERS],
        ),
        49.87,
        {"full 8x128": 49},
    ),
}
