"""Bytes of weights: what the text engine loads on each tensor-parallel rank, and how many parameters there are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

from windowpane.kv.caches import ShardingError
from windowpane.models.blocks import Mamba2, each
from windowpane.models.quantization import STORED_BYTES
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class WeightBreakdown:
    """Bytes on one rank by purpose: `state` is recurrent layers, `other` norms, routers and small tensors, `drafter` a
    model of its own that drafts.
    """

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    state: int = 0
    other: int = 0
    drafter: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def weight_bytes(spec: ModelSpec, ranks: int = 1) -> int:
    """Bytes of text weights on one of `ranks` ranks: tied embeddings once, without vision and audio towers."""
    return weight_breakdown(spec, ranks).total


def weight_breakdown(spec: ModelSpec, ranks: int = 1) -> WeightBreakdown:
    """`weight_bytes` by purpose. Where the model does not divide, ShardingError names the rank counts that work."""
    problem = sharding_problem(spec, ranks)
    if problem:
        working = [n for n in range(1, MAX_RANKS + 1) if sharding_problem(spec, n) is None]
        raise ShardingError(f"{problem}; tensor-parallel sizes that work: {', '.join(map(str, working))}")
    totals: dict[str, int] = {}
    for tensor in text_tensors(spec):
        totals[tensor.part] = totals.get(tensor.part, 0) + held_bytes(spec, tensor.on_rank(ranks))
    if spec.drafter is not None and spec.drafter.spec is not None:
        totals["drafter"] = weight_bytes(replace(spec.drafter.spec, dtype=spec.dtype), ranks)
    return WeightBreakdown(**totals)


def sharding_problem(spec: ModelSpec, ranks: int) -> str | None:
    """Why the model cannot run on `ranks` tensor-parallel ranks, or None if it can."""
    if ranks < 1:
        return f"{ranks} tensor-parallel ranks"
    if spec.query_heads % ranks:
        return f"{spec.name} has {spec.query_heads} query heads, which do not divide over {ranks} tensor-parallel ranks"
    for mixer in each(spec.decoder.layers, Mamba2) if spec.decoder is not None else ():
        if mixer.norms_groups and 1 < mixer.groups < ranks:
            return f"{spec.name} norms its states in {mixer.groups} groups, which {ranks} ranks cannot share"
    for tensor in text_tensors(spec):
        if tensor.shard is None:
            continue
        if not tensor.shard.fits(ranks):
            units = " + ".join(str(units) for _, units in tensor.shard.sections)
            what = "experts" if tensor.part == "experts" else "units"
            return f"{tensor.name}: {units} {what} do not divide over {ranks} tensor-parallel ranks"
        if spec.quantization and (cut := spec.quantization.cut_problem(tensor, ranks)):
            form = spec.quantization.format_of(tensor)
            # Engines that run these families copy the scales of fp8 blocks that two ranks share; here they are counted.
            if spec.decoder is not None or form is None or form.scheme != "fp8":
                return cut
    return None


def text_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """The tensors that the engine loads, before quantization."""
    return [tensor for tensor in spec.tensors if tensor.tower is None]


def parameter_count(spec: ModelSpec, towers: bool = False) -> int:
    """Values in the checkpoint before quantization, tied embeddings once; `towers` adds vision and audio."""
    return sum(tensor.elements for tensor in spec.tensors if towers or tensor.tower is None)


def loaded_bytes(spec: ModelSpec, tensor: TensorSpec, dtype: str) -> int:
    """Bytes of one tensor of a model that runs, where `dtype` is what is computed in."""
    form = spec.quantization.held(tensor) if spec.quantization else None
    if form is None:
        return tensor.elements * STORED_BYTES[tensor.dtype or dtype]
    return prod(tensor.shape[:-2]) * form.held_bytes(dtype)


def held_bytes(spec: ModelSpec, tensor: TensorSpec) -> int:
    """Bytes of one tensor in memory."""
    form = spec.quantization.held(tensor) if spec.quantization else None
    if form is not None:
        return prod(tensor.shape[:-2]) * form.held_bytes(spec.dtype)
    stored = spec.quantization.stored(tensor) if spec.quantization else [tensor]
    return sum(part.elements * STORED_BYTES[part.dtype or spec.dtype] for part in stored)
