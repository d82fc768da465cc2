"""What a replica publishes: the beginnings that it can resume from, where they lie, and how busy it is.

A digest is the whole state in a few bytes, not a list of changes: one that is lost or late does no harm, and a router
that was just started knows everything after one of each replica.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.index import PointIndex
from windowpane.kv.manager import KVManager
from windowpane.kv.sharing import RestorePoint
from windowpane.routing.hashes import BLOCK_TOKENS, Hashes, prefix_hashes
from windowpane.schedule.restoring import RestorePlanner
from windowpane.schedule.scheduler import Scheduler

MAX_PREFIXES = 16_384  # of a digest: 208 KiB; those entered last are named
# A point from which every shorter beginning can be resumed too names its first blocks, and then every so many.
NEAR_BLOCKS, FAR_BLOCKS = 16, 16

ASSUMED_TOKENS_PER_S = 1000.0  # of a prompt, until some replica has computed one

_HEAD = struct.Struct("<IIIddQ")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is. `wait_s` is how long a request that comes now waits before its prompt is computed, and
    `tokens_per_s` how fast prompts are computed then; 0 where that is not known yet.
    """

    running: int = 0
    waiting: int = 0
    wait_s: float = 0.0
    tokens_per_s: float = 0.0
    free_kv_bytes: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, request_s: float, found_share: float) -> Load:
        """By what the scheduler has before it. On average, a request runs `request_s`, and `found_share` of its prompt
        is not computed: how much that is of those who wait, nobody has looked up yet.
        """
        running, waiting, lengths = scheduler.running, scheduler.waiting, scheduler.manager.lengths
        pending = sum(max(0, len(r.prompt) - int(lengths[slot])) for slot, r in running.items())
        pending += int((1 - found_share) * sum(len(request.prompt) for request in waiting))
        tokens_per_s = scheduler.speeds.prompt_tokens_per_second or 0.0
        wait_s = pending / (tokens_per_s or ASSUMED_TOKENS_PER_S)
        if waiting and running:  # for memory, perhaps, which comes back with every request that ends
            wait_s = max(wait_s, len(waiting) * request_s / len(running))
        return cls(len(running), len(waiting), wait_s, tokens_per_s, scheduler.manager.free_bytes)


@dataclass(frozen=True, slots=True)
class Digest:
    """`hashes` ascend; `tokens` are the lengths of the beginnings they stand for, and `tiers` where those lie: on the
    device (0), on the host (1) or on disk (2).
    """

    load: Load
    hashes: Hashes
    tokens: NDArray[np.uint32]
    tiers: NDArray[np.uint8]

    def pack(self) -> bytes:
        load = self.load
        head = _HEAD.pack(
            len(self.hashes), load.running, load.waiting, load.wait_s, load.tokens_per_s, load.free_kv_bytes
        )
        return head + self.hashes.astype("<u8").tobytes() + self.tokens.astype("<u4").tobytes() + self.tiers.tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> Digest:
        count, *load = _HEAD.unpack_from(packed)
        starts = [_HEAD.size + each * count for each in (0, 8, 12)]
        hashes, tokens, tiers = (
            np.frombuffer(packed, dtype, count, start)
            for dtype, start in zip(("<u8", "<u4", "u1"), starts, strict=True)
        )
        return cls(Load(*load), hashes, tokens, tiers)


@dataclass(slots=True)
class _Entry:
    """`holders` are the points that name a hash, by tier."""

    tokens: int = 0
    holders: list[int] = field(default_factory=lambda: [0, 0, 0])

    @property
    def tier(self) -> int:
        return next(tier for tier, count in enumerate(self.holders) if count)


class DigestMaker:
    """Follows the restore points of one scheduler in all its tiers, in the engine's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.version = 0  # grows with every change
        self._manager = scheduler.manager
        self._named: dict[RestorePoint, list[int]] = {}
        self._entries: dict[int, _Entry] = {}  # those entered last, last
        for tier, index in enumerate(tier_indexes(scheduler)):
            index.listen(partial(self._put, index, tier), partial(self._remove, tier))
            for point in index.points():  # a disk may bring some from an earlier life
                self._put(index, tier, point)

    def make(self, load: Load) -> Digest:
        entries = list(self._entries.items())[-MAX_PREFIXES:]
        hashes = np.array([hashed for hashed, _ in entries], dtype=np.uint64)
        tokens = np.array([entry.tokens for _, entry in entries], dtype=np.uint32)
        tiers = np.array([entry.tier for _, entry in entries], dtype=np.uint8)
        order = np.argsort(hashes)
        return Digest(load, hashes[order], tokens[order], tiers[order])

    def _put(self, index: PointIndex, tier: int, point: RestorePoint) -> None:
        hashes = prefix_hashes(*index.content(point)).tolist()
        blocks = list(named_blocks(self._manager, point.length))
        self._named[point] = [hashes[block - 1] for block, _ in blocks]
        for hashed, (_, tokens) in zip(self._named[point], blocks, strict=True):
            entry = self._entries.pop(hashed, None) or _Entry()
            entry.tokens = max(entry.tokens, tokens)
            entry.holders[tier] += 1
            self._entries[hashed] = entry
        self.version += 1

    def _remove(self, tier: int, point: RestorePoint) -> None:
        for hashed in self._named.pop(point):
            entry = self._entries[hashed]
            entry.holders[tier] -= 1
            if not any(entry.holders):
                del self._entries[hashed]
        self.version += 1


def tier_indexes(scheduler: Scheduler) -> list[PointIndex]:
    """Where a scheduler's restore points are found: those of the device, the host and the disk, as far as there are."""
    planner = scheduler.restoring
    found = [planner.points.index] if isinstance(planner, RestorePlanner) else []
    if scheduler.tier is not None:
        found += [scheduler.tier.index, *([] if scheduler.tier.disk is None else [scheduler.tier.disk.index])]
    return found


def named_blocks(manager: KVManager, length: int) -> Iterator[tuple[int, int]]:
    """The whole blocks by which a restore point at `length` is known, and the tokens that each promises."""
    last = length // BLOCK_TOKENS
    if manager.keeps_all(length):
        for block in (*range(1, min(NEAR_BLOCKS, last)), *range(NEAR_BLOCKS, last, FAR_BLOCKS)):
            yield block, block * BLOCK_TOKENS
    if last:
        yield last, length
