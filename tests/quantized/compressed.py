"""Small models quantized and saved by the `compressed-tensors` library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from tests.running.small_models import CONFIGS, build


def config_of(name: str) -> dict[str, Any]:
    """As the other tests' model of that name, and wide enough for groups of 128."""
    return {**CONFIGS[name], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}


def save_quantized(directory: Path, config: dict[str, Any], form: str, ignore: list[str], **weights: Any) -> None:
    """A checkpoint of a random model: each weight is quantized by its own least and largest values."""
    model = build(config)
    args = QuantizationArgs(**weights)
    scheme = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": args}}, format=form, ignore=ignore
    )
    apply_quantization_config(model, scheme, show_progress=False)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                _calibrate(module, args)
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    save_file({k: t.contiguous() for k, t in model.state_dict().items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    compressor.update_config(str(directory))


def decompressed(directory: Path, config: dict[str, Any]) -> torch.nn.Module:
    """The library's own reading of the checkpoint, in a plain model."""
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    described = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = next(iter(QuantizationConfig.model_validate(_known(described)).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(described["format"])
    stored = load_file(directory / "model.safetensors")
    model = build(config)
    plain = {}
    for key in model.state_dict():
        module = key.removesuffix(".weight")
        parts = {k.removeprefix(f"{module}."): t for k, t in stored.items() if k.startswith(f"{module}.")}
        plain[key] = compressor.decompress(parts, scheme)["weight"] if "weight_scale" in parts else stored[key]
    model.load_state_dict(plain)
    return model


def _known(described: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in described.items() if k in QuantizationConfig.model_fields}


def _calibrate(module: torch.nn.Module, args: QuantizationArgs) -> None:
    weight = module.weight
    if args.strategy == "block":
        rows, columns = args.block_structure
        cut = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        least, most = cut.amin(dim=(1, 3)), cut.amax(dim=(1, 3))
    else:
        group = {"group": args.group_size, "channel": weight.shape[1]}.get(args.strategy)
        spans = weight.reshape(1, 1, -1) if group is None else weight.unflatten(1, (-1, group))
        least, most = spans.amin(-1), spans.amax(-1)
    scale, zero_point = calculate_qparams(least, most, args)
    module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero_point.reshape(module.weight_zero_point.shape))
