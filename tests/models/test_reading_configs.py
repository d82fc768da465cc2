"""What a config's own fields say about layers, and the errors where they say something unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.small_configs import CHUNKED, FULL, SLIDING, SMALL, small
from windowpane.kv.retention import Chunk, Cross, Full, Window
from windowpane.models import ModelError, load, shipped_names
from windowpane.models.blocks import Mamba2
from windowpane.models.spec import ModelSpec


def read(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load(tmp_path)


def kept(spec: ModelSpec) -> list[object]:
    return [cache.retention for cache in spec.token_caches]


def test_sliding_window_pattern_says_which_gemma_3_layers_are_full(tmp_path: Path) -> None:
    spec = read(tmp_path, small("gemma3 text", layer_types=None, sliding_window_pattern=2))
    assert kept(spec) == [Window(8), Full(), Window(8), Full()]


def test_layer_types_win_over_older_fields(tmp_path: Path) -> None:
    kinds = [FULL, SLIDING, SLIDING, SLIDING]
    spec = read(tmp_path, small("gemma3 text", layer_types=kinds, sliding_window_pattern=2))
    assert kept(spec) == [Full(), Window(8), Window(8), Window(8)]


def test_the_last_gemma_4_layer_is_full_whatever_the_config_says(tmp_path: Path) -> None:
    spec = read(tmp_path, small("gemma4", layer_types=[SLIDING] * 4))
    assert kept(spec) == [Window(8), Window(8), Window(8), Full()]


def test_gemma_4_full_layers_keep_one_latent_only_where_k_and_v_are_one_projection(tmp_path: Path) -> None:
    latent = read(tmp_path, small("gemma4")).token_caches[-1]
    pair = read(tmp_path, small("gemma4", attention_k_eq_v=False)).token_caches[-1]
    assert (latent.latent, latent.kv_heads, latent.key_dim, latent.value_dim) == (True, 1, 32, 32)
    assert (pair.latent, pair.kv_heads, pair.key_dim) == (False, 2, 32)


def test_layers_that_share_kv_own_no_cache(tmp_path: Path) -> None:
    spec = read(tmp_path, small("gemma4 with shared KV"))
    assert [cache.layer for cache in spec.caches] == [0, 1, 2, 3, 4, 5]
    assert spec.num_layers == 8
    with pytest.raises(ModelError, match=r"num_kv_shared_layers: layer 4 shares KV, and no sliding_attention"):
        read(
            tmp_path,
            small("gemma4 with shared KV", layer_types=[FULL] * 4 + [SLIDING, FULL] * 2, num_kv_shared_layers=4),
        )


def test_qwen_3_slides_only_if_it_says_so_and_only_in_the_last_layers(tmp_path: Path) -> None:
    window = {"sliding_window": 8, "max_window_layers": 3}
    assert kept(read(tmp_path, small("qwen3", **window))) == [Full()] * 4
    assert kept(read(tmp_path, small("qwen3", use_sliding_window=True, **window))) == [Full()] * 3 + [Window(8)]
    assert kept(read(tmp_path, small("qwen3 moe", use_sliding_window=True, **window))) == [Window(8)] * 4
    kinds = ["sliding_attention", "full_attention"] * 2  # transformers has no window then, and cannot run
    with pytest.raises(ModelError, match="windows are switched off"):
        read(tmp_path, small("qwen3", layer_types=kinds, **window))


def test_a_mistral_window_is_on_every_layer_and_null_means_none(tmp_path: Path) -> None:
    assert kept(read(tmp_path, small("mistral"))) == [Window(8)] * 4
    assert kept(read(tmp_path, {**small("mistral"), "sliding_window": None})) == [Full()] * 4


def test_llama_4_chunks_the_layers_with_rotary_positions(tmp_path: Path) -> None:
    assert kept(read(tmp_path, small("llama4"))) == [Chunk(16)] * 3 + [Full()]
    named = small("llama4", layer_types=[FULL, CHUNKED, CHUNKED, FULL])
    assert kept(read(tmp_path, named)) == [Full(), Chunk(16), Chunk(16), Full()]


def test_full_attention_interval_says_which_qwen_3_5_layers_keep_tokens(tmp_path: Path) -> None:
    spec = read(tmp_path, small("qwen3.5", layer_types=None, full_attention_interval=2))
    assert [cache.layer for cache in spec.token_caches] == [1, 3]
    assert [cache.layer for cache in spec.state_caches] == [0, 2]
    assert {part.name: part.dtype for part in spec.state_caches[0].parts}["recurrent"] == "float32"


@pytest.mark.parametrize(
    "layers", [{"hybrid_override_pattern": "M*-E"}, {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}]
)
def test_nemotron_layers_come_from_letters_or_words(tmp_path: Path, layers: dict[str, Any]) -> None:
    spec = read(tmp_path, {**small("nemotron-h", hybrid_override_pattern=None), **layers})
    assert [cache.layer for cache in spec.state_caches] == [0]
    assert [cache.layer for cache in spec.token_caches] == [1]
    assert spec.num_layers == 4


def test_nested_configs_saved_as_differences_take_the_class_defaults(tmp_path: Path) -> None:
    # google/gemma-3-4b-it publishes just these fields of its text part.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    shipped = load("gemma-3-4b")
    assert read(tmp_path, config).caches == shipped.caches
    assert read(tmp_path, config).tensors == tuple(t for t in shipped.tensors if t.tower is None)


def test_a_model_is_named_by_its_directory_or_file(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    read(directory, small("llama"))
    assert load(directory).name == "my-model"
    assert load(str(directory / "config.json")).name == "my-model"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(small("llama")))
    assert load(other).name == "other"


def test_fields_that_decide_nothing_do_not_matter(tmp_path: Path) -> None:
    assert read(tmp_path, small("llama", hidden_act="something_new", brand_new_field={"a": 1})).num_layers == 4


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["Qwen2MoeForCausalLM"]},
        r"'Qwen2MoeForCausalLM'; of \d\d known ones the nearest is Qwen3MoeForCausalLM$",
    ),
    "no architecture": (
        without(small("llama"), "architectures"),
        r"names no architectures; of .* nearest are LlamaForCausalLM",
    ),
    "missing size": (small("llama", num_attention_heads=None), r"no num_attention_heads"),
    "missing nested size": (small("qwen3.5", hidden_size=None), r"no text_config.hidden_size"),
    "missing section": ({"architectures": ["Gemma4ForConditionalGeneration"]}, r"no hidden_size"),
    "text for a number": (small("llama", hidden_size="64"), r"hidden_size must be a whole number, not '64'"),
    "true for a number": (small("llama", hidden_size=True), r"hidden_size must be a whole number, not True"),
    "zero size": (small("llama", num_hidden_layers=0), r"num_hidden_layers is 0, but must be at least 1"),
    "number for a flag": (small("llama", attention_bias=1), r"attention_bias must be true or false, not 1"),
    "heads that do not group": (
        small("llama", num_key_value_heads=3),
        r"num_attention_heads is 4, no multiple of .* 3",
    ),
    "unknown layer type": (
        small("gemma2", layer_types=[FULL, FULL, FULL, "sparse_attention"]),
        r"layer_types: unknown value 'sparse_attention'; known: full_attention, sliding_attention",
    ),
    "a layer type of another family": (
        small("qwen3.5", layer_types=[FULL, FULL, FULL, CHUNKED]),
        r"text_config.layer_types: unknown value 'chunked_attention'; known: full_attention, linear_attention",
    ),
    "too few layer types": (small("gemma2", layer_types=[FULL]), r"layer_types has 1 entries for 4 layers"),
    "a window without a size": (small("smollm3", layer_types=[SLIDING] * 4), r"no sliding_window"),
    "a chunk of no size": (
        small("llama4", attention_chunk_size=0),
        r"text_config.attention_chunk_size is 0, but must be at least 1",
    ),
    "a null window on a sliding layer": ({**small("gemma2"), "sliding_window": None}, r"no sliding_window"),
    "unknown letter": (small("nemotron-h", hybrid_override_pattern="M*-X"), r"hybrid_override_pattern: .*'X'; known: "),
    "unknown block": (
        small("nemotron-h", layers_block_type=["mamba", "conv", "mlp", "moe"]),
        r"layers_block_type: unknown value 'conv'",
    ),
    "no layer pattern": (small("nemotron-h", hybrid_override_pattern=None), r"neither layers_block_type nor"),
    "pattern of another length": (small("nemotron-h", num_hidden_layers=5), r"is 5, but the layer pattern names 4"),
    "unknown dtype": (
        small("llama", dtype="float8"),
        r"dtype: unknown value 'float8'; known: bfloat16, float16, float32",
    ),
    "unknown old dtype": (small("llama", dtype=None, torch_dtype="half"), r"torch_dtype: unknown value 'half'"),
    "unknown state dtype": (small("qwen3.5", mamba_ssm_dtype="int8"), r"mamba_ssm_dtype: unknown value 'int8'"),
    "unknown cache dtype": (small("nemotron-h", mamba_ssm_cache_dtype="fp4"), r"mamba_ssm_cache_dtype: .*'fp4'"),
    "everything shared": (small("gemma4", num_kv_shared_layers=4), r"num_kv_shared_layers is 4, but .* only 4 layers"),
    "an encoder": (small("gemma4", use_bidirectional_attention="all"), r"use_bidirectional_attention is 'all'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_config_that_cannot_be_read_says_why(tmp_path: Path, case: str) -> None:
    config, message = ERRORS[case]
    with pytest.raises(ModelError, match=message):
        read(tmp_path, config)


def test_a_file_that_is_no_json_object_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"not valid JSON: .*line 1"):
        load(path)
    path.write_text("[1]")
    with pytest.raises(ModelError, match="must be a JSON object, not list"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot read"):
        load(path)


@pytest.mark.parametrize("high", [float("inf"), {"__float__": "Infinity"}, "Infinity", "inf", 1e30])
def test_a_step_size_may_have_no_upper_bound(tmp_path: Path, high: object) -> None:
    spec = read(tmp_path, small("nemotron-h", moe_latent_size=None, time_step_limit=[0.001, high]))
    assert spec.decoder is not None
    limits = {mixer.dt_limits for mixer in spec.decoder.state_mixers if isinstance(mixer, Mamba2)}
    assert limits == {(0.001, 1e30 if high == 1e30 else float("inf"))}


NO_LIMITS = [
    [float("nan"), 1.0], [0.0, float("nan")], [0.0, {"__float__": "NaN"}], [5.0, 0.1], [-1, -0.5], [True, False],
    ["0", "1"], [0.0, "1"], [float("inf"), float("inf")], [0.0, 10**400], [None, None], [[0], [1]], [0.0],
    [0, 1, 2], "inf", {"min": 0},
]  # fmt: skip


@pytest.mark.parametrize("values", NO_LIMITS, ids=lambda values: f"{values!r:.30}")
def test_bounds_of_a_step_size_are_two_numbers_in_order(tmp_path: Path, values: object) -> None:
    with pytest.raises(ModelError, match=r"^time_step_limit must be two numbers, the lower bound first .*, not "):
        read(tmp_path, small("nemotron-h", time_step_limit=values))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "10⁹ layers": (small("llama", num_hidden_layers=10**9), r"num_hidden_layers is 1000000000, but .* at most 4,096"),
    "10⁹ layers with a rule": (small("gemma3 text", num_hidden_layers=10**9), r"num_hidden_layers is 1000000000"),
    "10⁹ layers beside a pattern": (small("nemotron-h", num_hidden_layers=10**9), r"num_hidden_layers is 1000000000"),
    "a tower of 10⁹ layers": (
        {**small("gemma3"), "vision_config": {"num_hidden_layers": 10**9}},
        r"vision_config.num_hidden_layers is 1000000000, but must be at most 4,096",
    ),
    "an encoder of 10⁹ layers": (small("whisper", encoder_layers=10**9), r"encoder_layers is 1000000000"),
    "a width of 40 digits": (
        small("llama", hidden_size=10**39),
        r"hidden_size is 10+, but must be at most 2,147,483,647",
    ),
    "a negative width": (small("llama", hidden_size=-5), r"hidden_size is -5, but must be at least 1"),
    "no vocabulary": (small("llama", vocab_size=0), r"vocab_size is 0, but must be at least 1"),
    "no KV heads": (small("llama", num_key_value_heads=0), r"num_key_value_heads is 0"),
    "a negative window": (small("mistral", sliding_window=-1), r"sliding_window is -1, but must be at least 1"),
    "an endless length": (small("llama", max_position_embeddings=float("inf")), r"must be a whole number, not inf"),
    "a norm that is no number": (small("llama", rms_norm_eps=float("nan")), r"rms_norm_eps must be a number, not nan"),
    "a list with what is no number": (
        small("falcon h1", ssm_multipliers=[1.0, float("nan"), 1.0, 1.0, 1.0]),
        r"ssm_multipliers must be a list of numbers, not \[1.0, nan,",
    ),
    "a list with infinity": (
        small("falcon h1", mlp_multipliers=[1.0, {"__float__": "Infinity"}]),
        r"mlp_multipliers must be a list of numbers, not \[1.0, inf\]",
    ),
    "a division by nothing": (small("granite", logits_scaling=0), r"logits_scaling must be a number other than 0"),
    "Mamba heads that do not group": (
        small("nemotron-h", n_groups=3),
        r"mamba_num_heads is 8, no multiple of n_groups, 3",
    ),
    "Mamba heads of Granite that do not group": (
        small("granite hybrid", mamba_n_groups=3),
        r"mamba_n_heads is 8, no multiple of mamba_n_groups, 3",
    ),
    "Mamba heads of Falcon that do not group": (small("falcon h1", mamba_n_groups=4), r"is 6, no multiple of .* 4"),
    "Mamba heads of Zamba that do not group": (
        small("zamba2", mamba_ngroups=5),
        r"n_mamba_heads is 8, no multiple of mamba_ngroups, 5",
    ),
    # Fields of Kimi-K3's text model, as moonshotai/Kimi-K3 sets them.
    "parts of Kimi-K3": (
        small("kimi linear", routed_expert_hidden_size=32, latent_moe_use_norm=True, attn_res_block_size=4),
        r"sets attn_res_block_size, latent_moe_use_norm, routed_expert_hidden_size, as Kimi-K3 .* only Kimi-Linear can",
    ),
    "gates of Kimi-K3": (
        small(
            "kimi linear",
            mla_use_output_gate=True,
            linear_attn_config={**SMALL["kimi linear"]["linear_attn_config"], "use_full_rank_gate": True},
        ),
        r"sets mla_use_output_gate, linear_attn_config.use_full_rank_gate, as Kimi-K3",
    ),
    "full layers without a gate": (
        small("qwen3.5", attn_output_gate=False),
        r"text_config.attn_output_gate is false, .* known only with a gate",
    ),
    "another gate of linear layers": (
        small("qwen3.5 moe", output_gate_type="sigmoid"),
        r"text_config.output_gate_type: unknown value 'sigmoid'; known: silu, swish",
    ),
    "Jamba without attention": (
        small("jamba", attn_layer_offset=4),
        r"attn_layer_offset is 4, but must be below attn_layer_period, 4",
    ),
    "Jamba without its experts": (small("jamba", expert_layer_offset=9), r"expert_layer_offset is 9, but .*_period, 2"),
    "MLPs of no width": (
        small("lfm2", block_ffn_dim_multiplier=0),
        r"intermediate size of 128 and block_ffn_dim_multiplier 0 make MLPs 0 wide; .* from 1 to",
    ),
    "MLPs of a negative width": (small("lfm2", block_ffn_dim_multiplier=-1.0), r"make MLPs -85 wide"),
    "MLPs of an endless width": (small("lfm2", block_ffn_dim_multiplier=1e38), r"make MLPs 8\d+ wide"),
    "a fraction of layers": (
        small("llama", num_hidden_layers=4.5),
        r"num_hidden_layers must be a whole number, not 4.5",
    ),
    "one architecture, not a list": (
        {**small("llama"), "architectures": "LlamaForCausalLM"},
        r"architectures must be a list of strings, not 'LlamaForCausalLM'",
    ),
    "an empty list of architectures": ({**small("llama"), "architectures": []}, r"names no architectures"),
    "a text part that is a list": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": [1]},
        r"text_config must be an object, not \[1\]",
    ),
    "quantization that is a list": (
        {**small("llama"), "quantization_config": []},
        r"quantization_config must be an object",
    ),
    "quantization that is not known": (
        {**small("llama"), "quantization_config": {"quant_method": "bitsandbytes"}},
        r"quant_method: unknown value 'bitsandbytes'; known: awq, compressed-tensors, fp8, gptq, modelopt, mxfp4",
    ),
    "more experts than there are": (small("qwen3 moe", num_experts_per_tok=9), r"is 9, but a layer has only 8 experts"),
    "more experts in a text part": (
        small("qwen3.5 moe", num_experts_per_tok=99),
        r"text_config.num_experts_per_tok is 99, but a layer has only",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_configs_are_one_line_before_anything_is_built(tmp_path: Path, case: str) -> None:
    config, message = HOSTILE[case]
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [name for name, config in SMALL.items() if "num_hidden_layers" in config.get("text_config", config)],
)
def test_no_family_builds_10_to_the_9_layers(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"num_hidden_layers is 1000000000"):
        read(tmp_path, small(name, num_hidden_layers=10**9, layer_types=None))


def test_a_byte_order_mark_is_passed_over_and_utf_16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(small("llama"))
    path.write_bytes(text.encode("utf-8-sig"))
    assert load(path).num_layers == 4
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ModelError, match=r"config.json: it is UTF-16; save it again as UTF-8"):
            load(path)
    path.write_bytes(b'{"architectures": ["\xe4"]}')
    with pytest.raises(ModelError, match=r"it is not UTF-8 \(invalid continuation byte at byte 20\)"):
        load(path)


@pytest.mark.parametrize("text", ["", "[" * 200_000, '{"hidden_size": ' + "9" * 5000 + "}", "{'single': 1}"])
def test_json_that_python_stumbles_over_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="is not valid JSON: ") as caught:
        load(path)
    assert "\n" not in str(caught.value) and "sys." not in str(caught.value)


def test_a_directory_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(tmp_path)


def test_an_unknown_name_suggests_close_ones_and_where_to_look() -> None:
    with pytest.raises(ModelError, match=r"'gemma4-31b'; did you mean gemma-4-31b .*`windowpane models`"):
        load("gemma4-31b")
    with pytest.raises(ModelError, match=r"nearest shipped shape is qwen3-8b"):
        load("Qwen/Qwen3-8B-Imagined")
    with pytest.raises(ModelError, match=r"shipped model 'xyzzy' \(`windowpane models`"):
        load("xyzzy")
    with pytest.raises(ModelError, match="cannot read"):
        load("x" * 5000)


@pytest.mark.parametrize("architecture", ["RWKV7ForCausalLM", "OlmoHybridForCausalLM", "Mamba2ForCausalLM", "X"])
def test_an_architecture_that_resembles_none_is_told_no_nearest_one(tmp_path: Path, architecture: str) -> None:
    message = rf"'{architecture}'; none of \d\d known ones .* near {architecture}, .* `windowpane models` lists"
    with pytest.raises(ModelError, match=message):
        read(tmp_path, {"architectures": [architecture], "hidden_size": 64})


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("LlamaForCasualLM", "LlamaForCausalLM"), ("Zamba2ForSequenceClassification", "Zamba2ForCausalLM")],
)
def test_a_name_that_is_nearly_known_is_told_which(tmp_path: Path, misspelt: str, meant: str) -> None:
    with pytest.raises(ModelError, match=rf"'{misspelt}'; of \d\d known ones the nearest .* {meant}"):
        read(tmp_path, {"architectures": [misspelt]})


@pytest.mark.parametrize(
    ("architecture", "key", "part", "text_model"),
    [  # as LiquidAI/LFM2-VL-1.6B and nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16 nest theirs
        ("Lfm2VlForConditionalGeneration", "text_config", without(small("lfm2"), "architectures"), "Lfm2ForCausalLM"),
        ("NemotronH_Nano_VL_V2", "llm_config", small("nemotron-h"), "NemotronHForCausalLM"),
        ("OtherVLModel", "text_config", small("qwen3.5")["text_config"], "Qwen3_5ForCausalLM"),
    ],
)
def test_the_text_part_of_an_unknown_model_can_be_planned_as_the_error_says(
    tmp_path: Path, architecture: str, key: str, part: dict[str, Any], text_model: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {"architectures": [architecture], key: part})
    told = f'save {key} as a config.json of its own, with "architectures": ["{text_model}"] in it'
    assert str(caught.value) == f"unknown architecture '{architecture}'; its text model alone can be planned: {told}"
    assert read(tmp_path, {**part, "architectures": [text_model]}).num_layers == 4
    with pytest.raises(ModelError, match=r"names no architectures; of .* nearest .*Lfm2ForCausalLM"):
        read(tmp_path, {"model_type": "lfm2", key: part})
    with pytest.raises(ModelError, match=r"none of .* known ones has a name near"):
        read(tmp_path, {"architectures": [architecture], key: {**part, "hidden_size": None}})


def test_shipped_names_are_sorted() -> None:
    assert shipped_names() == sorted(shipped_names())
    assert "gemma-4-31b" in shipped_names()


def test_what_no_retention_describes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"DeepseekV4ForCausalLM.*compressed entry"):
        read(tmp_path, {"architectures": ["DeepseekV4ForCausalLM"]})


def test_exaone_patterns_are_numbers_letters_or_nothing(tmp_path: Path) -> None:
    assert kept(read(tmp_path, small("exaone4"))) == [Window(8), Full()] * 2
    letters = read(tmp_path, small("exaone4", sliding_window_pattern="GL"))
    assert kept(letters) == [Full(), Window(8), Full(), Full()], "the last layer is full whatever the letters say"
    assert kept(read(tmp_path, {**small("exaone4"), "sliding_window": None})) == [Full()] * 4
    with pytest.raises(ModelError, match="letters L and G"):
        read(tmp_path, small("exaone4", sliding_window_pattern="LX"))


def test_a_phi_window_is_on_every_layer(tmp_path: Path) -> None:
    assert kept(read(tmp_path, small("phi3", sliding_window=8))) == [Window(8)] * 4
    assert kept(read(tmp_path, small("phi3"))) == [Full()] * 4


def test_layers_with_two_caches_own_both(tmp_path: Path) -> None:
    falcon = read(tmp_path, small("falcon h1"))
    assert [c.layer for c in falcon.token_caches] == [c.layer for c in falcon.state_caches] == [0, 1, 2, 3]
    zamba = read(tmp_path, small("zamba2"))
    assert [c.layer for c in zamba.state_caches] == list(range(7))
    assert [c.layer for c in zamba.token_caches] == [1, 2, 4, 5, 6], "shared weights, but K and V of their own"
    whisper = read(tmp_path, small("whisper"))
    assert kept(whisper) == [Full(), Cross(30)] * 2


def test_kimi_counts_layers_from_one_and_wants_each_named_once(tmp_path: Path) -> None:
    assert [c.layer for c in read(tmp_path, small("kimi linear")).token_caches] == [1, 3]
    config = small("kimi linear")
    config["linear_attn_config"]["kda_layers"] = [1, 2]
    with pytest.raises(ModelError, match=r"linear_attn_config\.full_attn_layers and kda_layers"):
        read(tmp_path, config)


def test_gates_of_qwen_3_5_may_be_named(tmp_path: Path) -> None:
    # Releases of Qwen3.8 27B say both.
    named = read(tmp_path, small("qwen3.5", attn_output_gate=True, output_gate_type="swish"))
    assert named.tensors == read(tmp_path, small("qwen3.5")).tensors


def test_kimi_k3s_fields_may_say_that_there_is_nothing_of_it(tmp_path: Path) -> None:
    nothing = {"mla_use_output_gate": False, "attn_res_block_size": 0, "routed_expert_hidden_size": None}
    assert read(tmp_path, small("kimi linear") | nothing).tensors == read(tmp_path, small("kimi linear")).tensors


def test_lfm_2_and_recurrent_gemma_mix_states_among_their_attention(tmp_path: Path) -> None:
    lfm2 = read(tmp_path, small("lfm2", layer_types=None, full_attn_idxs=[3]))
    assert ([c.layer for c in lfm2.token_caches], len(lfm2.state_caches)) == ([3], 3)
    gemma = read(tmp_path, small("recurrent gemma"))
    assert kept(gemma) == [Window(8)]
    assert [c.layer for c in gemma.token_caches] == [2]
    assert gemma.max_position == 512
    assert any("trained on" in note for note in load("recurrentgemma-9b").notes)


def test_lfm_2_ties_its_head_as_tie_embedding_says_where_it_is_given(tmp_path: Path) -> None:
    def is_tied(**fields: bool) -> bool:
        spec = read(tmp_path, small("lfm2", **fields))
        return all(tensor.name != "lm_head.weight" for tensor in spec.tensors)

    assert is_tied()
    assert not is_tied(tie_word_embeddings=False)
    assert is_tied(tie_embedding=True, tie_word_embeddings=False)
    assert not is_tied(tie_embedding=False, tie_word_embeddings=True)


def test_falcon_h1_may_expand_by_half_a_width(tmp_path: Path) -> None:
    """As its release of 90 million weights does."""
    config = small("falcon h1", mamba_expand=1.5)
    assert read(tmp_path, config).caches == read(tmp_path, small("falcon h1")).caches
    with pytest.raises(ModelError, match="mamba_expand must be a whole number"):
        read(tmp_path, without(config, "mamba_d_ssm"))


def test_sparse_attention_keeps_every_token_and_an_index_key(tmp_path: Path) -> None:
    """What a sparse layer reads changes with each token, so nothing may be forgotten."""
    for name, index_layers in (("deepseek v3.2", [0, 1, 2, 3]), ("glm moe dsa", [0, 2]), ("minimax m3", [2, 3])):
        spec = read(tmp_path, small(name))
        assert set(map(type, kept(spec))) == {Full}
        assert [c.layer for c in spec.token_caches if c.replicated and c.key_dim in (8, 16)] == index_layers


def test_qwen_3_names_its_experts_either_way(tmp_path: Path) -> None:
    config = small("qwen3 moe")
    expected = read(tmp_path, config).tensors
    config["num_local_experts"] = config.pop("num_experts")
    assert read(tmp_path, config).tensors == expected
