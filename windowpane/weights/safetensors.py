"""Safetensors of a Hugging Face directory: one file, or shards listed in an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from windowpane.models.tensors import RankSlice
from windowpane.weights.checkpoint import PIECE_BYTES, WeightsError, row_pieces

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# Files are mapped, and mapped pages that were read count as this process's memory until the file is closed.
_REOPEN_BYTES = 512 * 1024**2


class SafetensorsCheckpoint:
    """The tensors of one file or of all shards. Only one file is open at a time."""

    def __init__(self, directory: Path) -> None:
        self._open_path: Path | None = None
        self._open_file: Any = None
        self._read_bytes = 0
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, listed in _files(directory):
            file = self._file(path)
            present = file.keys()
            for name in listed - set(present):
                raise WeightsError(f"{path} lacks {name}, which {INDEX} places there; fetch it again")
            for name in present:
                self._paths[name] = path
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def pieces(self, name: str, cut: RankSlice | None = None) -> Iterator[torch.Tensor]:
        shape = self.shapes[name]
        if not shape:
            yield self._file(self._paths[name]).get_tensor(name)[None]
            return
        # Counted at four bytes a value: a piece may be converted on its way.
        at_once = max(1, PIECE_BYTES // (4 * prod(shape[1:])))
        columns = cut.ranges if cut is not None and cut.axis == 1 else (None,)
        for rows in row_pieces(shape, cut, at_once):
            stored = self._file(self._paths[name]).get_slice(name)
            parts = [stored[_index(rows, some)] for some in columns]
            piece: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            self._read_bytes += piece.nbytes
            yield piece

    def _file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path != self._open_path or self._read_bytes > _REOPEN_BYTES:
            try:
                self._open_file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"cannot read {path}: {error}") from None
            self._open_path, self._read_bytes = path, 0
        return self._open_file


def _index(rows: range, columns: range | None) -> Any:
    of_rows = slice(rows.start, rows.stop)
    return of_rows if columns is None else (of_rows, slice(columns.start, columns.stop))


def _files(directory: Path) -> list[tuple[Path, set[str]]]:
    """The files, each with the tensors that the index places there (none are named for a single file)."""
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).is_file():
            return [(directory / SINGLE, set())]
        raise WeightsError(
            f"{directory} holds neither {SINGLE} nor {INDEX}; other formats are not read: save the model as "
            "safetensors, or use a GGUF file"
        )
    try:
        placed = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise WeightsError(f"cannot read {index}: {error!r}") from None
    shards: dict[str, set[str]] = {}
    for name, file in placed.items():
        shards.setdefault(file, set()).add(name)
    missing = sorted(file for file in shards if not (directory / file).is_file())
    if missing:
        raise WeightsError(f"{directory} lacks {', '.join(missing[:5])} of the shards in {INDEX}; fetch it again")
    return [(directory / file, names) for file, names in shards.items()]
