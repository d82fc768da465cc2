"""Random checkpoints in any stored form, written tensor by tensor as a spec lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.running.small_models import CONFIGS, WINDOW
from windowpane import models
from windowpane.models import ModelSpec, from_config
from windowpane.models.tensors import TensorSpec
from windowpane.weights.checkpoint import stored_tensors

HEADLINE = "gemma-4-31b-awq-4bit"

# Of the checkpoint that people run on two cards, everything but its sizes: 5 sliding layers to a full one, KV heads of
# two sizes and numbers, K = V in the full ones, int4 in groups of 32.
TWIN_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "vocab_size": 512,
    "dtype": "float32",
    "num_hidden_layers": 12,
}


def twin_config() -> dict[str, Any]:
    path = Path(models.__file__).parent / "shipped" / f"{HEADLINE}.json"
    config: dict[str, Any] = json.loads(path.read_text())
    del config["_windowpane"]
    config["text_config"] |= TWIN_SIZES
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][: TWIN_SIZES["num_hidden_layers"]]
    return config


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": group},
        "ignore": ["lm_head"],
    }


_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SCHEMES: dict[str, dict[str, Any]] = {
    "int4 symmetric": _compressed(strategy="group", group_size=32, symmetric=True),
    "int4 with zero points": _compressed(strategy="group", group_size=64, symmetric=False),
    "int4 per channel": _compressed(strategy="channel", symmetric=False),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq, one group": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "fp8 by blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8 per tensor": {"quant_method": "fp8"},
}


def quantized_spec(scheme: str) -> ModelSpec:
    return from_config({**CONFIGS["qwen3"], **_SIZES, "quantization_config": SCHEMES[scheme]}, scheme)


_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
# Values of int4 lie within 8 of their middle, those of fp8 made here within 2 of 0.
_INT4_SCALE, _FP8_SCALE = 0.02, 0.1


def write_checkpoint(spec: ModelSpec, path: Path) -> Path:
    """Every stored tensor of `spec` at random, large enough that the model does not merely echo."""
    path.mkdir()
    shapes = {tensor.module: tensor.shape for tensor in spec.tensors}
    generator = torch.Generator().manual_seed(11)
    save_file({t.name: _random(t, shapes, spec, generator) for t in stored_tensors(spec)}, path / "model.safetensors")
    return path


def _random(
    tensor: TensorSpec, shapes: dict[str, tuple[int, ...]], spec: ModelSpec, generator: torch.Generator
) -> torch.Tensor:
    module, _, suffix = tensor.name.rpartition(".")
    dtype = _DTYPES[tensor.dtype or "float32"]
    if suffix == "weight_shape":
        return torch.tensor(shapes[module])
    if suffix.endswith("g_idx"):
        (inputs,) = tensor.shape
        groups = next(t.shape[0] for t in stored_tensors(spec) if t.name == f"{module}.scales")
        return (torch.arange(inputs) // (inputs // groups)).to(torch.int32)
    if dtype == torch.int32:
        # Around the middle, 8: a mean would make all outputs alike.
        nibbles = torch.randint(1, 16, (*tensor.shape, 8), generator=generator)
        return (nibbles << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
    values = torch.randn(tensor.shape, generator=generator)
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-2, 2).to(dtype)
    if "scale" in suffix:
        most = _FP8_SCALE if "fp8" in str(spec.weight_scheme) else _INT4_SCALE
        return most * (0.5 + torch.rand(tensor.shape, generator=generator))
    if len(tensor.shape) > 1:
        return (0.04 if "embed" in tensor.name else 0.15) * values  # a strong embedding would be echoed
    if suffix == "bias":
        return 0.1 * values
    norm = 0.3 if "q_norm" in tensor.name else 1.0  # Gemma 4's attention has no scale: trained norms keep scores small
    return norm + 0.1 * values
