"""/stats: where every byte of the arena is, who holds it, and how fast tokens come. Documented in docs/stats.md.

`snapshot` reads the engine's books, so it runs in the engine's thread, between steps. `router` serves what it gives, as
one JSON document or, to who accepts `text/event-stream`, as a stream.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray

from windowpane.engine.accounts import Account
from windowpane.engine.engine import Engine
from windowpane.kv.arena import FREE
from windowpane.kv.manager import KVManager
from windowpane.kv.tier import HostTier
from windowpane.schedule.request import Request as EngineRequest
from windowpane.server.job import Times
from windowpane.server.journal import Journal, life
from windowpane.server.meter import Meter

SCHEMA_VERSION = 1
INTERVAL_S = 0.25  # between two events of a stream; all streams share one snapshot
KEEP_ALIVE_S = 5.0  # a step can take long, and no snapshot is taken within one
MAP_CELLS = 10_000  # larger arenas show several slabs in one cell
SEQUENCES_SHOWN = 64  # of the running ones, and of the waiting ones; the counts are of all

TimesOf = Callable[[EngineRequest], Times | None]
GetSnapshot = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the page must know of the model. Without a chat template its box completes text instead of chatting."""

    name: str
    max_model_len: int
    has_chat_template: bool
    device: str = ""
    dtype: str = ""
    accounts: tuple[Account, ...] = ()

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "max_model_len": self.max_model_len,
            "has_chat_template": self.has_chat_template,
            "device": self.device,
            "dtype": self.dtype,
            "accounts": [
                {
                    "name": account.name.strip(),
                    "predicted_bytes": account.predicted_bytes,
                    "measured_bytes": account.measured_bytes,
                    # Rows of groups are indented, and say what the longest sequence takes.
                    "note": account.note.removesuffix(", each:")
                    + (", of one sequence" if account.name.startswith(" ") else ""),
                }
                for account in self.accounts
            ],
        }


def snapshot(engine: Engine, meter: Meter, model: ModelFacts, times_of: TimesOf = lambda _: None) -> dict[str, Any]:
    """The document of this moment. Only between steps: within one, pages are on their way from owner to owner."""
    scheduler = engine.scheduler
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model.document(),
        "arena": _arena(engine.manager),
        "tiers": None if scheduler.tier is None else _tiers(scheduler.tier),
        "sequences": {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            "shown": [
                *(_running(engine, times_of, slot) for slot in list(scheduler.running)[:SEQUENCES_SHOWN]),
                *(_waiting(engine, times_of, request) for request in scheduler.waiting[:SEQUENCES_SHOWN]),
            ],
        },
        "rates": meter.document(),
        "drafts": asdict(engine.speculator.stats) if engine.speculator is not None else None,
        "replicas": None,
    }


def arena_totals(manager: KVManager) -> dict[str, Any]:
    """What `add_arenas` adds up: a replica's arena without its map."""
    arena = _arena(manager)
    del arena["map"]
    return arena


SIZES = ("total_bytes", "live_bytes", "cached_bytes", "stranded_bytes", "free_bytes")
SUMMED = ("slabs", "live_pages", "cached_pages", "promised_pages", "live_bytes", "cached_bytes", "stranded_bytes")


def add_arenas(arenas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The arenas of replicas of one model together: sums, and no map, for it would be of nobody's memory."""
    first = arenas[0]
    groups = [
        {**group, **{name: sum(arena["groups"][index][name] for arena in arenas) for name in SUMMED}}
        for index, group in enumerate(first["groups"])
    ]
    totals = {
        name: sum(arena[name] for arena in arenas)
        for name in (
            "total_bytes",
            "live_bytes",
            "cached_bytes",
            "stranded_bytes",
            "free_bytes",
            "slabs",
            "moved_pages",
        )
    }
    return {**first, **totals, "groups": groups, "map": []}


def history(engine: Engine, meter: Meter, journal: Journal) -> dict[str, Any]:
    """The last 15 minutes, and what happened to single requests. Between steps, too."""
    meter.remember(engine)
    groups = [group.name for group in engine.manager.layout.groups]
    return {
        "schema_version": SCHEMA_VERSION,
        "groups": groups,
        "total_bytes": engine.manager.arena.total_bytes,
        "trends": meter.trends(len(groups)),
        "events": journal.document(),
    }


def router(get_snapshot: GetSnapshot, get_history: GetSnapshot) -> APIRouter:
    """GET /stats and /stats/history. `get_snapshot` has the engine's thread take one, at most once per `INTERVAL_S`.

    It raises where there is none to be had: the engine died, or the server is going down. Streams then end.
    """
    routes = APIRouter()
    feed = _Feed(get_snapshot)

    @routes.get(
        "/stats",
        summary="Where the memory is and how fast tokens come",
        description="One JSON document; with `Accept: text/event-stream` one event every quarter of a second.",
        response_class=Response,
        responses={200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}}},
    )
    async def stats(request: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        if "text/event-stream" not in request.headers.get("accept", ""):
            return Response(await feed.latest(), media_type="application/json", headers=headers)
        first = asyncio.ensure_future(feed.latest())
        # Where there is none to be had the answer is an error; where it takes long, a stream that begins with a sign.
        if (await asyncio.wait({first}, timeout=KEEP_ALIVE_S))[0]:
            first.result()
        return StreamingResponse(feed.events(first), media_type="text/event-stream", headers=headers)

    @routes.get("/stats/history", summary="The last 15 minutes, and the latest requests, refusals and preemptions")
    async def stats_history() -> dict[str, Any]:
        return await get_history()

    return routes


class _Feed:
    """One snapshot for all who ask within the same interval, already encoded."""

    def __init__(self, get_snapshot: GetSnapshot) -> None:
        self._get_snapshot = get_snapshot
        self._taken_s = -INTERVAL_S
        self._latest = b""
        self._next: asyncio.Task[bytes] | None = None

    async def latest(self) -> bytes:
        if time.monotonic() - self._taken_s < INTERVAL_S:
            return self._latest
        if self._next is None:
            self._next = asyncio.create_task(self._take())
        # Who leaves while waiting must not take the snapshot away from the others.
        return await asyncio.shield(self._next)

    async def events(self, coming: asyncio.Future[bytes]) -> AsyncIterator[bytes]:
        """Server-sent events until the reader goes or there are no more snapshots; the first is on its way."""
        try:
            while True:
                while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                    yield b": the engine is in a long step\n\n"
                if coming.exception() is not None:
                    return
                yield b"data: " + coming.result() + b"\n\n"
                await asyncio.sleep(INTERVAL_S)
                coming = asyncio.ensure_future(self.latest())
        finally:
            coming.cancel()

    async def _take(self) -> bytes:
        try:
            document = await self._get_snapshot()
            self._latest = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
            self._taken_s = time.monotonic()
            return self._latest
        finally:
            self._next = None


# -- the arena -----------------------------------------------------------------------------------------------------


def _arena(manager: KVManager) -> dict[str, Any]:
    layout, arena = manager.layout, manager.arena
    groups = []
    for index, group in enumerate(layout.groups):
        held = manager.group_bytes(index)
        groups.append(
            {
                "name": group.name,
                "layers": group.layers,
                "block_tokens": group.block_tokens,
                "page_bytes": group.page_bytes,
                "pages_per_slab": arena.pages_per_slab[index],
                "slabs": arena.held_slabs[index],
                "live_pages": manager.live_pages[index],
                "cached_pages": arena.used_pages[index] - manager.live_pages[index],
                "promised_pages": manager.promised_pages[index],
                "live_bytes": held.live,
                "cached_bytes": held.cached,
                "stranded_bytes": held.stranded,
            }
        )
    slabs_per_cell = max(1, -(-arena.num_slabs // MAP_CELLS))
    return {
        "total_bytes": arena.total_bytes,
        "live_bytes": sum(g["live_bytes"] for g in groups),
        "cached_bytes": sum(g["cached_bytes"] for g in groups),
        "stranded_bytes": sum(g["stranded_bytes"] for g in groups),
        "free_bytes": manager.free_bytes,
        "slab_bytes": layout.slab_bytes,
        "slabs": arena.num_slabs,
        "slabs_per_cell": slabs_per_cell,
        "moved_pages": manager.moved_pages,
        "groups": groups,
        "map": _map(manager, slabs_per_cell),
    }


def _tiers(tier: HostTier) -> dict[str, Any]:
    """What is kept beside the device: bytes that are live there are on their way to or from it, or to disk."""
    stats, books = tier.stats, tier.books
    groups = [
        {"name": group.name, **{f"{state}_bytes": size for state, size in asdict(books.group_bytes(index)).items()}}
        for index, group in enumerate(books.layout.groups)
    ]
    host = {
        "total_bytes": stats.total_bytes,
        **{f"{s}_bytes": sum(g[f"{s}_bytes"] for g in groups) for s in ("live", "cached", "stranded")},
        "free_bytes": books.arena.free_bytes,
        "restore_points": stats.restore_points,
        "fetches": stats.fetches,
        "hit_tokens": stats.hit_tokens,
        "spilled_bytes": stats.spilled_bytes,
        "fetched_bytes": stats.fetched_bytes,
        "groups": groups,
    }
    disk = {
        "total_bytes": stats.disk_total_bytes,
        "used_bytes": stats.disk_bytes,
        "restore_points": stats.disk_restore_points,
        "hit_tokens": stats.disk_hit_tokens,
        "written_bytes": stats.disk_written_bytes,
        "read_bytes": stats.disk_read_bytes,
    }
    return {"host": host, "disk": disk if tier.has_disk else None}


def _map(manager: KVManager, slabs_per_cell: int) -> list[list[int]]:
    """Runs of equal cells: [cells, group, live bytes, cached bytes, stranded bytes], in the order of the arena."""
    slab_bytes = manager.layout.slab_bytes
    owner, used_pages = manager.arena.slab_use()
    if len(owner) == 0:
        return []
    live_pages = np.zeros(len(owner), dtype=np.int64)
    for index in range(len(manager.tables)):
        live_pages += _live_pages(manager, index)
    page_bytes = np.array([*(g.page_bytes for g in manager.layout.groups), 0], dtype=np.int64)[owner]  # FREE is last
    live = live_pages * page_bytes
    cached = used_pages * page_bytes - live
    stranded = np.where(owner == FREE, 0, slab_bytes - live - cached)
    cells = np.stack([owner.astype(np.int64), live, cached, stranded], axis=1)
    if slabs_per_cell > 1:
        starts = np.arange(0, len(owner), slabs_per_cell)
        cells = np.add.reduceat(cells, starts, axis=0)
        cells[:, 0] = _most_held(owner, len(manager.tables), starts)
    changes = np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1
    runs = np.concatenate([[0], changes, [len(cells)]])
    found: list[list[int]] = np.column_stack([np.diff(runs), cells[runs[:-1]]]).tolist()
    return found


def _live_pages(manager: KVManager, group: int) -> NDArray[np.int64]:
    """Per slab, the pages of this group that running sequences hold. A page that several share counts once."""
    arena, table = manager.arena, manager.tables[group]
    per_slab = arena.pages_per_slab[group]
    is_live = np.zeros((arena.num_slabs, per_slab), dtype=bool)
    rows = [table.page_offsets(slot) for slot, tokens in enumerate(manager.reserved_tokens) if tokens]
    if rows:
        slabs, within = np.divmod(np.concatenate(rows), manager.layout.slab_units)
        is_live[slabs, within // arena.page_units[group]] = True
    live: NDArray[np.int64] = is_live.sum(axis=1)
    return live


def _most_held(owner: NDArray[np.int32], groups: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per cell, the group that holds most of its slabs; FREE where none holds any."""
    held = np.stack([np.add.reduceat((owner == g).astype(np.int64), starts) for g in range(groups)])
    return np.where(held.any(axis=0), held.argmax(axis=0), FREE)


# -- sequences -----------------------------------------------------------------------------------------------------


def _running(engine: Engine, times_of: TimesOf, slot: int) -> dict[str, Any]:
    manager, request = engine.manager, engine.scheduler.running[slot]
    pages = [table.filled[slot] * table.group.stripes for table in manager.tables]
    computed = int(manager.lengths[slot])
    # The token sampled last is known but not computed yet; who lacks more than that is still reading its prompt.
    state = "prefill" if computed < request.known_tokens - 1 else "decode"
    return _sequence(manager, times_of, request, state, computed, pages)


def _waiting(engine: Engine, times_of: TimesOf, request: EngineRequest) -> dict[str, Any]:
    return _sequence(engine.manager, times_of, request, "waiting", 0, engine.manager.demand(request.known_tokens))


def _sequence(
    manager: KVManager, times_of: TimesOf, request: EngineRequest, state: str, computed: int, pages: list[int]
) -> dict[str, Any]:
    times = times_of(request)
    return {
        "id": request.id,
        "state": state,
        "age_s": None if times is None else round(time.monotonic() - times.submitted, 1),
        **life(request, times),
        "computed_tokens": computed,
        "max_tokens": request.params.max_tokens,
        "pages": pages,
        "bytes": sum(count * g.page_bytes for count, g in zip(pages, manager.layout.groups, strict=True)),
    }
