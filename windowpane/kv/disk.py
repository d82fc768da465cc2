"""Restore points on disk: one file each, written behind by a thread, found again after a restart.

    file = magic, length and checksum of the header, header (JSON), tokens (int32), pages by rank and group

A file has the pages of all ranks and appears under its name when it is whole, so that no rank has a point which another
lacks. Every page has a checksum, which is compared when the page is read. What is torn, of another model, or cannot be
read is ignored; what it held is computed again. When a write fails, nothing more is written. The log has one line for
what was found at the start, and one for the first failure after it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.arena import Offsets
from windowpane.kv.index import PointIndex
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Layout
from windowpane.kv.prefixes import Tokens
from windowpane.kv.sharing import RestorePoint

log = logging.getLogger("windowpane.disk")

MAGIC = b"windowpane-kv-2\n"  # the number is raised when pages hold something else
SUFFIX = ".kv"
LATE_S = 60.0  # that the copies of other ranks may take longer than this one's
LOOK_S = 2e-4  # between looks at them
_LENGTHS = struct.Struct("<II")  # bytes and checksum of the header

# Pages by group: their places in a file, and their offsets in the host's arena.
Places = Sequence[tuple[NDArray[np.int64], Offsets]]


class DiskInUse(ValueError):
    """Another server has the directory."""


@dataclass(frozen=True, slots=True)
class _Record:
    """Where a file's pages begin, and their checksums by rank and group."""

    path: Path
    start_byte: int
    checksums: list[list[list[int]]]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to do with a point's file; numbers above 0 are told when it is done.

    `after` are the copies to the device and to the host that other ranks must have done before.
    """

    number: int
    point: RestorePoint
    run: Callable[[], _Record | None]
    after: tuple[int, int] = (0, 0)


class DiskStore:
    """Restore points of one model in a directory, `size_bytes` at most.

    `fingerprint` names whatever decides what a page holds: files with another one are left alone. `memories` are the
    host's arenas of all ranks, this one's first, and `marks` say which copies the others have done (`landed`). Methods
    are for the engine's thread; files are read and written by another one.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        fingerprint: str,
        layout: Layout,
        memories: Sequence[NDArray[np.uint8]],
        marks: Sequence[NDArray[np.int64]] = (),
    ) -> None:
        self.index = PointIndex()
        self.used_bytes = 0
        self.written_bytes = self.read_bytes = 0
        self._path, self.size_bytes, self._fingerprint = path, size_bytes, fingerprint
        self._page_bytes = [group.page_bytes for group in layout.groups]
        self._memories, self._marks = memories, marks
        self._landed = [0, 0]
        self._records: dict[RestorePoint, _Record] = {}  # least recently used first
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, _Record | None]] = deque()  # with what was written or read, if it went well
        self._fails_to_write = self._has_complained = False
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        self._lock = _lock(path)
        self._find_files()
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        self._thread.start()

    # -- asked by the tier -----------------------------------------------------------------------------------------

    def write(self, number: int, key: str, tokens: Tokens, pages: Sequence[Offsets]) -> bool:
        """Begin to write a point whose pages lie at these offsets of the host's arena. False: it is not written."""
        if self._fails_to_write or self.index.find(key, tokens).exact is not None:
            return False
        data_bytes = sum(len(p) * size for p, size in zip(pages, self._page_bytes, strict=True)) * len(self._memories)
        file_bytes = data_bytes + tokens.nbytes  # the header comes on top, and is small
        if file_bytes > self.size_bytes:
            return False
        while self.used_bytes + file_bytes > self.size_bytes:
            self.forget(next(iter(self._records)))
        content = hashlib.sha256(f"{self._fingerprint}\n{key}\n".encode() + tokens.tobytes()).hexdigest()
        point = RestorePoint(len(tokens), [np.arange(len(p)) for p in pages], pending=True)
        self.index.put(key, tokens, point)
        record = _Record(self._path / f"{content}{SUFFIX}", 0, [], file_bytes)
        self._keep(point, record)
        self._do(number, point, lambda: self._write(record, key, tokens.copy(), pages))
        return True

    def read(self, number: int, point: RestorePoint, places: Places) -> None:
        """Begin to read pages of a point to these offsets of the host's arena."""
        record = self._records.pop(point)
        self._records[point] = record
        self._do(number, point, lambda: self._read(record, places))

    def landed(self, number: int, *, to_host: bool) -> None:
        """This rank has done a copy between device and host; what is asked for from now on waits for the others."""
        self._landed[int(to_host)] = number

    def done(self) -> list[tuple[int, bool]]:
        """What was begun and is over, and whether it went well. What did not is forgotten."""
        found = []
        while self._done:
            job, record = self._done.popleft()
            found.append((job.number, record is not None))
            if job.point not in self._records:
                continue
            if record is None:
                self.forget(job.point)
            else:
                self._records[job.point] = record
                job.point.pending = False
        return found

    def forget(self, point: RestorePoint) -> None:
        """Give up a file."""
        record = self._records.pop(point)
        self.index.remove(point)
        self.used_bytes -= record.file_bytes
        self._jobs.put(_Job(0, point, lambda: _remove(record)))

    def clear(self) -> int:
        count = len(self._records)
        for point in list(self._records):
            self.forget(point)
        return count

    def close(self) -> None:
        """Finish what was begun, and let others have the directory. Once is enough."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            os.close(self._lock)

    def _do(self, number: int, point: RestorePoint, run: Callable[[], _Record | None]) -> None:
        to_device, to_host = self._landed
        self._jobs.put(_Job(number, point, run, (to_device, to_host)))

    # -- on the other thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work_on(job)

    def _work_on(self, job: _Job) -> None:
        record = None
        try:
            self._wait_for_ranks(job.after)
            record = job.run()
        except OSError as error:  # one line: a disk that fails does so again and again
            log.log(logging.DEBUG if self._has_complained else logging.WARNING, "KV on disk: %s", error)
            self._has_complained = True
        if job.number:
            self._done.append((job, record))

    def _wait_for_ranks(self, after: tuple[int, int]) -> None:
        until = time.monotonic() + LATE_S
        while any((marks < after).any() for marks in self._marks):
            if time.monotonic() > until:
                raise OSError(f"a rank has not copied its pages in {LATE_S:.0f} s")
            time.sleep(LOOK_S)

    def _write(self, record: _Record, key: str, tokens: Tokens, pages: Sequence[Offsets]) -> _Record | None:
        if self._fails_to_write:
            return None
        temporary = record.path.with_suffix(".tmp")
        try:
            checksums = [
                [
                    [zlib.crc32(self._page(rank, g, offset)) for offset in offsets.tolist()]
                    for g, offsets in enumerate(pages)
                ]
                for rank in range(len(self._memories))
            ]
            header = _header(self._fingerprint, key, tokens, checksums)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(header)
                file.write(tokens.tobytes())
                for rank in range(len(self._memories)):
                    for g, offsets in enumerate(pages):
                        for offset in offsets.tolist():
                            file.write(self._page(rank, g, offset))
            temporary.rename(record.path)
        except OSError as error:
            self._fails_to_write = True
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OSError(f"{record.path.name[:12]}… cannot be written, nor is anything after it ({error})") from None
        self.written_bytes += record.file_bytes
        return _Record(record.path, len(header) + tokens.nbytes, checksums, record.file_bytes)

    def _read(self, record: _Record, places: Places) -> _Record:
        try:
            with record.path.open("rb") as file:
                before = record.start_byte
                for rank, by_group in enumerate(record.checksums):
                    for g, (indexes, offsets) in enumerate(places):
                        size, checksums = self._page_bytes[g], by_group[g]
                        for index, offset in zip(indexes.tolist(), offsets.tolist(), strict=True):
                            page = self._page(rank, g, offset)
                            self._read_page(file, before + index * size, page, checksums[index])
                        before += len(checksums) * size
            with suppress(OSError):
                os.utime(record.path)
            return record
        except OSError as error:
            raise OSError(f"{record.path.name[:12]}… cannot be read and is computed again ({error})") from None

    def _read_page(self, file: BinaryIO, at: int, page: memoryview, checksum: int) -> None:
        file.seek(at)
        if file.readinto(page) != len(page) or zlib.crc32(page) != checksum:  # type: ignore[attr-defined]
            raise OSError("a checksum is wrong")
        self.read_bytes += len(page)

    def _page(self, rank: int, g: int, offset: int) -> memoryview:
        start = offset * OFFSET_UNIT_BYTES
        return self._memories[rank][start : start + self._page_bytes[g]].data

    # -- at start --------------------------------------------------------------------------------------------------

    def _find_files(self) -> None:
        for left_over in self._path.glob("*.tmp"):
            left_over.unlink(missing_ok=True)
        ignored: list[str] = []
        files = [(path, path.stat()) for path in self._path.glob(f"*{SUFFIX}")]
        for path, stat in sorted(files, key=lambda found: found[1].st_mtime_ns):
            try:
                self._find_file(path, stat.st_size)
            except (OSError, ValueError, KeyError, struct.error) as error:
                ignored.append(f"{path.name[:12]}… ({error})")
        if ignored:
            log.warning("KV on disk: %d of %d files are ignored, as %s", len(ignored), len(files), ignored[0])

    def _find_file(self, path: Path, size: int) -> None:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("not a file of this store")
            length, checksum = _LENGTHS.unpack(file.read(_LENGTHS.size))
            text = file.read(length)
            if zlib.crc32(text) != checksum:
                raise ValueError("its header is torn")
            header = json.loads(text)
            if header["fingerprint"] != self._fingerprint:
                raise ValueError("of another model, layout or release")
            tokens = np.frombuffer(file.read(4 * header["length"]), dtype=np.int32)
            start = file.tell()
        checksums: list[list[list[int]]] = header["checksums"]
        pages = [len(of_group) for of_group in checksums[0]]
        data_bytes = sum(n * size for n, size in zip(pages, self._page_bytes, strict=True)) * len(self._memories)
        if zlib.crc32(tokens.tobytes()) != header["tokens"] or size != start + data_bytes:
            raise ValueError("it is torn")
        if self.used_bytes + size > self.size_bytes:
            return
        point = RestorePoint(len(tokens), [np.arange(count) for count in pages])
        self.index.put(header["key"], tokens, point)
        self._keep(point, _Record(path, start, checksums, size))

    def _keep(self, point: RestorePoint, record: _Record) -> None:
        self._records[point] = record
        self.used_bytes += record.file_bytes


def _remove(record: _Record) -> None:
    record.path.unlink(missing_ok=True)


def _header(fingerprint: str, key: str, tokens: Tokens, checksums: list[list[list[int]]]) -> bytes:
    fields = {
        "fingerprint": fingerprint,
        "key": key,
        "length": len(tokens),
        "tokens": zlib.crc32(tokens.tobytes()),
        "checksums": checksums,
    }
    text = json.dumps(fields).encode()
    return MAGIC + _LENGTHS.pack(len(text), zlib.crc32(text)) + text


def _lock(path: Path) -> int:
    """Held by this process until it ends, however that is."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise DiskInUse(f"--kv-disk-path {path} is used by another server; give each a directory of its own") from None
    return lock
