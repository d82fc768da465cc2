"""ModelOpt checkpoints: weights are counted in their format, KV scales are heard, and nothing passes as unquantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.published import PUBLISHED
from tests.models.small_configs import small
from windowpane.models import ModelError, from_config, load
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import parameter_count, weight_bytes
from windowpane.plan.config import EngineConfig
from windowpane.plan.planner import Plan, PlanError, make_plan
from windowpane.weights import load_weights

PRODUCER = {"name": "modelopt", "version": "0.33.0"}


def beside(algorithm: str, kv: str | None = None, **fields: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    return {"producer": PRODUCER, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": kv, **fields}}


def read(tmp_path: Path, config: dict[str, Any], quant: dict[str, Any] | None = None) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").unlink(missing_ok=True)
    if quant is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    return load(tmp_path)


def shipped(name: str) -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "windowpane" / "models" / "shipped" / f"{name}.json").read_text("utf-8")
    config = json.loads(text)
    config.pop("quantization_config", None)
    assert isinstance(config, dict)
    return config


# As nvidia/DeepSeek-V3-0324-NVFP4 has it: attention, gates, the head and the drafting layer keep their dtype.
DEEPSEEK_EXCLUDED = [
    "lm_head",
    "model.embed_tokens",
    "model.norm",
    "model.layers.61*",
    *(f"model.layers.{layer}.self_attn*" for layer in range(61)),
    *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 61)),
]


def test_nvfp4_deepseek_is_no_longer_planned_in_bfloat16(tmp_path: Path) -> None:
    config = shipped("deepseek-v3")
    quant = beside("NVFP4", None, group_size=16, exclude_modules=DEEPSEEK_EXCLUDED)
    spec = read(tmp_path, config, quant)
    assert spec.weight_scheme == "nvfp4"
    attention = [t for t in spec.tensors if ".self_attn." in t.name or t.name == "lm_head.weight"]
    assert spec.quantization is not None and not any(map(spec.quantization.format_of, attention))
    mlps = sum(t.elements for t in spec.tensors if t.linear and ".mlp." in t.name)
    rest = parameter_count(spec) - mlps
    assert weight_bytes(spec) == pytest.approx(mlps * 9 / 16 + 2 * rest, rel=1e-5)
    assert weight_bytes(spec) / 2**40 == pytest.approx(0.361, abs=0.001)
    assert weight_bytes(read(tmp_path, config)) / 1e9 == pytest.approx(1342, rel=0.01)


@pytest.mark.parametrize("flat", [False, True], ids=["a file of its own", "in config.json"])
def test_nvfp4_stores_half_a_byte_a_scale_for_16_and_two_numbers(tmp_path: Path, flat: bool) -> None:
    config = small("qwen3")
    if flat:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": PRODUCER,
            "config_groups": {"group_0": {"targets": ["Linear"]}},
        }
    quant = None if flat else beside("NVFP4", "FP8", group_size=16, exclude_modules=["lm_head"])
    spec = read(tmp_path, config, quant)
    assert spec.quantization is not None and spec.kv_cache_scheme == "fp8_e4m3"
    weight = next(t for t in spec.tensors if t.name.endswith("layers.0.mlp.up_proj.weight"))
    stored = {t.name.rsplit(".", 1)[1]: (t.shape, t.dtype) for t in spec.quantization.stored(weight)}
    assert stored == {
        "weight": ((128, 32), "uint8"),
        "weight_scale": ((128, 4), "fp8_e4m3"),
        "weight_scale_2": ((1,), "float32"),
        "input_scale": ((1,), "float32"),
    }
    linear = sum(t.elements for t in spec.tensors if t.linear and t.name != "lm_head.weight")
    modules = sum(t.linear for t in spec.tensors) - 1
    rest = parameter_count(spec) - linear
    assert weight_bytes(spec) == linear * 9 // 16 + 8 * modules + 2 * rest


def test_newer_releases_have_both_files(tmp_path: Path) -> None:
    config = {**small("llama"), "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert read(tmp_path, config, beside("FP8")).weight_scheme == "fp8"
    config["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match=r"config.json says .*'fp8', and hf_quant_config.json beside it that ModelOpt"):
        read(tmp_path, config, beside("NVFP4"))


def test_a_file_beside_the_config_wins_over_what_the_text_part_still_says(tmp_path: Path) -> None:
    """nvidia/Kimi-K2.5-NVFP4 keeps the int4 section of the model that it was made from."""
    kimi = PUBLISHED["moonshotai/Kimi-K2.5"].config
    excluded = ["lm_head", *(f"language_model.layers.{layer}.self_attn*" for layer in range(61))]
    spec = read(tmp_path, kimi, beside("NVFP4", "FP8", exclude_modules=excluded))
    assert (spec.weight_scheme, spec.kv_cache_scheme) == ("nvfp4", "fp8_e4m3")
    assert spec.quantization is not None
    assert not any(spec.quantization.format_of(t) for t in spec.tensors if ".self_attn." in t.name)


# As nvidia/Qwen3.6-35B-A3B-NVFP4 has it, in miniature.
MIXED = {
    **{
        f"model.language_model.layers.{n}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for n in range(4)
    },
    "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.language_model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO"},
}


def test_mixed_precision_names_a_format_for_each_module(tmp_path: Path) -> None:
    quant = beside("MIXED_PRECISION", "FP8", exclude_modules=["mtp*", "mtp.layers.0*"], quantized_layers=MIXED)
    spec = read(tmp_path, small("qwen3.5 moe", tie_word_embeddings=False), quant)
    assert spec.quantization is not None
    schemes: dict[str, set[str]] = {}
    for tensor in spec.tensors:
        if form := spec.quantization.format_of(tensor):
            schemes.setdefault(form.scheme, set()).add(tensor.module)
    assert schemes["fp8"] == {
        "model.language_model.layers.3.self_attn.q_proj",
        "model.language_model.layers.0.linear_attn.out_proj",
    }
    assert "lm_head" in schemes["nvfp4"]
    assert {name.split(".mlp.")[0] for name in schemes["nvfp4"] - {"lm_head"}} == {
        f"model.language_model.layers.{layer}" for layer in range(4)
    }
    assert not any(
        part.name.endswith("input_scale")
        for tensor in spec.tensors
        if ".experts." in tensor.name
        for part in spec.quantization.stored(tensor)
    )


def test_experts_that_are_listed_one_by_one_are_one_tensor(tmp_path: Path) -> None:
    stacked = [t for t in read(tmp_path, small("qwen3 moe")).tensors if t.part == "experts"]
    parts = [name.removesuffix(".weight") for tensor in stacked for name, _ in tensor.checkpoint_entries()]
    layers = {part: {"quant_algo": "NVFP4", "group_size": 16} for part in parts}
    spec = read(tmp_path, small("qwen3 moe"), beside("MIXED_PRECISION", quantized_layers=layers))
    assert spec.quantization is not None
    assert {t.part for t in spec.tensors if spec.quantization.format_of(t)} == {"experts"}
    layers[parts[5]] = {"quant_algo": "FP8"}
    with pytest.raises(ModelError, match=r"experts.5.gate_proj is FP8, but other experts of its layer are NVFP4"):
        read(tmp_path, small("qwen3 moe"), beside("MIXED_PRECISION", quantized_layers=layers))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown algorithm": (beside("W4A8_AWQ"), r"quant_algo: unknown value 'W4A8_AWQ'; known: FP8, MIXED_PRECISION"),
    "no algorithm": ({"producer": PRODUCER, "quantization": {}}, r"quant_algo is missing"),
    "an empty file": ({}, r"quant_algo is missing"),
    "another group": (beside("NVFP4", group_size=32), r"group_size is 32; NVFP4 is known with 16"),
    "mixed without layers": (beside("MIXED_PRECISION"), r"no quantization_config.quantization.quantized_layers"),
    "mixed with no layers": (beside("MIXED_PRECISION", quantized_layers={}), r"quantized_layers is empty"),
    "mixed with an unknown format": (
        beside("MIXED_PRECISION", quantized_layers={"model.layers.0.mlp.up_proj": {"quant_algo": "INT3"}}),
        r"quant_algo: unknown value 'INT3'",
    ),
    "a module of another model": (
        beside("MIXED_PRECISION", quantized_layers={"model.layers.0.mlp.w1": {"quant_algo": "FP8"}}),
        r"fits no weight|names layers.0.mlp.w1",
    ),
    "a module more than there are": (
        beside(
            "MIXED_PRECISION",
            quantized_layers={
                "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
                "model.layers.1.mlp.w3": {"quant_algo": "FP8"},
            },
        ),
        r"quantization_config names layers.1.mlp.w3, which .* does not have",
    ),
    "everything excluded": (beside("FP8", exclude_modules=["model*", "lm_head"]), r"fits no weight"),
    "one expert": (beside("FP8", exclude_modules=["model.layers.0.mlp.experts.3*"]), r"names one expert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path: Path, case: str) -> None:
    quant, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, small("llama"), quant)
    assert "\n" not in str(caught.value)


def planned(spec: ModelSpec, **flags: Any) -> Plan:
    return make_plan(spec, EngineConfig(max_model_len=512, **flags), gpu="h200")


def test_kv_of_the_checkpoint_is_what_auto_means(tmp_path: Path) -> None:
    spec = read(tmp_path, small("llama"), beside("FP8", "FP8"))
    plan = planned(spec)
    assert {g.kv_format.name for g in plan.sizing.layout.groups if g.kv_format} == {"fp8_e4m3"}
    assert planned(spec, kv_cache_dtype="bfloat16").sizing.layout.groups[0].kv_format.name == "bfloat16"  # type: ignore[union-attr]
    ours = next(peer for peer in plan.peers if peer.same_flags)
    unquantized = next(p for p in planned(read(tmp_path, small("llama"))).peers if p.same_flags)
    assert ours.bytes_per_request == unquantized.bytes_per_request / 2, "vLLM takes fp8 from the checkpoint too"
    nvfp4_kv = read(tmp_path, small("llama"), beside("NVFP4", "NVFP4"))
    with pytest.raises(
        PlanError, match=r"asks for KV in NVFP4, which is not known here; choose another with --kv-cache"
    ):
        planned(nvfp4_kv)
    assert planned(nvfp4_kv, kv_cache_dtype="bfloat16").capacity is not None


def test_fp8_weights_of_modelopt_run(tmp_path: Path) -> None:
    config = small("llama", tie_word_embeddings=False)
    spec = read(tmp_path, config, beside("FP8", exclude_modules=["lm_head"]))
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    assert spec.quantization is not None
    for tensor in spec.tensors:
        values = torch.randn(tensor.shape, generator=random)
        if spec.quantization.format_of(tensor) is None:
            tensors[tensor.name] = expected[tensor.name] = values.bfloat16()
            continue
        codes = values.to(torch.float8_e4m3fn)
        tensors |= {f"{tensor.module}.{which}_scale": torch.tensor(0.25) for which in ("weight", "input")}
        tensors[tensor.name] = codes
        expected[tensor.name] = codes.float() * 0.25
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, spec, dtype=torch.float32, device=torch.device("cpu"))
    for name, weight in expected.items():
        found = loaded[name]
        dense = found if isinstance(found, torch.Tensor) else found.dequantize(torch.float32)
        assert torch.allclose(dense.float(), weight.float()), name


def test_the_config_of_a_text_part_alone_is_heard() -> None:
    config = small("gemma3")
    config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    assert from_config(config, "nested").weight_scheme == "fp8"
