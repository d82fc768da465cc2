"""Weights by name: `load_weights` fills the tensors that a `ModelSpec` lists from a checkpoint, or makes them up.

A checkpoint is checked as a whole before the first byte is read, and then streamed piece by piece into tensors on the
device: the host never holds more than the weights themselves and one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from windowpane.models.gguf import is_gguf
from windowpane.models.spec import ModelSpec, TensorSpec
from windowpane.models.weights import text_tensors
from windowpane.native.build import start_building
from windowpane.weights.checkpoint import Checkpoint, WeightsError, match_names

__all__ = ["LOAD_FORMATS", "WeightsError", "load_weights"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

Progress = Callable[[str, int, int], None]


def load_weights(
    source: str | Path | None,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The text tensors of `spec` by their checkpoint names, in `dtype` on `device`.

    `source` is a Hugging Face directory or a GGUF file; `dummy` needs none. Stacked tensors (experts that the file
    stores one by one) come as one tensor under the spec's name, with its `{}`. `progress` is called after each tensor
    with its name, the bytes loaded so far and the bytes in all. Whatever does not fit the spec is listed by name in one
    WeightsError.
    """
    _refuse_quantized(spec)
    if device.type == "cpu" and dtype == torch.float32:
        start_building()  # the kernels that these weights will be run by
    wanted = text_tensors(spec)
    if load_format == "dummy":
        from windowpane.weights.dummy import random_tensor

        return _make(wanted, lambda tensor: random_tensor(tensor, spec, dtype, device, seed), dtype, progress)
    checkpoint = _open(source, spec, load_format)
    stored = match_names(spec, checkpoint.shapes)

    def read(tensor: TensorSpec) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=dtype, device=device)
        slots = out if tensor.stacked else (out,)
        for (name, _), slot in zip(tensor.checkpoint_entries(), slots, strict=True):
            _fill(slot, checkpoint, stored[name])
        return out

    return _make(wanted, read, dtype, progress)


def _make(
    wanted: list[TensorSpec], make: Callable[[TensorSpec], torch.Tensor], dtype: torch.dtype, progress: Progress | None
) -> dict[str, torch.Tensor]:
    total_bytes = sum(tensor.elements for tensor in wanted) * dtype.itemsize
    done_bytes, out = 0, {}
    for tensor in wanted:
        out[tensor.name] = make(tensor)
        done_bytes += tensor.elements * dtype.itemsize
        if progress is not None:
            progress(tensor.name, done_bytes, total_bytes)
    return out


def _fill(out: torch.Tensor, checkpoint: Checkpoint, name: str) -> None:
    start = 0
    for piece in checkpoint.pieces(name):
        out[start : start + len(piece)].copy_(piece)
        start += len(piece)
    if start != len(out):
        raise WeightsError(f"{name}: the file ended after {start} of {len(out)} rows")


def _refuse_quantized(spec: ModelSpec) -> None:
    if spec.quantization is not None:
        raise WeightsError(
            f"{spec.name} is quantized ({spec.quantization.scheme}), and quantized weights are not loaded yet; "
            "use the unquantized checkpoint or a GGUF file"
        )


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
        from windowpane.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(path, spec)
    from windowpane.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
