"""Dummy weights: real shapes from a config alone, the same for the same seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.vllm_weights import LARGEST, draw_as_vllm
from tests.models.small_configs import SMALL, small
from tests.running.small_models import QUANTIZED
from windowpane.lowering.packed import PackedWeight
from windowpane.models import ModelSpec, load
from windowpane.models.weights import text_tensors
from windowpane.weights import dummy as dummy_weights
from windowpane.weights import load_weights


def spec_of(path: Path, name: str) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(small(name)))
    return load(path)


def dummy(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    return load_weights(None, spec, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=seed)


@pytest.mark.parametrize("name", SMALL)
def test_shapes_are_those_of_the_spec(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, name)
    made = dummy(spec)
    assert {key: tuple(value.shape) for key, value in made.items()} == {t.name: t.shape for t in text_tensors(spec)}
    assert all(value.isfinite().all() for value in made.values())


def test_a_tensor_depends_on_its_name_and_the_seed_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "llama")
    made, backwards = dummy(spec), dummy(replace(spec, tensors=spec.tensors[::-1]))
    assert all(torch.equal(made[name], backwards[name]) for name in made)
    other = dummy(spec, seed=1)
    assert not any(torch.equal(made[name], other[name]) for name in made)
    layers = [made[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_values_are_known_so_that_runs_can_be_compared(tmp_path: Path) -> None:
    norm = dummy(spec_of(tmp_path, "llama"))["model.norm.weight"]
    assert norm[:3].tolist() == pytest.approx([1.0451573, 0.9938431, 0.9869350], abs=1e-6)


@pytest.mark.parametrize(("name", "neutral"), [("llama", 1), ("gemma2", 0), ("gemma3 text", 0), ("gemma3n", 1)])
def test_norms_start_where_they_change_nothing(name: str, neutral: int, tmp_path: Path) -> None:
    made = dummy(spec_of(tmp_path, name))
    norms = torch.cat([value for key, value in made.items() if key.endswith("norm.weight")])
    assert norms.mean().item() == pytest.approx(neutral, abs=0.01)
    assert norms.std().item() == pytest.approx(0.02, rel=0.2)


def test_linear_weights_are_small_and_centred(tmp_path: Path) -> None:
    weight = dummy(spec_of(tmp_path, "llama"))["model.layers.0.mlp.up_proj.weight"]
    assert weight.mean().item() == pytest.approx(0, abs=0.001)
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_as_vllm_draws_them_weights_are_small_and_codes_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random_tensor", "random_packed"):
        monkeypatch.setattr(dummy_weights, name, getattr(dummy_weights, name))  # as it is again behind this test
    draw_as_vllm()
    (tmp_path / "config.json").write_text(json.dumps(QUANTIZED["gpt-oss mxfp4"]))
    made = dummy(load(tmp_path))
    packed = [weight for weight in made.values() if isinstance(weight, PackedWeight)]
    assert packed and not any(weight.units.any() or weight.scales.any() for weight in packed)
    plain = [weight for weight in made.values() if isinstance(weight, torch.Tensor) and weight.is_floating_point()]
    assert 0.99 * LARGEST < max(weight.abs().max().item() for weight in plain) <= LARGEST
