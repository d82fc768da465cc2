"""Pages in host memory, and copies of pages between it and the arena, beside steps.

On a GPU the memory is pinned, and each direction has a stream of its own: copies begin when the device has done what it
was sent before them, and steps wait only for those that they are told of. On a CPU a copy is over when it was begun.

A step sends its inputs to the device and its tokens back through the same copy engines, which take turns between
streams only where a copy ends. So long runs of pages are cut into slices that take less than a tenth of a millisecond.
Copies also slow what a step reads, by 5.4 % at 54 GB/s. So a step is given what `PACED_BYTES_PER_S` move in the time
that the last one took; where no steps run, a little is sent ahead whenever the engine asks what has landed.

The memory is a file of its own without a name, so that rank 0 can map that of the other ranks and write it to disk.
Behind the slabs stand two marks: the numbers of the transfers that were over last, to the device and to the host.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
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
PACED_BYTES_PER_S = 45e9  # each way, beside steps
PORTION_BYTES = 64 * 2**20  # that are sent at once, and known to be over
AHEAD_BYTES = 4 * PORTION_BYTES  # that are on their way where no step is: they take longer than the engine waits


class _UnderWay:
    """A transfer on a GPU's stream, between two events; it begins when the device has done what it was sent before."""

    def __init__(
        self, transfer: PageTransfer, slices: Iterator[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        self.number, self.slices, self.is_begun = transfer.number, slices, False
        self.ready, self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        self.ready.record(torch.cuda.current_stream(device))

    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.ended)) / 1e3


class _Direction:
    """Transfers one way, in order, on a stream of their own: those not sent yet, and portions on their way."""

    def __init__(self, device: torch.device, mark: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.unsent: deque[_UnderWay] = deque()
        self._portions: deque[tuple[torch.cuda.Event, int]] = deque()
        self._portion_bytes = 0
        self._device, self._mark = device, mark

    def send(self, most_bytes: float) -> Iterator[_UnderWay]:
        """Send portions until so many bytes are on their way; yields the transfers whose last one was sent."""
        while self._portions and self._portions[0][0].query():  # type: ignore[no-untyped-call]
            self._portion_bytes -= self._portions.popleft()[1]
        while self.unsent and self._portion_bytes < most_bytes:
            first = self.unsent[0]
            event = self._send_portion(first)
            if event is first.ended:
                yield self.unsent.popleft()

    def _send_portion(self, first: _UnderWay) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            if not first.is_begun:
                self.stream.wait_event(first.ready)
                first.began.record(self.stream)
                first.is_begun = True
            size = 0
            for target, source in first.slices:
                target.copy_(source, non_blocking=True)
                size += target.nbytes
                if size >= PORTION_BYTES:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    break
            else:
                self._mark.copy_(torch.full((), first.number, device=self._device), non_blocking=True)
                event = first.ended
            event.record(self.stream)
        self._portions.append((event, size))
        self._portion_bytes += size
        return event


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
        self._under_way: dict[int, _UnderWay] = {}  # that were sent whole, in order
        self._landed: list[tuple[int, float]] = []
        self._directions: dict[bool, _Direction] = {}
        self._step_began, self._step_seconds = 0.0, 0.0
        if arena.device.type == "cuda" and num_slabs:
            self._directions = {bool(way): _Direction(arena.device, self._marks[way]) for way in (0, 1)}

    def wait(self, changes: Changes) -> None:
        """Before a step copies pages: the device waits for transfers whose pages it may read, write or move."""
        if not self._directions:
            return
        now = time.perf_counter()
        self._step_began, self._step_seconds = now, now - self._step_began
        stream = torch.cuda.current_stream(self._arena.device)
        unsent = {one.number for direction in self._directions.values() for one in direction.unsent}
        if unsent and (changes.settle or not unsent.isdisjoint(changes.landed)):
            self._send(float("inf"))
        for number in changes.landed:
            # On the rank that noticed, the event is past; on others the copy may still be under way.
            if number in self._under_way:
                stream.wait_event(self._under_way.pop(number).ended)
        if changes.settle:
            for direction in self._directions.values():
                stream.wait_stream(direction.stream)

    def begin(self, transfers: tuple[PageTransfer, ...]) -> None:
        """Begin transfers, once the device has done what it was sent so far."""
        for transfer in transfers:
            slices = self._slices(transfer)
            if self._directions:
                self._directions[transfer.to_host].unsent.append(_UnderWay(transfer, slices, self._arena.device))
                continue
            began = time.perf_counter()
            for target, source in slices:
                target.copy_(source)
            self._marks[int(transfer.to_host)] = transfer.number
            self._landed.append((transfer.number, time.perf_counter() - began))
        self._send(max(AHEAD_BYTES, PACED_BYTES_PER_S * self._step_seconds))

    def landed(self) -> list[tuple[int, float]]:
        """Transfers that are over and were not named before, and the seconds that they took."""
        self._send(AHEAD_BYTES)
        landed, self._landed = self._landed, []
        for number, under_way in list(self._under_way.items()):
            if under_way.ended.query():  # type: ignore[no-untyped-call]
                landed.append((number, under_way.seconds()))
                del self._under_way[number]
        return landed

    def _send(self, most_bytes: float) -> None:
        for direction in self._directions.values():
            self._under_way |= {sent.number: sent for sent in direction.send(most_bytes)}

    def _slices(self, transfer: PageTransfer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, target and source."""
        for group, on_device, on_host in transfer.pages:
            units = self._page_units[group]
            for start, stop in _runs(on_device, on_host, units):
                size = (stop - start) * units * OFFSET_UNIT_BYTES
                here, there = (int(offsets[start]) * OFFSET_UNIT_BYTES for offsets in (on_device, on_host))
                page, copy = self._arena[here : here + size], self.memory[there : there + size]
                target, source = (copy, page) if transfer.to_host else (page, copy)
                for at in range(0, size, SLICE_BYTES):
                    part = slice(at, at + SLICE_BYTES)
                    yield target[part], source[part]


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
