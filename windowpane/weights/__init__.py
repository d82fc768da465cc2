"""Weights by name: `load_weights` fills the tensors that a `ModelSpec` lists from a checkpoint, or makes them up.

A checkpoint is checked as a whole before the first byte is read, and then streamed piece by piece into tensors on the
device: the host never holds more than the weights themselves and one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

import torch

from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.strips import StripWeight
from windowpane.models.ggml import StoredTypes, StripForm
from windowpane.models.gguf import is_gguf
from windowpane.models.quantization import Quantization
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import ONLY_RANK, RankPlace, RankSlice, TensorSpec
from windowpane.models.weights import loaded_bytes, text_tensors
from windowpane.native.build import start_building, why_not
from windowpane.weights.checkpoint import (
    Checkpoint,
    CopiedHead,
    WeightsError,
    copied_head,
    held_dtype,
    kv_scale_names,
    match_names,
    stored_tensors,
)
from windowpane.weights.gguf import GgufCheckpoint
from windowpane.weights.kept_strips import KeptStrips
from windowpane.weights.quantized import check_runs, read_packed

__all__ = ["LOAD_FORMATS", "LoadedWeights", "WeightsError", "load_kv_scales", "load_weights"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

LoadedWeight = torch.Tensor | PackedWeight | StripWeight
LoadedWeights = dict[str, LoadedWeight]
Progress = Callable[[str, int, int], None]


def load_weights(
    source: str | Path | None,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    place: RankPlace = ONLY_RANK,
    progress: Progress | None = None,
) -> LoadedWeights:
    """The text tensors of `spec` by their checkpoint names, in `dtype` on `device`; quantized ones stay packed.

    Of several ranks, each reads only its own part of every tensor.

    `source` is a Hugging Face directory or a GGUF file; `dummy` needs none. Stacked tensors (experts that the file
    stores one by one) come as one tensor under the spec's name, with its `{}`. `progress` is called after each tensor
    with its name, the bytes loaded so far and the bytes in all. Whatever does not fit the spec is listed by name in one
    WeightsError.
    """
    check_runs(spec)
    if isinstance(spec.quantization, StoredTypes):
        _check_strips(load_format, dtype, device)
    if device.type == "cpu" and dtype == torch.float32:
        start_building()  # the kernels that these weights will be run by
    if load_format == "dummy":
        from windowpane.weights.dummy import random_packed, random_tensor

        def make(tensor: TensorSpec) -> LoadedWeight:
            if _is_packed(tensor, spec):
                return random_packed(tensor, spec, dtype, device, seed, place)
            return random_tensor(tensor, spec, dtype, device, seed, place)

        return _make(spec, make, dtype, place, progress)
    checkpoint = _open(source, spec, load_format)
    stored = match_names(spec, checkpoint.shapes)
    cuts = {name: cut for part in stored_tensors(spec) for name, cut in part.rank_entries(place)}
    copied = copied_head(spec, checkpoint.shapes)
    forms = _strip_forms(spec, place)
    kept = KeptStrips(checkpoint.files, forms, place) if isinstance(checkpoint, GgufCheckpoint) and forms else None
    mapped = kept.read() if kept is not None else None

    def read(tensor: TensorSpec) -> LoadedWeight:
        if tensor.name in forms:
            assert isinstance(checkpoint, GgufCheckpoint)
            if mapped is not None:
                return mapped[tensor.name]
            return checkpoint.strips(tensor, forms[tensor.name], place)
        if _is_packed(tensor, spec):
            assert isinstance(spec.quantization, Quantization)

            def as_stored(name: str) -> torch.Tensor:
                return _as_stored(checkpoint, stored[name], cuts[name], device)

            return read_packed(tensor, spec.quantization, as_stored, dtype, device, place)
        out = torch.empty(tensor.on_rank(place.ranks).shape, dtype=held_dtype(tensor, dtype), device=device)
        slots = out if tensor.stacked else (out,)
        for (name, cut), slot in zip(tensor.rank_entries(place), slots, strict=True):
            _fill_from(slot, checkpoint.pieces(stored[name], cut), stored[name])
        if copied is not None and tensor.name == copied.embedding:
            _check_copy(out, checkpoint.pieces(copied.head, cuts[tensor.name]), copied)
        return out

    loaded = _make(spec, read, dtype, place, progress)
    if kept is not None and mapped is None:
        kept.write({name: weight for name in forms if isinstance(weight := loaded[name], StripWeight)})
    return loaded


def _strip_forms(spec: ModelSpec, place: RankPlace) -> dict[str, StripForm]:
    """What stays as a GGUF file stores it, by name."""
    types = spec.quantization
    if not isinstance(types, StoredTypes):
        return {}
    mine = [tensor.on_rank(place.ranks) for tensor in text_tensors(spec)]
    held = {tensor.name: (types.held(tensor), prod(tensor.shape[:-2])) for tensor in mine}
    # Experts lie one below another.
    return {name: replace(form, outputs=count * form.outputs) for name, (form, count) in held.items() if form}


def _check_strips(load_format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Weights as GGUF stores them are read by the kernels of CPUs alone."""
    if device.type != "cpu" or dtype != torch.float32 or load_format == "dummy":
        raise WeightsError(f"weights as GGUF stores them run on CPUs with float32, not on {device} with {dtype}")
    if why := why_not():
        raise WeightsError(f"weights as GGUF stores them need compiled kernels: {why}; --dtype float32 expands them")


def _is_packed(tensor: TensorSpec, spec: ModelSpec) -> bool:
    return spec.quantization is not None and spec.quantization.format_of(tensor) is not None


def load_kv_scales(
    source: str | Path | None, spec: ModelSpec, load_format: str = "auto"
) -> dict[int, tuple[float, float]]:
    """Calibrated scales of K and V by layer, where the checkpoint has both; empty for dummy weights."""
    if load_format == "dummy":
        return {}
    checkpoint = _open(source, spec, load_format)
    names = kv_scale_names(checkpoint.shapes)
    values = {at: float(next(iter(checkpoint.pieces(name))).max()) for at, name in names.items()}
    return {
        layer: (k, values[layer, "v"]) for (layer, kind), k in values.items() if kind == "k" and (layer, "v") in values
    }


def _make(
    spec: ModelSpec,
    make: Callable[[TensorSpec], LoadedWeight],
    dtype: torch.dtype,
    place: RankPlace,
    progress: Progress | None,
) -> LoadedWeights:
    wanted = text_tensors(spec)
    name = str(dtype).removeprefix("torch.")
    sizes = [loaded_bytes(spec, tensor.on_rank(place.ranks), name) for tensor in wanted]
    total_bytes, done_bytes = sum(sizes), 0
    out: LoadedWeights = {}
    for tensor, size_bytes in zip(wanted, sizes, strict=True):
        out[tensor.name] = make(tensor)
        done_bytes += size_bytes
        if progress is not None:
            progress(tensor.name, done_bytes, total_bytes)
    return out


def _as_stored(checkpoint: Checkpoint, name: str, cut: RankSlice | None, device: torch.device) -> torch.Tensor:
    """A tensor, or what `cut` leaves of it, on the device in the dtype that the file has it in."""
    pieces = iter(checkpoint.pieces(name, cut))
    first = next(pieces)
    shape = list(checkpoint.shapes[name] or (1,))
    if cut is not None:
        shape[cut.axis] = sum(map(len, cut.ranges))
    out = torch.empty(shape, dtype=first.dtype, device=device)
    _fill_from(out, chain([first], pieces), name)
    return out


def _fill_from(out: torch.Tensor, pieces: Iterator[torch.Tensor], name: str) -> None:
    start = 0
    for piece in pieces:
        out[start : start + len(piece)].copy_(piece)
        start += len(piece)
    if start != len(out):
        raise WeightsError(f"{name}: the file ended after {start} of {len(out)} rows")


def _check_copy(embedding: torch.Tensor, pieces: Iterator[torch.Tensor], copied: CopiedHead) -> None:
    """Refuse a head that is not the embedding, though the config ties them: either would run, and one is wrong."""
    start = 0
    for piece in pieces:
        rows = embedding[start : start + len(piece)]
        if not torch.equal(rows, piece.to(rows.device, rows.dtype)):
            raise WeightsError(
                f"{copied.head} differs from {copied.embedding}, but the config says tie_word_embeddings true; "
                "set it to false to use the stored head, or remove the head from the file"
            )
        start += len(piece)


def _open(source: str | Path | None, spec: ModelSpec, load_format: str) -> Checkpoint:
    if load_format not in LOAD_FORMATS:
        raise WeightsError(f"unknown load format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    if source is None:
        raise WeightsError(
            f"no weights are given for {spec.name}; name a directory or a GGUF file, or use dummy weights"
        )
    path = Path(source)
    if not path.exists():
        raise WeightsError(f"no weights at {source}: it is no Hugging Face directory and no GGUF file")
    if load_format == "auto":
        load_format = "gguf" if is_gguf(path) else "safetensors"
    if load_format == "gguf":
        return GgufCheckpoint(path, spec)
    from windowpane.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
