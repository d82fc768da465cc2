"""/stats: its sums are the arena, its map is where pages lie, its rates are those of the last minute."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.test_layout import gemma_4_31b, layout_of
from tests.test_engine import engine_for, request
from windowpane.engine.accounts import Account
from windowpane.engine.engine import Engine, TokenOutput
from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.disk import DiskStore
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Full, Window
from windowpane.kv.tier import HostTier
from windowpane.schedule.request import FinishReason
from windowpane.server import stats
from windowpane.server.job import Times
from windowpane.server.journal import KEPT, Journal
from windowpane.server.meter import BUCKET_S, HISTORY_S, TREND_S, Meter
from windowpane.server.stats import ModelFacts, _Feed, history, snapshot

DOC = Path(__file__).parents[2] / "docs" / "stats.md"
MODEL = ModelFacts("tiny", 1000, True, "this CPU", "float32", (Account("  full", 2, (2, 3), "1 layers, float32"),))
CACHES = [
    TokenCache(0, Full(), 1, 64, 64),
    TokenCache(1, Window(64), 1, 64, 96),
    StateCache(2, (StatePart("ssm", 4, 3000),)),
]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def take(engine: Engine) -> dict[str, Any]:
    return snapshot(engine, Meter(), MODEL)


def cells(arena: dict[str, Any]) -> list[list[int]]:
    """The map, one entry per cell."""
    return [run[1:] for run in arena["map"] for _ in range(run[0])]


def true_cells(manager: KVManager) -> list[list[int]]:
    """Group, live, cached and stranded bytes of each slab, by looking at every page of every holder."""
    layout = manager.layout
    live: list[set[int]] = [set() for _ in layout.groups]
    kept: list[set[int]] = [set() for _ in layout.groups]
    for g, table in enumerate(manager.tables):
        for slot in range(manager.num_slots):
            live[g] |= set(table.page_offsets(slot).tolist())
        for point in manager.restore_points:
            kept[g] |= set(manager.books.shared[g].offsets[point.pages[g]].tolist())
    found = []
    for slab in range(manager.arena.num_slabs):
        here = range(slab * layout.slab_units, (slab + 1) * layout.slab_units)
        held = [(g, [o in live[g] for o in live[g] | kept[g] if o in here]) for g in range(len(layout.groups))]
        owners = [(g, pages) for g, pages in held if pages]
        assert len(owners) <= 1
        if not owners:
            found.append([-1, 0, 0, 0])
            continue
        g, pages = owners[0]
        page_bytes = layout.groups[g].page_bytes
        live_bytes, used_bytes = sum(pages) * page_bytes, len(pages) * page_bytes
        found.append([g, live_bytes, used_bytes - live_bytes, layout.slab_bytes - used_bytes])
    return found


class TestArena:
    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["start", "extend", "leave a point", "release", "drop"]),
                st.integers(0, 3),
                st.integers(1, 90),
            ),
            max_size=25,
        )
    )
    def test_map_and_groups_say_where_every_byte_is(self, operations: list[tuple[str, int, int]]) -> None:
        manager = KVManager(layout_of(CACHES, block_tokens=16, slab_bytes=120 * 768), 16, 4, 200)
        for what, slot, amount in operations:
            running, points = manager.reserved_tokens[slot] > 0, manager.restore_points
            if what == "start" and not running:
                resume = points[amount % len(points)] if points and amount % 2 else None
                if manager.can_reserve(manager.start_demand(200, resume)):
                    manager.start(slot, 200, resume)
            elif what == "extend" and running:
                manager.extend(slot, min(200, int(manager.lengths[slot]) + amount))
            elif what == "leave a point" and running and manager.lengths[slot]:
                point = manager.leave_point(slot)  # its step lands at once
                if point is not None:
                    manager.publish(point)
            elif what == "release" and running:
                manager.release(slot)
            elif what == "drop" and points:
                manager.drop(points[amount % len(points)])
            manager.take_changes()
            arena = stats._arena(manager)
            assert cells(arena) == true_cells(manager)
            for state, column in (("live", 1), ("cached", 2), ("stranded", 3)):
                assert arena[f"{state}_bytes"] == sum(cell[column] for cell in cells(arena))
                assert arena[f"{state}_bytes"] == sum(g[f"{state}_bytes"] for g in arena["groups"])
            assert arena["total_bytes"] == sum(arena[f"{s}_bytes"] for s in ("live", "cached", "stranded", "free"))
            for group in arena["groups"]:
                assert group["live_bytes"] == group["live_pages"] * group["page_bytes"]
                assert group["cached_bytes"] == group["cached_pages"] * group["page_bytes"]

    @pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
    def test_map_is_right_between_any_two_steps(self, overlapped: bool) -> None:
        engine = engine_for(overlapped, sequences=2, length=150)
        requests = [request(str(n), range(20 + 17 * n), max_tokens=60) for n in range(6)]
        for one in requests:
            engine.add(one)
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            if steps == 30:
                engine.cancel(requests[0])
            assert cells(take(engine)["arena"]) == true_cells(engine.manager)
        assert steps > 100
        assert take(engine)["arena"]["live_bytes"] == 0

    def test_a_large_arena_shows_several_slabs_in_a_cell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = KVManager(layout_of(CACHES, block_tokens=16), 100, 4, 1000)
        manager.start(0, 1000)
        manager.extend(0, 1000)
        manager.take_changes()
        whole = cells(stats._arena(manager))
        monkeypatch.setattr(stats, "MAP_CELLS", 30)
        arena = stats._arena(manager)
        assert arena["slabs_per_cell"] == 4
        assert len(cells(arena)) == 25
        for cell, slabs in zip(cells(arena), (whole[i : i + 4] for i in range(0, 100, 4)), strict=True):
            assert cell[1:] == np.sum(slabs, axis=0)[1:].tolist()
            owners = [slab[0] for slab in slabs if slab[0] >= 0]
            assert cell[0] == (max(set(owners), key=lambda g: (owners.count(g), -g)) if owners else -1)

    def test_an_empty_arena_is_one_run(self) -> None:
        arena = take(engine_for(False))["arena"]
        assert arena["map"] == [[arena["slabs"], -1, 0, 0, 0]]
        assert arena["free_bytes"] == arena["total_bytes"]

    def test_is_taken_in_milliseconds_at_full_size(self) -> None:
        """Gemma 4 31B on an H200: 5,400 slabs, 25 sequences of 16k tokens and as many restore points."""
        manager = KVManager(layout_of(gemma_4_31b()), 5400, 256, 20_000)
        for slot in range(25):
            manager.start(slot, 16_500)
            manager.extend(slot, 16_384 + slot)
            manager.leave_point(slot)
            manager.take_changes()
        stats._arena(manager)
        began = time.process_time()
        stats._arena(manager)
        assert time.process_time() - began < 0.05  # about 3 ms; the machine may be busy


class TestSequences:
    def test_run_wait_and_hold_pages(self) -> None:
        engine = engine_for(False, sequences=1, length=200)
        first, second = request("first", range(100), max_tokens=90), request("second", range(90), max_tokens=90)
        engine.add(first)
        engine.add(second)
        engine.step()
        shown = {s["id"]: s for s in take(engine)["sequences"]["shown"]}
        assert shown["first"]["state"] == "prefill"
        assert shown["first"]["computed_tokens"] == 64
        engine.step()
        engine.step()
        document = take(engine)
        sequences = document["sequences"]
        assert (sequences["running"], sequences["waiting"]) == (1, 1)
        running, waiting = sequences["shown"]
        assert (running["id"], running["state"]) == ("first", "decode")
        assert (waiting["id"], waiting["state"]) == ("second", "waiting")
        assert running["output_tokens"] == len(first.output) == 2
        assert running["pages"] == [g["live_pages"] for g in document["arena"]["groups"]]
        assert running["bytes"] == document["arena"]["live_bytes"] > 0
        assert waiting["pages"] == engine.manager.demand(90)
        assert waiting["computed_tokens"] == 0
        while engine.has_work:
            engine.step()
        assert take(engine)["sequences"]["shown"] == []

    def test_are_shown_up_to_a_limit_and_counted_beyond(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats, "SEQUENCES_SHOWN", 3)
        engine = engine_for(True, budget=512)
        for name in "abcdefghijklm":
            engine.add(request(name, range(10)))
        engine.step()
        sequences = take(engine)["sequences"]
        assert (sequences["running"], sequences["waiting"]) == (8, 5)
        assert [s["id"] for s in sequences["shown"]] == ["a", "b", "c", "i", "j", "k"]


class TestRates:
    def test_are_of_the_last_seconds(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        clock.now += 100
        one = request("one", range(40))
        meter.arrived(one, clock.now - 0.5)
        one.cached_tokens = 10
        for _ in range(4):
            meter.stepped([TokenOutput(one, 5, None, None, 0)] * 6)
            clock.now += 0.5
        rates = meter.document()
        assert rates["output_tokens"] == 24
        assert rates["output_tokens_per_s"] == 12  # 24 in the two seconds that have begun and ended
        assert rates["ttft_ms"] == {"p50": 500, "p95": 500, "requests": 1}
        assert rates["hit_rate"] == 0.25
        assert (rates["prompt_tokens"], rates["cached_tokens"]) == (40, 10)
        history = rates["history"]
        assert history["output_tokens"][-3:] == [12, 12, 0]
        assert history["ttft_ms"][-3:] == [500, None, None]
        assert history["hit_rate"][-3:] == [0.25, None, None]
        assert {len(line) for line in history.values()} == {HISTORY_S}
        clock.now += HISTORY_S
        rates = meter.document()
        assert rates["output_tokens_per_s"] == 0
        assert rates["hit_rate"] is None
        assert rates["ttft_ms"]["p50"] is None
        assert set(rates["history"]["output_tokens"]) == {0}
        assert rates["output_tokens"] == 24

    def test_requests_are_forgotten_when_they_end(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        done, gone = request("done", [1]), request("gone", [1])
        meter.arrived(done, clock.now)
        meter.arrived(gone, clock.now)
        clock.now += 3
        meter.stepped([TokenOutput(done, 1, None, FinishReason.LENGTH, 0)])
        meter.ended(gone)
        meter.ended(gone)
        assert meter.document()["finished_requests"] == 2
        assert not meter._arrivals
        assert not meter._waiting_for_first

    def test_a_failed_step_is_no_token(self) -> None:
        meter = Meter(Clock())
        failed = request("failed", [1])
        meter.arrived(failed, 999.0)
        meter.stepped([TokenOutput(failed, None, None, FinishReason.FAILED, 0)])
        assert meter.document()["output_tokens"] == 0
        assert meter.document()["ttft_ms"]["requests"] == 0

    def test_seconds_beyond_the_history_are_dropped(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        for _ in range(500):
            meter.stepped([])
            clock.now += 1
        assert len(meter._seconds) <= TREND_S + 1


class TestHistory:
    def test_trends_are_of_the_last_quarter_of_an_hour(self) -> None:
        clock = Clock()
        clock.now = 5000.0
        meter, engine = Meter(clock), engine_for(False, length=150)
        one = request("one", range(40), max_tokens=3)
        meter.arrived(one, clock.now - 0.25)
        engine.add(one)
        while engine.has_work:
            meter.stepped(engine.step())
            meter.remember(engine)
            clock.now += BUCKET_S
        trends = meter.trends(len(engine.manager.layout.groups))
        assert {len(trends[name]) for name in ("output_tokens_per_s", "ttft_ms")} == {TREND_S // BUCKET_S}
        assert trends["output_tokens_per_s"][-4:] == [0.1, 0.1, 0.1, 0.0]
        assert trends["ttft_ms"][-4:] == [250, None, None, None]
        held = [engine.manager.group_bytes(g) for g in range(len(engine.manager.layout.groups))]
        assert [group[-1] for group in trends["held_bytes"]] == [h.live + h.cached for h in held]
        assert all(len(group) == TREND_S // BUCKET_S and group[0] == 0 for group in trends["held_bytes"])
        clock.now += 2 * TREND_S
        later = meter.trends(len(held))
        assert not any(later["output_tokens_per_s"])
        assert [group[0] for group in later["held_bytes"]] == [h.live + h.cached for h in held], "nothing changed it"

    def test_the_journal_has_the_life_of_what_ended_and_forgets_the_oldest(self) -> None:
        journal, one = Journal(), request("one", range(10))
        one.cached_tokens, one.drafted_tokens, one.accepted_tokens = 4, 6, 5
        one.output.extend([1, 2, 3])
        journal.ended(one, FinishReason.STOP, Times(10.0, 11.0, 11.5, 13.5, 13.5))
        journal.preempted(one)
        journal.refused("POST /v1/completions", "429 queue_full")
        refused, preempted, ended = journal.document()
        assert (refused["what"], refused["id"], refused["error"]) == (
            *("refused", "POST /v1/completions"),
            "429 queue_full",
        )
        assert (preempted["what"], preempted["id"], preempted["life"]) == ("preempted", "one", None)
        assert ended["what"] == "stop" and ended["error"] is None
        assert [ended["life"][part] for part in ("queued_s", "prefilled_s", "decoded_s")] == [1.0, 0.5, 2.0]
        assert (ended["life"]["drafted_tokens"], ended["life"]["accepted_tokens"]) == (6, 5)
        for _ in range(2 * KEPT):
            journal.preempted(one)
        assert len(journal.document()) == KEPT


class TestFeed:
    def test_all_readers_share_one_snapshot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken = 0

        async def get_snapshot() -> dict[str, Any]:
            nonlocal taken
            taken += 1
            await asyncio.sleep(0.01)
            return {"taken": taken}

        async def read() -> None:
            feed = _Feed(get_snapshot)
            assert set(await asyncio.gather(*(feed.latest() for _ in range(20)))) == {b'{"taken":1}'}
            assert await feed.latest() == b'{"taken":1}'
            monkeypatch.setattr(stats, "INTERVAL_S", 0.0)
            assert await feed.latest() == b'{"taken":2}'

        asyncio.run(read())

    def test_a_stream_stays_open_through_a_long_step_and_ends_with_the_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stats, "INTERVAL_S", 0.0)
        monkeypatch.setattr(stats, "KEEP_ALIVE_S", 0.01)
        release = asyncio.Event()
        taken = 0

        async def get_snapshot() -> dict[str, Any]:
            nonlocal taken
            taken += 1
            if taken == 2:
                await release.wait()
            if taken == 3:
                raise RuntimeError("the engine died")
            return {"taken": taken}

        async def read() -> list[bytes]:
            feed = _Feed(get_snapshot)
            events = []
            async for event in feed.events(asyncio.ensure_future(feed.latest())):
                events.append(event)
                if len(events) == 3:
                    release.set()
            return events

        events = asyncio.run(read())
        assert events[0] == b'data: {"taken":1}\n\n'
        assert events[-1] == b'data: {"taken":2}\n\n'
        assert len(events) >= 4
        assert all(event.startswith(b": ") for event in events[1:-1])

    def test_is_one_document_or_a_stream_as_the_reader_accepts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats, "INTERVAL_S", 0.0)
        left = 3

        async def get_snapshot() -> dict[str, Any]:
            nonlocal left
            if left == 0:
                raise RuntimeError("the engine died")
            left -= 1
            return {"left": left}

        app = FastAPI()
        app.include_router(stats.router(get_snapshot, get_snapshot))
        client = TestClient(app, raise_server_exceptions=False)
        assert client.get("/stats").json() == {"left": 2}
        stream = client.get("/stats", headers={"Accept": "text/event-stream"})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.text == 'data: {"left":1}\n\ndata: {"left":0}\n\n'
        assert client.get("/stats", headers={"Accept": "text/event-stream"}).status_code == 500


def test_every_field_is_documented(tmp_path: Path) -> None:
    engine = engine_for(True)
    engine.add(request("one", range(100)))
    engine.step()
    points = RestorePoints(engine.scheduler.manager)
    engine.scheduler.tier = tier = HostTier(points, 4)
    memory = np.zeros(tier.books.arena.total_bytes, dtype=np.uint8)
    disk = DiskStore(tmp_path, 2**20, "one", points.manager.layout, [memory])
    tier.use_disk(disk)
    document = take(engine)
    disk.close()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    journal = Journal()
    journal.preempted(request("two", [1]))
    past = history(engine, Meter(), journal)
    cells = re.findall(r"^\| (`[a-z_0-9]+`(?:, `[a-z_0-9]+`)*) \|", DOC.read_text(), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    fields: set[str] = set()

    def collect(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            fields.add(key)
            collect(inner)
        for inner in value if isinstance(value, list) else ():
            collect(inner)

    collect(document)
    collect(past)
    assert fields == documented
