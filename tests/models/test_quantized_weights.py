"""What a quantization config stores for a weight, which weights it leaves alone, and what it asks of the KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_targets

import windowpane.models
from tests.models.small_configs import small
from windowpane.models import ModelError, load
from windowpane.models.config import Config
from windowpane.models.quantization import STORED_BYTES, Quantization, read_quantization
from windowpane.models.tensors import TensorSpec

WEIGHT = TensorSpec("model.layers.0.mlp.down_proj.weight", (256, 512), linear=True)
STACKED = TensorSpec("model.layers.0.mlp.experts.{}.down_proj.weight", (8, 256, 512), linear=True, stacked=True)


def quantization(**fields: Any) -> Quantization:
    result = read_quantization(Config({"quantization_config": fields}))
    assert result is not None
    return result


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel", **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def stored(scheme: Quantization, weight: TensorSpec = WEIGHT) -> dict[str, tuple[tuple[int, ...], str | None]]:
    return {t.name.removeprefix("model.layers.0.mlp."): (t.shape, t.dtype) for t in scheme.stored(weight)}


def test_packed_int4_with_groups_and_zero_points() -> None:
    scheme = quantization(**compressed(strategy="group", group_size=32, symmetric=False, actorder="group"))
    assert scheme.scheme == "int4"
    assert stored(scheme) == {
        "down_proj.weight_packed": ((256, 64), "int32"),
        "down_proj.weight_scale": ((256, 16), None),
        "down_proj.weight_shape": ((2,), "int64"),
        "down_proj.weight_zero_point": ((32, 16), "int32"),
        "down_proj.weight_g_idx": ((512,), "int32"),
    }


def test_packed_int8_per_channel() -> None:
    scheme = quantization(**compressed(num_bits=8, symmetric=True))
    assert scheme.scheme == "int8"
    assert stored(scheme)["down_proj.weight_packed"] == ((256, 128), "int32")
    assert stored(scheme)["down_proj.weight_scale"] == ((256, 1), None)


def test_experts_keep_their_axis() -> None:
    scheme = quantization(**compressed(strategy="group", group_size=128))
    assert stored(scheme, STACKED)["experts.{}.down_proj.weight_packed"] == ((8, 256, 64), "int32")


def test_awq_is_input_first() -> None:
    assert stored(quantization(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm")) == {
        "down_proj.qweight": ((512, 32), "int32"),
        "down_proj.qzeros": ((4, 32), "int32"),
        "down_proj.scales": ((4, 256), None),
    }


def test_gptq_names_each_inputs_group() -> None:
    assert stored(quantization(quant_method="gptq", bits=8, group_size=-1, sym=True)) == {
        "down_proj.qweight": ((128, 256), "int32"),
        "down_proj.qzeros": ((1, 64), "int32"),
        "down_proj.scales": ((1, 256), None),
        "down_proj.g_idx": ((512,), "int32"),
    }


def test_fp8_scales_are_per_tensor_channel_or_block() -> None:
    per_tensor = quantization(quant_method="fp8", activation_scheme="static")
    assert stored(per_tensor) == {
        "down_proj.weight": ((256, 512), "fp8_e4m3"),
        "down_proj.weight_scale": ((1,), "float32"),
        "down_proj.input_scale": ((1,), "float32"),
    }
    blocks = quantization(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 100])
    assert stored(blocks)["down_proj.weight_scale_inv"] == ((2, 6), None)
    channel = quantization(**compressed("float-quantized", num_bits=8, type="float"))
    assert stored(channel)["down_proj.weight_scale"] == ((256, 1), None)
    assert {per_tensor.scheme, blocks.scheme, channel.scheme} == {"fp8"}


def test_mxfp4_packs_experts_only_and_turns_them_output_first() -> None:
    scheme = load("gpt-oss-20b").quantization
    assert scheme is not None
    fused = TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (32, 2880, 5760), linear=True, transposed=True)
    assert stored(scheme, fused) == {
        "experts.gate_up_proj_blocks": ((32, 5760, 90, 16), "uint8"),
        "experts.gate_up_proj_scales": ((32, 5760, 90), "uint8"),
    }
    attention = TensorSpec("model.layers.0.self_attn.q_proj.weight", (4096, 2880), linear=True)
    assert scheme.stored(attention) == [attention]


@pytest.mark.parametrize(
    ("pattern", "ignored"),
    [
        ("re:.*down_proj", True),
        ("re:down_proj", False),  # a regular expression starts at the beginning of the name
        ("model.layers.0.mlp.down_proj", True),
        ("model.layers.0", True),
        ("model.layers.*.mlp", True),
        ("down", False),
        ("model.layers.00", False),
    ],
)
def test_ignored_modules_stay_as_they_are(pattern: str, ignored: bool) -> None:
    scheme = quantization(**compressed(), ignore=[pattern])
    assert (scheme.stored(WEIGHT) == [WEIGHT]) is ignored


def test_targets_choose_the_format_of_each_module() -> None:
    config = compressed(strategy="group", group_size=32)
    config["config_groups"]["group_0"]["targets"] = ["re:.*up_proj"]
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "int"}}
    assert stored(quantization(**config))["down_proj.weight_packed"] == ((256, 128), "int32")


@pytest.mark.parametrize("targets", [["Linear"], ["Linear", "re:.*o_proj"]])
@pytest.mark.parametrize("named", ["model.layers.0.mlp.down_proj", "re:.*down_proj"])
@pytest.mark.parametrize("first", [True, False])
def test_a_target_that_names_a_module_wins_over_linear_in_any_order(
    targets: list[str], named: str, first: bool
) -> None:
    groups = {
        "all": {"targets": targets, "weights": {"num_bits": 4, "type": "int"}},
        "one": {"targets": [named], "weights": {"num_bits": 8, "type": "int"}},
    }
    ordered = groups if not first else {key: groups[key] for key in ("one", "all")}
    scheme = quantization(quant_method="compressed-tensors", format="pack-quantized", config_groups=ordered)
    assert stored(scheme)["down_proj.weight_packed"] == ((256, 128), "int32")
    assert scheme.stored(replace(WEIGHT, name="model.layers.0.mlp.up_proj.weight"))[0].shape == (256, 64)


def test_a_name_wins_over_a_pattern_and_the_lesser_pattern_over_the_greater() -> None:
    """As `compressed_tensors.utils.match.match_targets` orders them."""
    module = "model.layers.0.mlp.down_proj"
    for targets, bits in (
        ({"re:.*": 4, module: 8}, 8),
        ({"re:model.*": 8, "re:.*down_proj": 4}, 4),
        ({"re:.*down_proj": 4, "re:model.*": 8}, 4),
    ):
        ordered = match_targets(module, torch.nn.Linear(1, 1), targets)
        assert targets[ordered[0]] == bits
        groups = {t: {"targets": [t], "weights": {"num_bits": b, "type": "int"}} for t, b in targets.items()}
        scheme = quantization(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
        assert scheme.stored(WEIGHT)[0].shape == (256, 512 * bits // 32)


@pytest.mark.parametrize(
    "names",
    [
        ["mlp.down_proj", "self_attn.q_proj"],
        [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]],
    ],
)
def test_gptq_quantizes_the_modules_of_a_block_that_it_names(names: list[Any]) -> None:
    scheme = quantization(quant_method="gptq", bits=4, modules_in_block_to_quantize=names)
    assert scheme.format_of(WEIGHT) is not None
    for module in ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj", "lm_head"):
        assert scheme.format_of(replace(WEIGHT, name=f"{module}.weight")) is None
    with_head = quantization(quant_method="gptq", bits=4, modules_in_block_to_quantize=names, lm_head=True)
    assert with_head.format_of(replace(WEIGHT, name="lm_head.weight")) is not None


def test_gptq_quantizes_all_modules_where_it_names_none() -> None:
    for given in ({}, {"modules_in_block_to_quantize": None}, {"modules_in_block_to_quantize": []}):
        assert quantization(quant_method="gptq", bits=4, **given).format_of(WEIGHT) is not None
    with pytest.raises(ModelError, match=r"modules_in_block_to_quantize must be a list of module names"):
        quantization(quant_method="gptq", bits=4, modules_in_block_to_quantize=["mlp", ["self_attn"]])


def test_awq_gptq_and_fp8_leave_the_lm_head_alone() -> None:
    head = TensorSpec("lm_head.weight", (1024, 256), linear=True)
    for fields in ({"quant_method": "awq"}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}):
        assert quantization(**fields).stored(head) == [head]
    assert quantization(quant_method="gptq", bits=4, lm_head=True).stored(head) != [head]
    dynamic = quantization(quant_method="gptq", bits=4, dynamic={"-:.*down_proj": {}})
    assert dynamic.stored(WEIGHT) == [WEIGHT]


def test_gptq_rules_that_change_nothing_are_passed_over() -> None:
    # The rules of Qwen/Qwen3.5-35B-A3B-GPTQ-Int4, and one with the values that all modules have.
    official = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}}
    scheme = quantization(quant_method="gptq", bits=4, dynamic={**official, "+:.*down_proj": {"bits": 4}})
    head = TensorSpec("lm_head.weight", (1024, 256), linear=True)
    assert scheme.stored(WEIGHT) != [WEIGHT]
    assert scheme.stored(head) == [head]
    attends = replace(WEIGHT, name="model.layers.0.self_attn.o_proj.weight")
    assert scheme.stored(attends) == [attends]


def test_the_first_gptq_rule_that_fits_a_module_decides_about_it() -> None:
    kept, left_out = {"+:.*layers\\.0\\..*": {}}, {"-:.*up_proj|.*down_proj": {}}
    elsewhere = replace(WEIGHT, name="model.layers.1.mlp.down_proj.weight")
    scheme = quantization(quant_method="gptq", bits=4, dynamic=kept | left_out)
    assert (scheme.stored(WEIGHT) != [WEIGHT], scheme.stored(elsewhere)) == (True, [elsewhere])
    other_order = quantization(quant_method="gptq", bits=4, dynamic=left_out | kept)
    assert other_order.stored(WEIGHT) == [WEIGHT]


def test_a_pattern_that_is_no_regular_expression_is_named() -> None:
    for fields in ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:[": {}}}, {**compressed(), "ignore": ["re:["]}):
        with pytest.raises(ModelError, match=r"'\[' is no regular expression: unterminated"):
            quantization(**fields).stored(WEIGHT)


@pytest.mark.parametrize("where", ["", "text_config."])
def test_what_mlx_has_quantized_is_refused_and_not_counted_as_bf16(where: str) -> None:
    # mlx-community/granite-4.0-h-350m-4bit; mlx-lm writes the same into `quantization_config` where it is newer.
    fields = {"quantization": {"group_size": 64, "bits": 4}}
    text = Config(fields, where) if where else None
    with pytest.raises(ModelError, match=rf"^{where}quantization is .*64, 'bits': 4}}: .*MLX.*original checkpoint"):
        read_quantization(Config({}) if where else Config(fields), text)
    assert read_quantization(Config({"quantization": None})) is None


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_what_the_checkpoint_asks_of_the_kv_cache(fields: dict[str, Any], scheme: str | None) -> None:
    assert quantization(**compressed(), **fields).kv_cache_scheme == scheme


def test_the_spec_names_the_schemes(tmp_path: Path) -> None:
    assert (load("gemma-4-31b-awq-4bit").weight_scheme, load("gpt-oss-20b").weight_scheme) == ("int4", "mxfp4")
    assert (load("gemma-4-31b").weight_scheme, load("gemma-4-31b").kv_cache_scheme) == (None, None)
    config = small("llama") | {
        "quantization_config": compressed() | {"kv_cache_scheme": {"type": "float", "num_bits": 8}}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).kv_cache_scheme == "fp8_e4m3"


def test_asymmetric_int4_adds_packed_zero_points() -> None:
    # 20.904 GB is what Gemma 4 31B weighs with zero points: 457 MB more than without.
    spec = load("gemma-4-31b")
    scheme = quantization(**compressed(strategy="group", group_size=32, symmetric=False), ignore=["lm_head"])
    parts = [p for t in spec.tensors for p in scheme.stored(t)]
    assert sum(p.elements * STORED_BYTES[p.dtype or spec.dtype] for p in parts) / 1e9 == pytest.approx(
        20.904, abs=0.0005
    )


def test_the_fp8_release_of_qwen_3_6_is_exactly_its_recorded_size(tmp_path: Path) -> None:
    # 37,454,789,472 bytes with the MTP layer, which is not loaded and takes 853,668,480.
    config = json.loads((Path(windowpane.models.__file__).parent / "shipped" / "qwen3.6-35b-a3b.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["in_proj_a", "in_proj_b"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load(tmp_path)
    assert spec.quantization is not None
    parts = [p for t in spec.tensors for p in spec.quantization.stored(t)]
    assert sum(p.elements * STORED_BYTES[p.dtype or spec.dtype] for p in parts) == 37_454_789_472 - 853_668_480


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": (
        {"quant_method": "bitsandbytes"},
        r"quant_method: unknown value 'bitsandbytes'; known: .*awq.*gptq",
    ),
    "no method": ({"bits": 4}, r"quant_method is missing; known: "),
    "unknown format": (compressed("marlin-24"), r"format: unknown value 'marlin-24'; known: float-quantized, pack-qu"),
    "no groups": ({**compressed(), "config_groups": {}}, r"config_groups is empty"),
    "unknown bits": (compressed(num_bits=3), r"weights.num_bits: unknown value 3; known: 4, 8"),
    "unknown strategy": (
        compressed(strategy="tensor_group"),
        r"strategy: unknown value 'tensor_group'; known: channel, gr",
    ),
    "group without a size": (compressed(strategy="group"), r"no .*group_0.weights.group_size"),
    "unknown awq bits": ({"quant_method": "awq", "bits": 8}, r"bits: unknown value 8; known: 4"),
    "unknown gptq bits": ({"quant_method": "gptq", "bits": 5}, r"bits: unknown value 5"),
    "gptq overrides": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*attn": {"bits": 8}}},
        r"dynamic\.\+:\.\*attn sets bits to 8, and all modules have 4; .* only -:PATTERN",
    ),
    "gptq overrides without a sign": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"lm_head": {"group_size": 32}}},
        r"dynamic\.lm_head sets group_size to 32, and all modules have 128",
    ),
    "an override that is no object": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"lm_head": 4}},
        r"dynamic\.lm_head must be an object, not 4",
    ),
    "MLX's fields": (
        {"group_size": 64, "bits": 4, "mode": "affine"},
        r"quantization_config is \{'group_size': 64, .* how MLX says .* use the original checkpoint, .*modelopt",
    ),
    "no group size": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size is 0; use a positive size"),
    "odd block": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be two positive sizes"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt: unknown value 'e5m2'; known: e4m3"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_unknown_quantization_says_what_is_known(case: str) -> None:
    fields, message = ERRORS[case]
    with pytest.raises(ModelError, match=message):
        quantization(**fields)


def test_a_weight_that_groups_do_not_divide_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"down_proj\.weight: 512 inputs are no multiple of the .* group size, 96"):
        quantization(**compressed(strategy="group", group_size=96)).stored(WEIGHT)
