"""Repacked GGUF weights, kept in the user's cache so that the next start maps them instead of repacking.

One file for each source and rank: all strips one after the other, then a checksum of them. Whatever they depend on is
in the file's name: the source's path, size and time, the tensors, and the sources of the layout. A file that is damaged
is passed over and written again; a disk without room, or that cannot be written, is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from windowpane.lowering.strips import StripWeight
from windowpane.models.embedded import cache_directory
from windowpane.models.ggml import StripForm
from windowpane.models.tensors import RankPlace
from windowpane.native import build
from windowpane.native.calls import count

LEAST_BYTES = 32 * 1024**2  # fewer are repacked in less time than a file takes
FREE_TIMES = 4  # the disk must have so many times the file's bytes free
_ALIGNED_BYTES = 64
_CHECKSUM_BYTES = 8
_LAYOUT_SOURCES = ("packed.h", "repack.c")


class KeptStrips:
    """The strips of `forms`, by name, of a model in these files."""

    def __init__(self, files: Sequence[Path], forms: Mapping[str, StripForm], place: RankPlace) -> None:
        self._forms = forms
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        tensors = [(name, form.kind, form.outputs, form.inputs) for name, form in forms.items()]
        source = _digest(str(files[0].resolve()), place.rank, place.ranks)
        self._source, self._path = source, _directory() / f"{source}-{_digest(_layout(), stats, tensors)}.strips"
        self._wanted = self._payload_bytes >= LEAST_BYTES

    @property
    def _payload_bytes(self) -> int:
        return max((values + form.held_bytes("") for form, values, _ in self._places()), default=0)

    def read(self) -> dict[str, StripWeight] | None:
        """All of them, mapped; None where they are not kept, or damaged."""
        try:
            data = np.memmap(self._path, dtype=np.uint8, mode="c") if self._wanted else None
        except (OSError, ValueError):
            return None
        if data is None or len(data) != self._payload_bytes + _CHECKSUM_BYTES:
            return None
        if data[-_CHECKSUM_BYTES:].tobytes() != _checksum(data[:-_CHECKSUM_BYTES]):
            return None
        whole = torch.from_numpy(data)
        return {
            name: StripWeight(
                form, whole[values : values + form.values_bytes], whole[scales : scales + form.scales_bytes]
            )
            for name, (form, values, scales) in zip(self._forms, self._places(), strict=True)
        }

    def write(self, strips: Mapping[str, StripWeight]) -> None:
        if not self._wanted:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._path.parent).free < FREE_TIMES * self._payload_bytes:
                return
            with tempfile.NamedTemporaryFile(dir=self._path.parent) as file:
                for weight, (_, values, scales) in zip(strips.values(), self._places(), strict=True):
                    for at, part in ((values, weight.values), (scales, weight.scales)):
                        file.seek(at)
                        file.write(part.numpy().data)
                file.flush()
                file.write(_checksum(np.memmap(file.name, dtype=np.uint8, mode="r")))
                file.flush()
                for old in self._path.parent.glob(f"{self._source}-*.strips"):
                    old.unlink(missing_ok=True)
                os.link(file.name, self._path)  # whole or not there
        except OSError:
            return

    def _places(self) -> Iterator[tuple[StripForm, int, int]]:
        """Each form with the offsets of its values and scales. Both are whole lines, so scales follow values."""
        at = 0
        for form in self._forms.values():
            at = -(-at // _ALIGNED_BYTES) * _ALIGNED_BYTES
            yield form, at, at + form.values_bytes
            at += form.held_bytes("")


def _directory() -> Path:
    return cache_directory() / "weights"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@cache
def _layout() -> str:
    sources = [source.read_text() for source in build.SOURCES if source.name in _LAYOUT_SOURCES]
    return _digest(*sources)


def _checksum(data: npt.NDArray[np.uint8]) -> bytes:
    library = build.library()
    assert library is not None  # strips are loaded where kernels are
    found = count(library, "checksum", c_void_p, c_long, c_int)(data.ctypes.data, len(data), torch.get_num_threads())
    return (found % 2**64).to_bytes(_CHECKSUM_BYTES, "little")
