"""Pages in host memory, and copies of pages between it and the arena, beside steps.

On a GPU the memory is pinned, and each direction has a stream of its own: copies begin when the device has done what it
was sent before them, and steps wait only for those that they are told of. On a CPU a copy is over when it was begun.

A step sends its inputs to the device and its tokens back through the same copy engines, which take turns between
streams only where a copy ends. So long runs of pages are cut into slices that take less than a tenth of a millisecond.

The memory is a file of its own without a name, so that rank 0 can map that of the other ranks and write it to disk.
Behind the slabs stand two marks: the numbers of the transfers that were over last, to the device and to the host.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.kv.changes import Changes, PageTransfer
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Layout

MARKS_BYTES = 4096  # behind the slabs
SLICE_BYTES = 4 * 2**20  # of one copy beside steps: what a step's own copies wait for at most


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A copy on a GPU's stream, between two events."""

    began: torch.cuda.Event
    ended: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class HostHandle:
    """By which another process of the same user finds the host memory of this one."""

    process: int
    file: int

    def map(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Its slabs and its marks."""
        file = os.open(f"/proc/{self.process}/fd/{self.file}", os.O_RDWR)
        try:
            whole: NDArray[np.uint8] = np.frombuffer(mmap.mmap(file, 0), dtype=np.uint8)
        finally:
            os.close(file)
        return whole[:-MARKS_BYTES], whole[-MARKS_BYTES:][:16].view(np.int64)


class HostPages:
    """`num_slabs` slabs of host memory beside an arena of the same layout."""

    def __init__(self, layout: Layout, num_slabs: int, arena: torch.Tensor) -> None:
        size_bytes = num_slabs * layout.slab_bytes
        file = os.memfd_create("windowpane-kv") if num_slabs and hasattr(os, "memfd_create") else -1
        self.handle = HostHandle(os.getpid(), file) if file >= 0 else None
        whole = _host_memory(file, size_bytes + MARKS_BYTES if num_slabs else 0)
        if arena.device.type == "cuda" and num_slabs:
            _pin(whole)
            weakref.finalize(self, _unpin, whole)
        if file >= 0:
            weakref.finalize(self, os.close, file)
        self.memory = whole[:size_bytes]
        self._marks = whole[size_bytes : size_bytes + 16].view(torch.int64)
        self._arena = arena
        self._page_units = [group.page_units for group in layout.groups]
        self._under_way: dict[int, _UnderWay] = {}  # in order
        self._landed: list[tuple[int, float]] = []
        self._streams: dict[bool, torch.cuda.Stream] = {}
        if arena.device.type == "cuda":
            streams = (torch.cuda.Stream(arena.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._streams = dict(zip((False, True), streams, strict=True))

    def wait(self, changes: Changes) -> None:
        """Before a step copies pages: the device waits for transfers whose pages it may read, write or move."""
        if not self._streams:
            return
        stream = torch.cuda.current_stream(self._arena.device)
        for number in changes.landed:
            # On the rank that noticed, the event is past; on others the copy may still be under way.
            if number in self._under_way:
                stream.wait_event(self._under_way.pop(number).ended)
        if changes.settle:
            for other in self._streams.values():
                stream.wait_stream(other)

    def begin(self, transfers: tuple[PageTransfer, ...]) -> None:
        """Begin transfers, once the device has done what it was sent so far."""
        for transfer in transfers:
            if not self._streams:
                began = time.perf_counter()
                self._copy(transfer)
                self._marks[int(transfer.to_host)] = transfer.number
                self._landed.append((transfer.number, time.perf_counter() - began))
                continue
            stream = self._streams[transfer.to_host]
            stream.wait_stream(torch.cuda.current_stream(self._arena.device))
            events = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            under_way = _UnderWay(*events)
            with torch.cuda.stream(stream):
                under_way.began.record(stream)
                self._copy(transfer)
                mark = self._marks[int(transfer.to_host)]
                mark.copy_(torch.full((), transfer.number, device=self._arena.device), non_blocking=True)
                under_way.ended.record(stream)
            self._under_way[transfer.number] = under_way

    def landed(self) -> list[tuple[int, float]]:
        """Transfers that are over and were not named before, and the seconds that they took."""
        landed, self._landed = self._landed, []
        for number, under_way in list(self._under_way.items()):
            if under_way.ended.query():  # type: ignore[no-untyped-call]
                landed.append((number, float(under_way.began.elapsed_time(under_way.ended)) / 1e3))
                del self._under_way[number]
        return landed

    def _copy(self, transfer: PageTransfer) -> None:
        for group, on_device, on_host in transfer.pages:
            units = self._page_units[group]
            for start, stop in _runs(on_device, on_host, units):
                size = (stop - start) * units * OFFSET_UNIT_BYTES
                here, there = (int(offsets[start]) * OFFSET_UNIT_BYTES for offsets in (on_device, on_host))
                page, copy = self._arena[here : here + size], self.memory[there : there + size]
                target, source = (copy, page) if transfer.to_host else (page, copy)
                for at in range(0, size, SLICE_BYTES):
                    part = slice(at, at + SLICE_BYTES)
                    target[part].copy_(source[part], non_blocking=True)


def _runs(on_device: NDArray[np.int32], on_host: NDArray[np.int32], page_units: int) -> list[tuple[int, int]]:
    """Pages that lie one behind another on both sides: each run is one copy."""
    breaks = (np.diff(on_device) != page_units) | (np.diff(on_host) != page_units)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(on_device)]
    return list(pairwise(edges))


def _host_memory(file: int, size_bytes: int) -> torch.Tensor:
    """Fresh memory costs nothing until it is touched, and large pages are touched and pinned sooner."""
    if not size_bytes:
        return torch.zeros(0, dtype=torch.uint8)
    if file >= 0:
        os.ftruncate(file, size_bytes)
    memory = mmap.mmap(file, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> None:
    """Pin memory where it lies: the allocator of pinned memory would round its size up to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise MemoryError(
            f"{memory.nbytes:,} B of host memory cannot be pinned ({runtime.cudaGetErrorString(error)}); give a "
            "smaller --kv-offloading-size, or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(memory: torch.Tensor) -> None:
    """Before it goes back to the system: the next one may lie at the same address."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
