"""The second tier: restore points in host memory, in pages of the same layout; and behind it, if asked for, a disk.

    device books ── spill: pages copied ahead of need, then let go ──►  host books
                 ◄── fetch: into pages of a pending restore point ────

Each tier has books and an index of its own, so a restore point is on the device, on the host, or on both. Spilling
copies a point and leaves it where it is; when its bytes are needed the device gives it up as ever. Points that
begin with the same tokens share pages on the host as they do on the device: what another point holds already is not
copied again. Copies run beside steps (`Changes.transfers`). Until one has landed, its pages on both sides are live:
nobody frees, overwrites or resumes from them.

With a disk (`kv.disk`), every point that arrives on the host is written there too, and one that only the disk has is
read to the host first, while whoever wants it waits in the queue.

A request that can go on from a point on the host gets its slot and its reservation at once, and begins when the pages
have arrived. What is computed sooner than it is fetched is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from windowpane.kv.arena import Cursor, Offsets
from windowpane.kv.books import Books
from windowpane.kv.disk import DiskStore
from windowpane.kv.index import Found, PointIndex
from windowpane.kv.prefixes import Tokens
from windowpane.kv.restore import Hit, RestorePoints
from windowpane.kv.retention import MIN_PREFIX_TOKENS, Cross, State
from windowpane.kv.sharing import Ids, RestorePoint
from windowpane.kv.speeds import Speeds
from windowpane.kv.tables import PageTable

AHEAD = 0.5  # of the arena that can be had without losing anything: points are spilled until so much is
MOST_IN_TRANSIT = 0.25  # of the arena that spills hold at once
SPILLED_WORTH = 0.05  # of a point that can be fetched again, beside one that would have to be computed
MOST_WRITES = 64  # points that wait to be written to disk; those beyond are not
NO_ADAPTER = "0"  # in keys of requests without one (`Request.prefix_key`)
NOT_HERE = -1


@dataclass(slots=True)
class TierStats:
    """`hit_tokens` of prompts were found on the host and fetched; `fetch_seconds` is how long their copies took."""

    restore_points: int = 0
    cached_bytes: int = 0
    total_bytes: int = 0
    spilled_bytes: int = 0
    fetched_bytes: int = 0
    fetches: int = 0
    hit_tokens: int = 0
    fetch_seconds: float = 0.0
    evictions: int = 0
    disk_hit_tokens: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_bytes: int = 0
    disk_total_bytes: int = 0
    disk_restore_points: int = 0


@dataclass(frozen=True, slots=True)
class _Transfer:
    """What is on its way: a point that the host gets (`spilled`), or one that the device does (`fetched`)."""

    copy_bytes: int
    spilled: RestorePoint | None = None
    fetched: RestorePoint | None = None


class HostTier:
    """Restore points of one manager in `num_slabs` slabs of host memory. `ahead` is as AHEAD; 1 spills everything."""

    def __init__(self, points: RestorePoints, num_slabs: int, ahead: float = AHEAD) -> None:
        manager = points.manager
        self.points = points
        self.manager = manager
        self.index = PointIndex()
        self.books = Books(manager.layout, num_slabs, 0, manager.max_model_len, 0, moves_pages=False)
        self.books.worth, self.books.on_drop = self.index.worth, self._host_dropped
        self.speeds = Speeds()
        self._ahead = ahead
        self._number = 0
        self._transfers: dict[int, _Transfer] = {}
        self._unspilled: dict[RestorePoint, None] = {}  # on the device only, those kept first first
        self._copies: dict[RestorePoint, RestorePoint] = {}  # on the device → on the host, which may have dropped it
        self._disk: DiskStore | None = None
        self._writes: set[int] = set()  # numbers of what is being written to disk
        self._reads: dict[int, RestorePoint] = {}  # and of points that are being read from it, which are pending
        self._adapter_contents = {NO_ADAPTER: NO_ADAPTER}  # by number, as keys have it
        self._counted = TierStats()
        points.on_add, points.on_drop, points.spare_hidden = self._added, self._dropped, self._spare_hidden
        manager.books.worth = self._worth

    # -- finding ---------------------------------------------------------------------------------------------------

    def look_up(self, key: str, tokens: Tokens, here: Hit, *, may_skip_last: bool) -> Hit:
        """What the device has (`here`), or a longer beginning that is fetched sooner than it is computed."""
        found = self.index.find(key, tokens)
        length, point = found.longest(len(tokens) - 1, self.manager.longest_resume)
        exact, row = found.exact, None
        if may_skip_last and exact is not None and exact.hidden_row is not None and not exact.pending:
            length, point, row = len(tokens), exact, exact.hidden_row
        if self._disk is not None and self._read_more(self._disk, key, tokens, max(length, here.length)):
            return Hit(arrives=True)
        if point is None or length <= max(here.length, MIN_PREFIX_TOKENS - 1):
            return here
        on_device = self.points.index.find(key, tokens[:length]).exact
        if on_device is not None:  # a step computes it just now, or it is being fetched
            return Hit(arrives=True) if self._is_being_fetched(on_device) else here
        missing_bytes = self._bytes_of(map(_count_missing, self._on_device(key, tokens, length)))
        if not self.speeds.is_fetched_sooner(length - here.length, missing_bytes):
            return here
        branch = max(found.common, here.branch)
        return Hit(length, hidden_row=row, branch=branch if branch > length else 0, on_host=point, instead=here)

    def _read_more(self, disk: DiskStore, key: str, tokens: Tokens, known: int) -> bool:
        """Begin to read a beginning of more than `known` tokens from disk; True while that goes on."""
        if (disk_key := self._disk_key(key)) is None:
            return False
        length, point = disk.index.find(disk_key, tokens).longest(len(tokens) - 1, self.manager.longest_resume)
        if point is None or length <= max(known, MIN_PREFIX_TOKENS - 1):
            return False
        found = self.index.find(key, tokens[:length])
        if found.exact is not None:
            return found.exact in self._reads.values()
        pages = [self._shared_pages(g, found, length, pending_too=False) for g in range(len(self.manager.tables))]
        missing = [ids == NOT_HERE for ids in pages]
        copy_bytes = self._bytes_of(map(_count_missing, pages))
        if not self.speeds.is_fetched_sooner(length - known, copy_bytes):
            return False
        kept = [ids[ids != NOT_HERE] for ids in pages]
        for g, ids in enumerate(kept):
            self.books.hold(g, ids)
        if has_room := self._make_room([int(m.sum()) for m in missing], score=math.inf):
            tables = self.manager.tables
            places = [
                tables[g].resumed_pages(ids, point.length, length)[missing[g]] for g, ids in enumerate(point.pages)
            ]
            targets, copy = self._new_copy(key, tokens[:length], pages)
            self._number += 1
            self._reads[self._number] = copy
            offsets = [self.books.shared[g].offsets[ids] for g, ids in enumerate(targets)]
            disk.read(self._number, point, list(zip(places, offsets, strict=True)))
        for g, ids in enumerate(kept):
            self.books.let_go(g, ids)
        return has_room

    @property
    def disk(self) -> DiskStore | None:
        return self._disk

    def use_disk(self, disk: DiskStore) -> None:
        """Write every point that reaches the host to disk too, and look there for what the host does not have."""
        self._disk, self._ahead = disk, 1.0

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def know_adapter(self, number: int, content: str) -> None:
        """Numbers of adapters mean nothing after a restart, so on disk their content takes their place."""
        self._adapter_contents[str(number)] = content

    def _disk_key(self, key: str) -> str | None:
        adapter, salt = key.split(":", 1)
        content = self._adapter_contents.get(adapter)
        return None if content is None else f"{content}:{salt}"

    def take_from_disk(self) -> bool:
        """Take in what was written and read; True where a point has arrived, or will not."""
        arrived = False
        for number, went_well in self._disk.done() if self._disk is not None else ():
            if number in self._writes:
                self._writes.remove(number)
                self.books.land(number)
                continue
            arrived = True
            point = self._reads.pop(number)
            if not went_well:
                self.books.drop(point)
                continue
            self._counted.disk_hit_tokens += point.length
            self._publish(point)
        return arrived

    def fetch_demands(self, tokens: int, key: str, known: Tokens, hit: Hit) -> tuple[list[int], list[int]]:
        """Pages per group that `fetch` needs: as `KVManager.start_demand`, with those that are fetched.

        The second list is for a sequence that takes over the window pages which are fetched for it, so that the point
        does not stay on the device.
        """
        demand = self.manager.demand(tokens)
        taking_over = list(demand)
        for g, ids in enumerate(self._on_device(key, known, hit.length)):
            shared, table = self.manager.books.shared[g], self.manager.tables[g]
            to_share = table.shared_pages(ids, hit.length)
            more = len(ids) - int(np.count_nonzero(shared.slots[ids[ids != NOT_HERE]]))
            demand[g] += more if table.is_ring else more - len(to_share)
            taking_over[g] += more - (_count_missing(to_share) if table.is_ring else len(to_share))
        return demand, taking_over

    # -- copying ---------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether copies are on their way, or some should be."""
        return self.in_transit or (bool(self._unspilled) and self._is_short())

    @property
    def is_spilling(self) -> bool:
        """Whether bytes of the device become free to take when what is on its way has landed."""
        return any(transfer.spilled is not None for transfer in self._transfers.values())

    @property
    def in_transit(self) -> bool:
        """Whether pages are on their way between the tiers. What is written to disk is waited for by nobody."""
        return bool(self._transfers or self._reads)

    def fetch(self, slot: int, tokens: int, key: str, known: Tokens, hit: Hit) -> RestorePoint:
        """Begin to copy a point to the device, for an empty slot that reserves room for `tokens` tokens.

        Returns the point, at `hit.length` tokens, which is pending until the transfer has landed.
        """
        assert hit.on_host is not None
        books, length = self.manager.books, hit.length
        self.books.touch(hit.on_host)
        if hit.hidden_row is not None:
            hit.on_host.hidden_row = None
        pages = self._on_device(key, known, length)
        kept = [ids[ids != NOT_HERE] for ids in pages]
        for g, ids in enumerate(kept):
            books.hold(g, ids)  # taking pages may give up the points that have them
        sources, targets = [], []
        for g, ids in enumerate(pages):
            is_missing = ids == NOT_HERE
            there = self.manager.tables[g].resumed_pages(hit.on_host.pages[g], hit.on_host.length, length)
            source: Ids = there[is_missing]
            ids[is_missing] = target = _share_new(books, g, books.take(g, len(source), Cursor()))
            sources.append(source)
            targets.append(target)
        point = RestorePoint(length, pages, pending=True)
        books.keep(point)
        for g, ids in enumerate(pages):
            books.hold(g, ids)
            books.let_go(g, kept[g])
        added = self.points.add(key, known[:length], point)
        assert added, "a restore point that the device has was fetched"
        self._copies[point] = hit.on_host
        self._unspilled.pop(point, None)
        self.manager.claim(slot, tokens, point)
        self._begin(targets, sources, _Transfer(self._bytes_of(map(len, sources)), fetched=point))
        self._counted.fetches += 1
        self._counted.hit_tokens += length - (hit.instead.length if hit.instead is not None else 0)
        return point

    def spill_ahead(self) -> None:
        """Begin to spill what would be lost if room were needed: those kept first first."""
        if not self._unspilled or not self._is_short():
            return
        most = MOST_IN_TRANSIT * self.manager.arena.total_bytes
        under_way = sum(t.copy_bytes for t in self._transfers.values() if t.spilled is not None)
        for point in list(self._unspilled):
            if point.pending:
                continue
            if under_way > most or not self._is_short():
                return
            under_way += self.spill(point)

    def should_wait(self, demand: Sequence[int]) -> bool:
        """Whether taking these pages now would lose what is spilled in a moment. What is not spilled yet then is."""
        promised = self.manager.promised_pages
        need_bytes = self._bytes_of(d + p for d, p in zip(demand, promised, strict=True))
        if need_bytes <= self._spare_bytes():
            return False
        for point in list(self._unspilled):
            self.spill(point)
        return self.is_spilling

    def spill(self, point: RestorePoint) -> int:
        """Begin to copy a point to the host, if it is worth its room there. Returns the bytes on their way."""
        if point not in self._unspilled or point.pending:
            return 0
        key, tokens = self.points.index.content(point)
        del self._unspilled[point]
        found = self.index.find(key, tokens)
        if found.exact is not None:
            self._copies[point] = found.exact
            self.books.touch(found.exact)
            return 0
        pages = self._on_host(found, point.length)
        sources = [ids[here == NOT_HERE] for ids, here in zip(point.pages, pages, strict=True)]
        copy_bytes, whole_bytes = self._bytes_of(map(len, sources)), self._bytes_of(map(len, point.pages))
        if not self.speeds.is_fetched_sooner(point.length, whole_bytes):
            return 0
        shared = self.manager.books.shared
        cached = [int(np.count_nonzero(shared[g].slots[ids] == 0)) for g, ids in enumerate(sources)]
        if not self.manager.can_reserve(cached):
            self._unspilled[point] = None  # what running sequences were promised goes first
            return 0
        kept = [ids[ids != NOT_HERE] for ids in pages]
        for g, ids in enumerate(kept):
            self.books.hold(g, ids)
        if self._make_room([len(ids) for ids in sources], self.points.index.worth(point) / max(copy_bytes, 1)):
            self._copies[point] = self._spill_to(key, tokens, point, pages, sources)
        else:
            copy_bytes = 0
        for g, ids in enumerate(kept):
            self.books.let_go(g, ids)
        return copy_bytes

    def land(self, number: int, seconds: float) -> RestorePoint | None:
        """A transfer is over, and took so long. Returns the point that it fetched, which is for the caller to publish.

        Numbers that are not known belong to transfers that were forgotten.
        """
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return None
        self.manager.books.land(number)
        self.manager.books.log.landed(number)
        if self._disk is not None:
            self._disk.landed(number, to_host=transfer.spilled is not None)
        if transfer.spilled is not None:
            self._counted.spilled_bytes += transfer.copy_bytes
            self._publish(transfer.spilled)
            self._write(transfer.spilled)
            return None
        self.books.land(number)
        self._counted.fetched_bytes += transfer.copy_bytes
        self._counted.fetch_seconds += seconds
        self.speeds.fetched(transfer.copy_bytes, seconds)
        return transfer.fetched

    def forget_transfers(self) -> None:
        """A step failed: what was on its way may never arrive. What has arrived on the host stays."""
        for number, transfer in self._transfers.items():
            self.manager.books.land(number)
            if transfer.spilled is not None:
                self.books.drop(transfer.spilled)
            else:
                self.books.land(number)
        self._transfers.clear()
        self.manager.books.log.forget_transfers()

    def forget_hidden(self) -> None:
        """A step failed: final hidden states lie on the device, whichever tier their points are in."""
        while (row := self._spare_hidden()) is not None:
            self.points.give_back_hidden(row)

    def keep_hidden(self, key: str, tokens: Tokens, row: int) -> None:
        """Give the row that a fetched point had back to it, wherever it is now."""
        for index in (self.points.index, self.index):
            point = index.find(key, tokens).exact
            if point is not None and point.hidden_row is None:
                point.hidden_row = row
                return
        self.points.give_back_hidden(row)

    def drop_points(self) -> int:
        """Give up what is only cached, and say how many points that were."""
        dropped = [point for point in self.books.points if not point.pending]
        for point in dropped:
            self.books.drop(point)
        return len(dropped) + (self._disk.clear() if self._disk is not None else 0)

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TierStats:
        counted, arena = self._counted, self.books.arena
        counted.restore_points = len(self.books.points)
        counted.cached_bytes = sum(map(arena.used_bytes, range(len(self.books.tables))))
        counted.total_bytes, counted.evictions = arena.total_bytes, self.books.evictions
        if (disk := self._disk) is not None:
            counted.disk_written_bytes, counted.disk_read_bytes = disk.written_bytes, disk.read_bytes
            counted.disk_bytes, counted.disk_total_bytes = disk.used_bytes, disk.size_bytes
            counted.disk_restore_points = len(disk.index)
        return counted

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host's books agree; nothing is live there but what is on its way."""
        self.books.check_integrity(())
        if not self._transfers and not self._writes and not self._reads:
            assert not any(self.books.live_pages), "no transfer is under way, but pages of the host are held"
        assert set(self._transfers) == set(self.manager.books.transit), "transfers are miscounted"
        assert set(self.index.points()) == set(self.books.points), "index and books of the host disagree"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _spill_to(
        self, key: str, tokens: Tokens, point: RestorePoint, pages: list[Ids], sources: list[Ids]
    ) -> RestorePoint:
        """Copy pages of `point` to the places in `pages` that are NOT_HERE. There is room."""
        targets, copy = self._new_copy(key, tokens, pages)
        self._begin(sources, targets, _Transfer(self._bytes_of(map(len, sources)), spilled=copy))
        return copy

    def _new_copy(self, key: str, tokens: Tokens, pages: list[Ids]) -> tuple[list[Ids], RestorePoint]:
        """Enter a pending point of the host, with new pages where `pages` are NOT_HERE, and name these."""
        targets, arena = [], self.books.arena
        # Whole slabs make long copies, but where there are not enough of them, gaps do.
        counts = [_count_missing(ids) for ids in pages]
        slabs = sum(-(-count // per) for count, per in zip(counts, arena.pages_per_slab, strict=True))
        fill_slabs = slabs <= arena.free_slabs
        for g, (ids, count) in enumerate(zip(pages, counts, strict=True)):
            offsets = arena.take(g, count, Cursor()) if fill_slabs else arena.take_packed(g, count)
            ids[ids == NOT_HERE] = target = _share_new(self.books, g, offsets)
            targets.append(target)
        copy = RestorePoint(len(tokens), pages, pending=True)
        self.books.keep(copy)
        for g, ids in enumerate(pages):
            self.books.hold(g, ids)
        self.index.put(key, tokens, copy)
        return targets, copy

    def _publish(self, copy: RestorePoint) -> None:
        """A point of the host is there."""
        copy.pending = False
        for g, ids in enumerate(copy.pages):
            self.books.let_go(g, ids)

    def _write(self, copy: RestorePoint) -> None:
        """Begin to write a point of the host to disk."""
        key, tokens = self.index.content(copy)
        disk_key = self._disk_key(key)
        if self._disk is None or disk_key is None or len(self._writes) >= MOST_WRITES:
            return
        offsets = [self.books.shared[g].offsets[ids] for g, ids in enumerate(copy.pages)]
        if self._disk.write(self._number + 1, disk_key, tokens, offsets):
            self._number += 1
            self._writes.add(self._number)
            self.books.send(self._number, copy.pages)

    def _begin(self, on_device: list[Ids], on_host: list[Ids], transfer: _Transfer) -> None:
        self._number += 1
        self._transfers[self._number] = transfer
        books = self.manager.books
        books.send(self._number, on_device)
        if transfer.fetched is not None:
            self.books.send(self._number, on_host)
        # Pages of the host never move, so their offsets are known now.
        pages = [(g, ids, self.books.shared[g].offsets[on_host[g]]) for g, ids in enumerate(on_device) if len(ids)]
        books.log.transfer(self._number, pages, to_host=transfer.spilled is not None)

    def _make_room(self, pages: list[int], score: float) -> bool:
        """Give up points on the host until so many pages per group are free, unless they are worth more."""
        while not self._has_room(pages):
            victim = self.books.victim()
            if victim is None or (self.books.score(victim) or 0.0) > score:
                return False
            self.books.evictions += 1
            self.books.drop(victim)
        return True

    def _has_room(self, pages: list[int]) -> bool:
        arena = self.books.arena
        slabs = 0
        for g, count in enumerate(pages):
            slabs += -(-max(0, count - arena.gap_pages(g)) // arena.pages_per_slab[g])
        return slabs <= arena.free_slabs

    def _on_device(self, key: str, tokens: Tokens, length: int) -> list[Ids]:
        """Pages of the device, by group, that a point at `length` of these tokens could share; NOT_HERE elsewhere."""
        found = self.points.index.find(key, tokens[:length])
        return [self._shared_pages(g, found, length, pending_too=False) for g in range(len(self.manager.tables))]

    def _on_host(self, found: Found, length: int) -> list[Ids]:
        # Spills land in order, so pages that are on their way to the host are there when later ones arrive.
        return [self._shared_pages(g, found, length, pending_too=True) for g in range(len(self.manager.tables))]

    def _shared_pages(self, g: int, found: Found, length: int, *, pending_too: bool) -> Ids:
        table = self.manager.tables[g]
        ids: Ids = np.full(_page_count(table, length), NOT_HERE)
        for point in found.near():
            is_sure = not point.pending or (pending_too and point not in self._reads.values())
            if is_sure and (ids == NOT_HERE).any():
                _share(table, ids, length, point, min(found.common, point.length), g)
        return ids

    def _bytes_of(self, pages: Iterable[int]) -> int:
        """Of so many pages per group."""
        return sum(count * g.page_bytes for count, g in zip(pages, self.manager.layout.groups, strict=True))

    def _is_short(self) -> bool:
        """Whether less than `ahead` of the arena can be had without losing anything."""
        return self._ahead >= 1 or self._spare_bytes() < self._ahead * self.manager.arena.total_bytes

    def _spare_bytes(self) -> int:
        """What is free, or can be fetched again."""
        spilled = self.manager.books.freeable_bytes(point for point in self._copies if self._is_spilled(point))
        return self.manager.free_bytes + spilled

    def _is_spilled(self, point: RestorePoint) -> bool:
        copy = self._copies.get(point)
        return copy is not None and copy in self.books.points

    def _is_being_fetched(self, point: RestorePoint) -> bool:
        return any(transfer.fetched is point for transfer in self._transfers.values())

    def _worth(self, point: RestorePoint) -> float:
        worth = self.points.index.worth(point)
        return worth * SPILLED_WORTH if self._is_spilled(point) else worth

    def _added(self, point: RestorePoint) -> None:
        self._unspilled[point] = None

    def _dropped(self, point: RestorePoint) -> None:
        """A point of the device goes. Its final hidden state is small and stays where it is, for the copy."""
        self._unspilled.pop(point, None)
        copy = self._copies.pop(point, None)
        if copy is not None and copy in self.books.points and copy.hidden_row is None:
            copy.hidden_row, point.hidden_row = point.hidden_row, None

    def _host_dropped(self, point: RestorePoint) -> None:
        self.index.remove(point)
        self.points.give_back_hidden(point.hidden_row)

    def _spare_hidden(self) -> int | None:
        """The row of the least recently used point of the host that has one, which gives it up."""
        for point in self.books.points:
            if point.hidden_row is not None:
                row, point.hidden_row = point.hidden_row, None
                return row
        return None


def _share_new(books: Books, g: int, offsets: Offsets) -> Ids:
    """Pages that were just taken, as shared ones that nobody holds yet."""
    books.arena.tag(g, offsets, np.zeros(len(offsets), dtype=np.int64))  # whatever they were before
    return books.shared[g].share(offsets, slots=0)


def _page_count(table: PageTable, length: int) -> int:
    """Pages that a restore point at `length` keeps."""
    if isinstance(table.group.retention, State):
        return table.group.stripes
    return len(table.held_columns(length)) * table.group.stripes


def _count_missing(ids: Ids) -> int:
    return int(np.count_nonzero(ids == NOT_HERE))


def _share(table: PageTable, ids: Ids, length: int, point: RestorePoint, common: int, g: int) -> None:
    """Fill in what a point at `length` can share with another one that has its first `common` tokens."""
    retention, stripes, have = table.group.retention, table.group.stripes, point.pages[g]
    if isinstance(retention, State | Cross):
        if isinstance(retention, Cross) or common == length == point.length:
            ids[:] = np.where(ids == NOT_HERE, have, ids)
        return
    wanted, held = retention.held(length), retention.held(point.length)
    if not len(ids) or not len(have):
        return
    block = table.block_tokens
    first = wanted.start // block
    blocks = np.arange(first, first + len(ids) // stripes)
    rows_end = np.minimum((blocks + 1) * block, length)
    at = blocks - held.start // block
    # The first page of a window's tail may lack rows that a shorter point can be asked for.
    begins = blocks * block >= held.start if length < point.length else np.full(len(blocks), fill_value=True)
    good = (rows_end <= common) & (at >= 0) & (at < len(have) // stripes) & begins
    target = ids.reshape(-1, stripes)
    good &= target[:, 0] == NOT_HERE
    target[good] = have.reshape(-1, stripes)[at[good]]
