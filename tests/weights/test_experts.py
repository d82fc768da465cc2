"""Experts of checkpoints: read as they are stored, and refused in one line where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.running.small_models import CONFIGS, QUANTIZED, reference, spec_of
from windowpane.lowering.linear import Parameters
from windowpane.lowering.packed import PackedWeight
from windowpane.models import ModelSpec, from_config
from windowpane.models.blocks import Experts, each
from windowpane.models.config import ModelError
from windowpane.models.tensors import RankPlace
from windowpane.weights import WeightsError, load_weights
from windowpane.weights.checkpoint import stored_tensors

CPU = torch.device("cpu")
FILE = "model.safetensors"


def load(path: Path, spec: ModelSpec, place: RankPlace | None = None) -> dict:
    return load_weights(path, spec, dtype=torch.float32, device=CPU, **({"place": place} if place else {}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reference("qwen3 experts").save_pretrained(tmp_path)
    return tmp_path


def test_a_missing_and_a_misshapen_expert_are_named(saved: Path) -> None:
    tensors = load_file(saved / FILE)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    other = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors.pop(name)
    tensors[other] = tensors[other][:-1].contiguous()
    save_file(tensors, saved / FILE)
    with pytest.raises(WeightsError) as caught:
        load(saved, spec_of("qwen3 experts"))
    assert f"missing: {name} [32, 64]" in str(caught.value)
    assert f"misshapen: {other} is [63, 32], not [64, 32]" in str(caught.value)


def test_a_rank_reads_its_own_experts(saved: Path) -> None:
    spec, name = spec_of("qwen3 experts"), "model.layers.0.mlp.experts.{}.up_proj.weight"
    whole = load(saved, spec)[name]
    halves = [load(saved, spec, RankPlace(rank, 2))[name] for rank in (0, 1)]
    assert [half.shape[0] for half in halves] == [4, 4]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("glm 4.5", "scoring_func", "softmax"),
        ("glm 4.5", "topk_method", "greedy"),
        ("minimax m2", "scoring_func", "softmax"),
        ("glm 4.5", "n_group", 3),
        ("mixtral", "num_experts_per_tok", 7),
    ],
)
def test_a_router_that_is_not_known_is_one_line(name: str, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field) as caught:
        from_config({**CONFIGS[name], field: value}, name)
    assert "\n" not in str(caught.value)


def test_mxfp4_is_read_as_it_is_stored(tmp_path: Path) -> None:
    """Two inputs to a byte, the first in its lower half; outputs of gate and up in turn."""
    spec = from_config(QUANTIZED["gpt-oss mxfp4"], "gpt-oss mxfp4")
    torch.manual_seed(3)
    tensors = {
        t.name: torch.randint(118, 130, t.shape, dtype=torch.uint8)
        if t.name.endswith("_scales")
        else torch.randint(0, 256, t.shape, dtype=torch.uint8)
        if t.name.endswith("_blocks")
        else torch.randn(t.shape)
        for t in stored_tensors(spec)
    }
    save_file(tensors, tmp_path / FILE)
    weights = load(tmp_path, spec)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = tensors[f"{name}_blocks"].int(), tensors[f"{name}_scales"]
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    pairs = torch.stack([values[blocks & 15], values[blocks >> 4]], dim=-1).flatten(-2)
    expected = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
    packed = weights[name]
    assert isinstance(packed, PackedWeight)
    assert torch.equal(packed.dequantize(torch.float32).view(expected.shape), expected)
    assert spec.decoder is not None
    layer = list(each(spec.decoder, Experts))[1]
    bound = Parameters(spec.decoder, weights).experts(layer.gate_up)
    assert torch.equal(bound[2].weight.dequantize(torch.float32), torch.cat([expected[2, 0::2], expected[2, 1::2]]))
