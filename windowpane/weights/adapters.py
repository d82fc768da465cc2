"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, checked as a whole before use.

Experts come either one by one (`mlp.experts.3.gate_proj.lora_A.weight`), or as PEFT's target_parameters writes them:
`mlp.experts.lora_A.weight`, [experts × rank, inputs], with a B of [outputs, rank × experts] in which the expert varies
fastest. Two parameters of one module are nested, as `experts.base_layer.lora_A.weight`, and told apart by their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from windowpane.lowering.adapters import Pair, PartPairs
from windowpane.models.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adaptable,
    AdapterConfig,
    AdapterError,
    AdapterRoom,
    AdapterShape,
    adaptable,
    adapter_name,
    read_adapter_config,
)
from windowpane.models.blocks import Decoder, ExpertProjection, Projection, tensors_of
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import RankPlace, TensorSpec
from windowpane.weights.checkpoint import is_of_shared_kv, plain_name

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.(?:default\.)?weight$")
_EXPERTS = re.compile(r"(.*\blayers\.\d+)\..*experts((?:\.base_layer)*)$")
MAX_NAMES = 5


def read_adapter(path: str | Path, spec: ModelSpec, room: AdapterRoom, place: RankPlace) -> dict[str, PartPairs]:
    """What one rank adds to each projection, by `adapter_name`; an AdapterError names what does not fit."""
    directory = Path(path)
    config = read_adapter_config(directory)
    assert spec.decoder is not None
    found = _File(config, _tensors(directory), spec)
    pairs: dict[str, PartPairs] = {}
    whole = AdapterRoom(room.slots, room.rank)
    for projection in adaptable(spec.decoder, whole):
        of_experts = (
            found.of_experts(projection) if isinstance(projection, ExpertProjection) else found.of_linear(projection)
        )
        if any(pair is not None for parts in of_experts for pair in parts):
            found.check(projection, of_experts, room)
            pairs[adapter_name(projection)] = list(_on_rank(projection, of_experts, place))
    found.check_rest(spec.decoder)
    return pairs


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = directory / WEIGHTS_FILE
    if not file.is_file():
        others = ", ".join(sorted(f.name for f in directory.glob("adapter_model.*"))) or "no weights"
        raise AdapterError(f"{directory} holds {others}; adapters are read from {WEIGHTS_FILE}")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"cannot read {file}: {error}") from None


@dataclass(slots=True)
class _Found:
    """A module's A and B under the names they have in the file."""

    module: str
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    a_name: str = ""
    b_name: str = ""


class _File:
    """The tensors of one adapter, by module; those that a projection took are gone."""

    def __init__(self, config: AdapterConfig, tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> None:
        self._config, self._spec = config, spec
        self._modules: dict[str, _Found] = {}
        self._experts: dict[str, list[_Found]] = {}
        strange = []
        for name, tensor in tensors.items():
            match = _TENSOR.match(name)
            if match is None or tensor.ndim != 2:
                strange.append(name)
                continue
            module = plain_name(match[1])
            module = f"model.{module}" if module.startswith("layers.") else module
            found = self._modules.setdefault(module, _Found(module))
            if match[2] == "A":
                found.a, found.a_name = tensor, name
            else:
                found.b, found.b_name = tensor, name
        if strange:
            raise self._error(f"{_listed(strange)} is no lora_A or lora_B of a linear layer")
        for found in self._modules.values():
            if found.a is None or found.b is None:
                raise self._error(f"{found.a_name or found.b_name} has no lora_{'B' if found.b is None else 'A'}")
        for module in [m for m in self._modules if _EXPERTS.match(m)]:
            layer = _EXPERTS.match(module)
            assert layer is not None
            self._experts.setdefault(layer[1], []).append(self._modules.pop(module))

    def of_linear(self, projection: Projection) -> list[list[Pair | None]]:
        return [[self._take(weight.module, *weight.shape) for weight in projection.weights]]

    def of_experts(self, projection: ExpertProjection) -> list[list[Pair | None]]:
        shape = AdapterShape.of(projection)
        fused = self._fused(projection, shape)
        if fused is not None:
            return fused
        found: list[list[Pair | None]] = []
        for expert in range(shape.experts):
            sizes = zip(projection.weights, shape.part_outputs, strict=True)
            found.append(
                [self._take(w.module.replace("{}", str(expert)), outs, shape.inputs) for w, outs in sizes if w.stacked]
                or [None] * len(projection.weights)
            )
        return found

    def check(self, projection: Adaptable, of_experts: PartPairs, room: AdapterRoom) -> None:
        module = projection.weights[0].module.replace(".{}", "")
        rank = max(len(pair.a) for parts in of_experts for pair in parts if pair is not None)
        if rank > room.rank:
            raise self._error(
                f"{module} has rank {rank}, and the engine has room for {room.rank}: start it "
                f"with --max-lora-rank {rank}"
            )
        if not room.covers(projection):
            raise self._error(
                f"{module} is not among --lora-target-modules {' '.join(room.targets or ())}: name it there too"
            )

    def check_rest(self, decoder: Decoder) -> None:
        """Whatever no projection took fits no module of this model."""
        wanted = {plain_name(name) for name in tensors_of(decoder)}
        unknown = [m for m in self._modules if not is_of_shared_kv(f"{m}.weight", wanted)]
        unknown += [found.module for some in self._experts.values() for found in some]
        if unknown:
            base = f"; the adapter was made for {self._config.base_model}" if self._config.base_model else ""
            raise self._error(f"{_listed(unknown)} is no projection of a layer of {self._spec.name}{base}")

    def _take(self, module: str, outputs: int, inputs: int) -> Pair | None:
        found = self._modules.pop(plain_name(module), None)
        if found is None:
            return None
        assert found.a is not None and found.b is not None
        rank = self._config.rank_of(found.module)
        self._check_shape(found.a_name, found.a, (rank, inputs))
        self._check_shape(found.b_name, found.b, (outputs, rank))
        return Pair(found.a, found.b.float() * self._config.scale_of(found.module))

    def _fused(self, projection: ExpertProjection, shape: AdapterShape) -> list[list[Pair | None]] | None:
        """What target_parameters wrote for all experts at once, None where there is nothing for this projection."""
        layer = re.match(r"(.*\blayers\.\d+)\.", plain_name(projection.weights[0].name))
        here = self._experts.get(layer[1], []) if layer is not None else []
        parameter = "gate_up_proj" if len(projection.weights) > 1 else projection.weights[0].module.rpartition(".")[2]
        for found in here:
            assert found.a is not None and found.b is not None
            if (len(found.b), found.a.shape[1]) == (shape.outputs, shape.inputs):
                break
        else:
            return None
        here.remove(found)
        key = f"{found.module.replace('.base_layer', '')}.{parameter}"
        rank = self._config.rank_of(key)
        self._check_shape(found.a_name, found.a, (shape.experts * rank, shape.inputs))
        self._check_shape(found.b_name, found.b, (shape.outputs, rank * shape.experts))
        a = found.a.view(shape.experts, rank, shape.inputs)
        b = (found.b.float() * self._config.scale_of(key)).view(shape.outputs, rank, shape.experts).permute(2, 0, 1)
        return [
            [Pair(of_a, part) for part in torch.split(of_b, list(shape.part_outputs))]
            for of_a, of_b in zip(a, b, strict=True)
        ]

    def _check_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
        if tuple(tensor.shape) != shape:
            raise self._error(f"{name} is {list(tensor.shape)}, not {list(shape)} as {CONFIG_FILE} and the model say")

    def _error(self, what: str) -> AdapterError:
        return AdapterError(f"adapter {self._config.path}: {what}")


def _on_rank(projection: Adaptable, of_experts: PartPairs, place: RankPlace) -> Iterator[list[Pair | None]]:
    """What one rank has of it: some experts, outputs or inputs, as it has of the weights."""
    weights = projection.weights
    cut = weights[0].cut(place) if isinstance(projection, ExpertProjection) else None
    experts = [i for some in cut.ranges for i in some] if cut is not None else range(len(of_experts))
    for expert in experts:
        yield [
            None if pair is None else _cut(pair, weight, place) if isinstance(projection, Projection) else pair
            for pair, weight in zip(of_experts[expert], weights, strict=True)
        ]


def _cut(pair: Pair, weight: TensorSpec, place: RankPlace) -> Pair:
    cut = weight.cut(place)
    if cut is None:
        return pair
    index = torch.tensor([i for some in cut.ranges for i in some])
    return Pair(pair.a[:, index], pair.b) if cut.axis == 1 else Pair(pair.a, pair.b[index])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(sorted(names)[:MAX_NAMES]) + more
