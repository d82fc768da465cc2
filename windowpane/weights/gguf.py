"""GGUF weights: Hugging Face names for ggml's, types dequantised, and what llama.cpp's converter changed put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from windowpane.lowering.strips import StripWeight
from windowpane.models.ggml import F32, StripForm, ggml_type
from windowpane.models.gguf import GgufTensor, read_header
from windowpane.models.gguf_families import family_of, tensors_by_hf_name
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import RankPlace, RankSlice, TensorSpec
from windowpane.weights.checkpoint import PIECE_BYTES, WeightsError, row_pieces

if TYPE_CHECKING:
    from types import ModuleType


class GgufCheckpoint:
    """A GGUF model, in one file or several, under Hugging Face names."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        header = read_header(path)
        family = family_of(header)
        self._adds_one = family.adds_one
        heads = {"q_proj": spec.query_heads, "k_proj": spec.token_caches[0].kv_heads}
        self._interleaved_heads = heads if family.interleaved else {}
        self._tensors = tensors_by_hf_name(header)
        self.files = sorted({tensor.file for tensor in self._tensors.values()})
        for file in self.files:
            _check_places(file, [tensor for tensor in self._tensors.values() if tensor.file == file])
        # As checkpoints of Hugging Face have them: experts one by one.
        self._entries = dict(entry for item in self._tensors.items() for entry in _entries(*item))
        self.shapes = {name: tensor.shape for name, tensor in self._entries.items()}

    def pieces(self, name: str, cut: RankSlice | None = None) -> Iterator[torch.Tensor]:
        tensor = self._entries[name]
        if (heads := self._interleaved_heads.get(name.split(".")[-2])) is not None:
            head_rows = tensor.shape[0] // heads
            for rows in self._rows(tensor, cut, tensor.shape[0]):  # ranks hold whole heads
                yield _undo_interleaving(rows, len(rows) // head_rows)
            return
        # Subtracted in float32: in bfloat16, 1 + w has lost most of w.
        is_of_state = name.endswith("linear_attn.norm.weight")
        offset = 1.0 if self._adds_one and name.endswith("norm.weight") and not is_of_state else 0.0
        for rows in self._rows(tensor, cut, max(1, PIECE_BYTES // (4 * tensor.shape[-1]))):
            if name.endswith(".A_log"):
                yield self._logarithm_of_decay(rows, name)
            else:
                yield rows - offset if offset else rows

    def _logarithm_of_decay(self, stored: torch.Tensor, name: str) -> torch.Tensor:
        """Files have −exp(A_log)."""
        if not (stored < 0).all():
            raise WeightsError(f"{self.files[0]} is damaged: a value of {name} decays nothing; fetch it again")
        return torch.log(-stored)

    def strips(self, weight: TensorSpec, form: StripForm, place: RankPlace) -> StripWeight:
        """A matrix as it is stored, or a rank's part of it, in the order that kernels read; of experts, all of them."""
        tensor, cut = self._tensors[weight.name], weight.cut(place)
        if len(tensor.shape) == 3:
            tensor, cut = _one_below_another(tensor, cut)
        stored = ggml_type(tensor.kind, tensor.name)
        out, first = StripWeight.empty(form), 0
        heads = self._interleaved_heads.get(weight.name.split(".")[-2])
        # A part of the rows, or rows in another order, are put together first; else a few strips at a time suffice.
        whole = heads is not None or cut is not None
        at_once = tensor.shape[0] if whole else max(1, PIECE_BYTES // (4 * tensor.shape[1]) // 16) * 16
        pieces: Iterable[torch.Tensor] = map(torch.from_numpy, self._raw(tensor, cut, at_once))
        if whole:
            pieces = [torch.cat(list(pieces))]
        for rows in pieces:
            if heads is not None:
                rows = _undo_interleaving(rows, len(rows) // (tensor.shape[0] // heads))
            if cut is not None and cut.axis == 1:
                blocks = rows.view(len(rows), -1, stored.stored_bytes)
                ranges = (slice(r.start // stored.inputs, r.stop // stored.inputs) for r in cut.ranges)
                rows = torch.cat([blocks[:, blocks_of] for blocks_of in ranges], dim=1).flatten(1)
            out.fill(first, rows)
            first += len(rows)
        if not out.has_finite_scales:
            raise WeightsError(f"{tensor.file} is damaged: a scale of {tensor.name} is no number; fetch it again")
        return out

    def _rows(self, tensor: GgufTensor, cut: RankSlice | None, at_once: int) -> Iterator[torch.Tensor]:
        """Dequantised rows, `at_once` at a time; a vector is one row. Types are packed along rows, so a cut through
        rows is made once they are dequantised.
        """
        through_rows = cut is not None and cut.axis == len(tensor.shape) - 1
        columns = [i for some in cut.ranges for i in some] if cut is not None and through_rows else None
        for raw in self._raw(tensor, cut, at_once):
            with np.errstate(invalid="ignore", over="ignore"):  # of what is damaged: it is checked next
                values = _dequantized(raw, tensor.kind)
            if not np.isfinite(values).all():
                raise WeightsError(f"{tensor.file} is damaged: a value of {tensor.name} is no number; fetch it again")
            shape = tensor.shape if len(tensor.shape) == 1 else (len(raw), *tensor.shape[1:])
            # Unquantized types come as a view of the bytes read, which torch must not take for writable.
            found = torch.from_numpy(np.require(values, requirements="W").reshape(shape))
            yield found if columns is None else found[..., columns]

    def _raw(self, tensor: GgufTensor, cut: RankSlice | None, at_once: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Rows as they are stored [rows, bytes]; a vector is one row."""
        stored = ggml_type(tensor.kind, tensor.name)
        row_bytes = prod(tensor.shape[1:] or tensor.shape) // stored.inputs * stored.stored_bytes
        row_shape, row_cut = ((1,), None) if len(tensor.shape) == 1 else (tensor.shape, cut)
        with tensor.file.open("rb") as file:
            for rows in row_pieces(row_shape, row_cut, at_once):
                file.seek(tensor.offset + rows.start * row_bytes)
                raw = np.fromfile(file, np.uint8, len(rows) * row_bytes)
                if len(raw) < len(rows) * row_bytes:
                    raise WeightsError(f"{tensor.file} is cut short: {tensor.name} passes its end; fetch it again")
                yield raw.reshape(len(rows), row_bytes)


def _entries(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor, or those of single experts that it has one after another."""
    if "{}" not in name:
        yield name, tensor
        return
    stored, shape = ggml_type(tensor.kind, tensor.name), tensor.shape[1:]
    each_bytes = prod(shape) // stored.inputs * stored.stored_bytes
    for number in range(tensor.shape[0]):
        yield name.replace("{}", str(number)), replace(tensor, shape=shape, offset=tensor.offset + number * each_bytes)


def _one_below_another(tensor: GgufTensor, cut: RankSlice | None) -> tuple[GgufTensor, RankSlice | None]:
    """Experts as one matrix; ranks have whole ones."""
    experts, outputs, inputs = tensor.shape
    if cut is not None:
        cut = RankSlice(0, tuple(range(some.start * outputs, some.stop * outputs) for some in cut.ranges))
    return replace(tensor, shape=(experts * outputs, inputs)), cut


def _check_places(file: Path, tensors: Iterable[GgufTensor]) -> None:
    """Before the first byte is read: the file holds all of each, and no byte is of two."""
    file_bytes, before, end = file.stat().st_size, "", 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise WeightsError(f"{file} is damaged: {tensor.name} begins inside {before}; fetch it again")
        stored = ggml_type(tensor.kind, tensor.name)
        before, end = tensor.name, tensor.offset + prod(tensor.shape) // stored.inputs * stored.stored_bytes
        if end > file_bytes:
            raise WeightsError(
                f"{file} is cut short or damaged: {before} ends at byte {end:,} of {file_bytes:,}; fetch it again"
            )


def _undo_interleaving(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 0, 2, 4, … of each head first, then 1, 3, 5, …: neighbours become rows half a head apart."""
    paired = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


def _dequantized(raw: npt.NDArray[np.uint8], kind: int) -> npt.NDArray[np.float32]:
    """What rows of bytes mean. Norms are float32, so a model that stays packed needs no package for them."""
    if kind == F32:
        return raw.view(np.float32)
    package = _gguf_package()
    values: npt.NDArray[np.float32] = package.dequantize(raw, package.GGMLQuantizationType(kind))
    return values


def _gguf_package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise WeightsError("GGUF weights need the `gguf` package: pip install 'gguf>=0.19'") from None
    module: ModuleType = gguf
    return module
