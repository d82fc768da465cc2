"""Adapters of small models: as PEFT saves them, and merged into the weights they are for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from windowpane.lowering.linear import Weights
from windowpane.models import ModelSpec
from windowpane.models.adapters import AdapterRoom, AdapterShape, adaptable
from windowpane.models.blocks import Projection
from windowpane.models.tensors import TensorSpec

RANK, ALPHA = 4, 12
_ALL = AdapterRoom(1, RANK)

Delta = Callable[[torch.Tensor], torch.Tensor]


def modules(spec: ModelSpec) -> Iterator[tuple[str, TensorSpec, int | None, int, int]]:
    """(module, its weight's tensor, which expert of it, outputs, inputs) of every layer that can have an adapter."""
    assert spec.decoder is not None
    for projection in adaptable(spec.decoder, _ALL):
        shape = AdapterShape.of(projection)
        for weight, outputs in zip(projection.weights, shape.part_outputs, strict=True):
            if isinstance(projection, Projection):
                yield weight.module, weight, None, outputs, shape.inputs
            elif weight.stacked:
                for expert in range(shape.experts):
                    yield weight.module.replace("{}", str(expert)), weight, expert, outputs, shape.inputs


def fused(spec: ModelSpec) -> Iterator[tuple[str, TensorSpec, AdapterShape]]:
    """(name of the tensor in the file, weight, shape) of experts whose checkpoint has them in one tensor."""
    assert spec.decoder is not None
    for projection in adaptable(spec.decoder, _ALL):
        weight, shape = projection.weights[0], AdapterShape.of(projection)
        if not isinstance(projection, Projection) and not weight.stacked:
            module, _, name = weight.module.rpartition(".")
            yield f"{module}.base_layer" if name == "gate_up_proj" else module, weight, shape


def write_adapter(
    path: Path, spec: ModelSpec, seed: int, *, only: tuple[str, ...] = (), rank: int = RANK, **config: Any
) -> dict[str, torch.Tensor]:
    """An adapter with large random values; gives what it adds to each tensor of the checkpoint, by its name."""
    path.mkdir(parents=True, exist_ok=True)
    generator, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    scale = config.get("lora_alpha", ALPHA) / (rank**0.5 if config.get("use_rslora") else rank)

    def pair(outputs: int, inputs: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (torch.randn(n, generator=generator) for n in ((rank, inputs), (outputs, rank)))
        a, b = a / inputs**0.5, 0.05 * b
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        return a, b

    for module, weight, expert, outputs, inputs in modules(spec):
        if only and not module.endswith(only):
            continue
        a, b = pair(outputs, inputs, module)
        delta = deltas.setdefault(weight.name, torch.zeros(weight.shape))
        (delta if expert is None else delta[expert]).copy_(scale * b @ a)
    for module, weight, shape in fused(spec):
        if only and not weight.module.endswith(only):
            continue
        a = torch.randn(shape.experts * rank, shape.inputs, generator=generator) / shape.inputs**0.5
        b = 0.05 * torch.randn(shape.outputs, rank * shape.experts, generator=generator)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        split = a.view(shape.experts, rank, -1), b.view(shape.outputs, rank, shape.experts)
        made = scale * torch.einsum("eri,ore->eoi", *split)
        deltas[weight.name] = made.transpose(1, 2).contiguous() if weight.transposed else made
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    save_file(tensors, path / "adapter_model.safetensors")
    return deltas


def merged(weights: Weights, deltas: dict[str, torch.Tensor]) -> Weights:
    """Weights with an adapter in them."""
    found: Weights = {}
    for name, tensor in weights.items():
        assert isinstance(tensor, torch.Tensor)
        found[name] = tensor + deltas[name] if name in deltas else tensor
    assert not set(deltas) - set(weights)
    return found
