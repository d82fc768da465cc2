"""Weight bytes per tensor-parallel rank: what is split, what is replicated, and which sizes do not work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.small_configs import SMALL, small
from windowpane.kv.caches import ShardingError
from windowpane.models import load, shipped_names
from windowpane.models.config import Config
from windowpane.models.families.llama import read as read_llama
from windowpane.models.quantization import STORED_BYTES
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import sharding_problem, text_tensors, weight_breakdown, weight_bytes

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
}


def read(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load(tmp_path)


def replicated_bytes(spec: ModelSpec) -> int:
    return sum(t.elements * STORED_BYTES[t.dtype or spec.dtype] for t in text_tensors(spec) if t.shard is None)


@st.composite
def llamas(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = kv_heads * draw(st.integers(1, 4))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": draw(st.sampled_from(["bfloat16", "float32"])),
        "vocab_size": draw(st.integers(1, 20)) * 16,
        "hidden_size": heads * 16,
        "intermediate_size": draw(st.integers(1, 8)) * 24,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }
    return read_llama(Config(config), "drawn")


@given(llamas(), st.integers(1, 16))
def test_ranks_together_hold_the_model_and_whatever_is_replicated(spec: ModelSpec, ranks: int) -> None:
    if sharding_problem(spec, ranks):
        with pytest.raises(ShardingError, match="tensor-parallel sizes that work: 1"):
            weight_bytes(spec, ranks)
        return
    surplus = weight_bytes(spec, ranks) * ranks - weight_bytes(spec, 1)
    everything_divides = spec.token_caches[0].kv_heads % ranks == 0
    assert surplus >= (ranks - 1) * replicated_bytes(spec)
    assert (surplus == (ranks - 1) * replicated_bytes(spec)) is everything_divides


def divides_in_two(name: str) -> bool:
    """Neither KV heads nor anything else (a single Mamba group, say) has to be replicated."""
    spec = load(name)
    split = [units for t in text_tensors(spec) if t.shard for _, units in t.shard.sections]
    return sharding_problem(spec, 2) is None and all(units % 2 == 0 for units in split)


@pytest.mark.parametrize("name", [n for n in shipped_names() if divides_in_two(n) and not load(n).quantization])
def test_two_ranks_split_every_shipped_model_evenly(name: str) -> None:
    spec = load(name)
    assert 2 * weight_bytes(spec, 2) - weight_bytes(spec, 1) == replicated_bytes(spec)


@pytest.mark.parametrize("name", SMALL)
def test_fused_projections_keep_their_sections_on_every_rank(tmp_path: Path, name: str) -> None:
    spec = read(tmp_path, SMALL[name])
    assert 2 * weight_bytes(spec, 2) >= weight_bytes(spec, 1)
    for tensor in text_tensors(spec):
        if tensor.shard:
            assert sum(length for length, _ in tensor.shard.sections) == tensor.shape[tensor.shard.axis]
            assert all(length % units == 0 for length, units in tensor.shard.sections)


def test_the_breakdown_adds_up_and_names_the_purpose() -> None:
    breakdown = weight_breakdown(load("qwen3-next-80b-a3b"))
    assert breakdown.total == weight_bytes(load("qwen3-next-80b-a3b"))
    assert breakdown.embedding == 2 * 2 * 151_936 * 2048
    assert breakdown.experts == 48 * 512 * 3 * 512 * 2048 * 2
    assert breakdown.state > breakdown.attention > 0


def test_few_kv_heads_are_replicated(tmp_path: Path) -> None:
    spec = read(tmp_path, small("llama"))
    k_proj = next(t for t in spec.tensors if t.name.endswith("layers.0.self_attn.k_proj.weight"))
    assert k_proj.on_rank(2).shape == (16, 64)
    assert k_proj.on_rank(4).shape == (16, 64)


def test_towers_and_tied_heads_are_not_loaded(tmp_path: Path) -> None:
    spec = read(tmp_path, small("gemma4"))
    assert {t.tower for t in spec.tensors} == {None, "vision"}
    assert all(t.tower is None and "lm_head" not in t.name for t in text_tensors(spec))


def test_ranks_that_do_not_divide_name_those_that_do() -> None:
    with pytest.raises(
        ShardingError, match=r"32 query heads.* over 3 tensor-parallel ranks; .* work: 1, 2, 4, 8, 16, 32$"
    ):
        weight_bytes(load("gemma-4-31b"), 3)
    with pytest.raises(ShardingError, match=r"smollm2-135m has 9 query heads, .* over 2 .* work: 1, 3$"):
        weight_bytes(load("smollm2-135m"), 2)
    with pytest.raises(ShardingError, match="0 tensor-parallel ranks"):
        weight_bytes(load("smollm2-135m"), 0)


def test_experts_that_do_not_divide_are_called_experts(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"experts.*: 7 experts do not divide over 2 .*; .* work: 1$"):
        weight_bytes(read(tmp_path, small("qwen3.5 moe", num_experts=7)), 2)
    with pytest.raises(ShardingError, match=r"mlp\..*: 127 units do not divide over 2 "):
        weight_bytes(read(tmp_path, small("llama", intermediate_size=127)), 2)


def test_a_rank_never_holds_part_of_a_quantization_group(tmp_path: Path) -> None:
    spec = read(tmp_path, small("llama", intermediate_size=192) | {"quantization_config": PACKED})
    assert sharding_problem(spec, 2) is None
    problem = sharding_problem(spec, 4)
    assert problem is not None
    assert "cut through quantization groups of 32" in problem


def test_mxfp4_experts_split_whole_so_that_any_power_of_two_works() -> None:
    spec = load("gpt-oss-120b")
    assert [n for n in range(1, 65) if sharding_problem(spec, n) is None] == [1, 2, 4, 8, 16, 32, 64]
    assert weight_breakdown(spec, 8).experts * 8 == weight_breakdown(spec, 1).experts
