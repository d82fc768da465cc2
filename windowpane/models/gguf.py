"""GGUF files without torch: the header, which has metadata and says where tensors lie.

`windowpane.models.gguf_families` makes a model of it, `windowpane.weights.gguf` reads the tensors, `windowpane.text`
the tokenizer. A model in several files (`name-00001-of-00003.gguf`) is read as a whole, whichever of them is named.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TypeVar, cast

from windowpane.models.config import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_AXES = 4
MOST_NAME_CHARACTERS = 256

T = TypeVar("T")
Value = int | float | bool | str | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in `file`. `shape` is in torch's order (rows first); `kind` is ggml's number of the type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data, of all shards together. Tensor offsets count from the start of their file."""

    path: Path
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    def integer(self, key: str) -> int | None:
        """A whole number, or None where it is missing."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelError(f"{self.path.name}: {key} must be a whole number, not {value!r:.60}")
        return value

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise ModelError(f"{self.path.name}: {key} must be a number, not {value!r:.60}")
        return value

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path.name}: {key} must be a string, not {value!r:.60}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path.name}: {key} must be true or false, not {value!r:.60}")
        return value

    def items(self, key: str) -> list[Value]:
        """An array; empty where it is missing."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list):
            raise ModelError(f"{self.path.name}: {key} must be an array, not {value!r:.60}")
        return value

    def integers(self, key: str) -> list[int]:
        return self._all_of(key, int)

    def numbers(self, key: str) -> list[float]:
        return self._all_of(key, float) or list(self._all_of(key, int))

    def texts(self, key: str) -> list[str]:
        return self._all_of(key, str)

    def _all_of(self, key: str, kind: type[T]) -> list[T]:
        """An array of this kind, empty where it is of another; all values of an array are of one."""
        values = self.items(key)
        return cast("list[T]", values) if values and isinstance(values[0], kind) else []


def is_gguf(path: Path) -> bool:
    """Whether a file says that it is GGUF, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        # A directory, or a file whose own reader will say why it cannot be read.
        return False


def read_header(path: str | Path) -> GgufHeader:
    """Read a GGUF file's header; a file that is cut short or of an unknown version is a ModelError.

    Of a shard, the headers of all are read: metadata is the first's, and tensors are everyone's.
    """
    headers = [read_shard(shard) for shard in shards(Path(path))]
    first = headers[0]
    count = first.integer("split.count") or 1
    if count != len(headers):
        raise ModelError(
            f"{first.path.name} is one of {count} parts; name a file such as model-00001-of-{count:05}.gguf"
        )
    if count == 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise ModelError(f"{header.path.name} and {tensors[twice].file.name} both hold {twice}; fetch them again")
        tensors |= header.tensors
    expected = first.integer("split.tensors.count") or len(tensors)
    if len(tensors) != expected:
        raise ModelError(f"{first.path.name} and its parts hold {len(tensors)} of {expected} tensors; fetch them again")
    return GgufHeader(first.path, first.metadata, tensors)


_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)")


def shards(path: Path) -> list[Path]:
    """The files of the model that `path` is a part of, in order; itself where it is the only one.

    Links are not followed: the shared cache of the Hub keeps files under other names, with links that have theirs.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count, end = match.groups()
    files = [path.with_name(f"{stem}{number:05}-of-{count}{end}") for number in range(1, int(count) + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ModelError(
            f"{path.name} is one of {int(count)} parts, and {path.parent} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return files


def read_shard(path: Path) -> GgufHeader:
    """The header of one file, whatever others belong to it.

    The last few are kept: spec, weights and tokenizer each ask for them, and a vocabulary takes a second to read.
    """
    resolved = path.resolve()
    try:
        status = resolved.stat()
        return _read_header(resolved, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None


@lru_cache(maxsize=32)
def _read_header(path: Path, _modified_ns: int, size_bytes: int) -> GgufHeader:
    if size_bytes < 24:
        raise ModelError(f"{path} has {size_bytes} bytes, too few for a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        parser = _Parser(data)
        try:
            return parser.header(path)
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            raise ModelError(
                f"{path} is damaged or cut short: its GGUF header cannot be read at {parser.reading} ({error})"
            ) from None


# struct formats of GGUF's scalar types by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Parser:
    """A cursor over the header's bytes, all little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.reading = "its beginning"  # where it stands, for errors

    def header(self, path: Path) -> GgufHeader:
        magic, version = self.data[:4], struct.unpack_from("<I", self.data, 4)[0]
        if magic != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")
        if version not in VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} (or byte order) is not known; versions {VERSIONS} are")
        self.at = 8
        tensor_count, metadata_count = self.scalar("Q"), self.scalar("Q")
        metadata = self.metadata(path, metadata_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{path}: general.alignment must be a power of two, not {alignment!r:.60}")
        tensors = self.tensors(path, tensor_count, alignment)
        start = -(-self.at // alignment) * alignment
        return GgufHeader(path, metadata, {t.name: replace(t, offset=start + t.offset) for t in tensors.values()})

    def metadata(self, path: Path, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for number in range(count):
            self.reading = f"value {number + 1} of {count}"
            self.reading = key = self.name()
            if key in found:
                raise ModelError(f"{path} is damaged: it says {key} twice")
            found[key] = self.value(self.scalar("I"))
        return found

    def tensors(self, path: Path, count: int, alignment: int) -> dict[str, GgufTensor]:
        """With offsets as they stand there, from the start of all data."""
        found: dict[str, GgufTensor] = {}
        for number in range(count):
            self.reading = f"tensor {number + 1} of {count}"
            self.reading = name = self.name()
            axes = self.scalar("I")
            if not 0 < axes <= MOST_AXES:
                raise ModelError(f"{path} is damaged: {name} has {axes:,} axes, not 1 to {MOST_AXES}")
            shape = tuple(reversed([self.scalar("Q") for _ in range(axes)]))
            tensor = GgufTensor(name, shape, self.scalar("I"), self.scalar("Q"), path)
            if 0 in shape:
                raise ModelError(f"{path} is damaged: {name} has the shape {list(shape)}, which holds nothing")
            if tensor.offset % alignment:
                raise ModelError(
                    f"{path} is damaged: {name} begins at byte {tensor.offset:,}, which is no multiple of {alignment}"
                )
            if name in found:
                raise ModelError(f"{path} is damaged: it has {name} twice")
            found[name] = tensor
        return found

    def name(self) -> str:
        """A string that errors can show."""
        found = self.string()
        if not found.isprintable() or not 0 < len(found) <= MOST_NAME_CHARACTERS:
            raise ModelError(
                f"the GGUF header is damaged: {self.reading} is called {found[:40]!r}, in {len(found)} characters"
            )
        return found

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelError(f"{self.reading} has GGUF value type {kind}, which is not known")
        value = self.scalar(_SCALARS[kind])
        return shortest(value) if _SCALARS[kind] == "f" else value

    def array(self) -> list[Value]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            values = struct.unpack_from(code, self.data, self.at)
            self.at += struct.calcsize(code)
            return list(values)
        if kind == _STRING:
            return self.strings(count)
        raise ModelError(f"{self.reading} is an array of GGUF value type {kind}, which is not known")

    def strings(self, count: int) -> list[Value]:
        """As `string` so many times. Vocabularies have hundreds of thousands, so nothing is called that need not be."""
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        found: list[Value] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            found.append(data[start:at].decode("utf-8"))
        if at > len(data):
            raise IndexError(f"the strings of an array of {count} pass the end")
        self.at = at
        return found

    def scalar(self, code: str) -> int:
        value: int = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise IndexError(f"a string of {length} bytes at byte {self.at} passes the end")
        self.at += length
        return raw.decode("utf-8")


def shortest(value: float) -> float:
    """The number that a config would say: 1e-06, where float32 has 9.99999997e-07."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
