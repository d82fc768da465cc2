from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.device import Device, given_up
from tests.kv.strategies import layouts
from tests.kv.test_layout import gemma_4_31b, layout_of
from windowpane.kv import books as books_module
from windowpane.kv.arena import Cursor, Move
from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.manager import KVManager, ReservationError, RestorePoint
from windowpane.kv.retention import Chunk, Full, Window, ceil_div

SLOTS, LONGEST = 4, 150
# WINDOWPANE_LONG=20000 runs about a million operations.
LONG = os.environ.get("WINDOWPANE_LONG")


class ManagerMachine(RuleBasedStateMachine):
    """Random sequences start, grow, shrink, share, resume and end; a device model checks every row that is read."""

    @initialize(layout=layouts(), share=st.integers(0, 400), rollback=st.sampled_from([0, 0, 1, 3, 20]))
    def begin(self, layout, share, rollback):
        probe = KVManager(layout, 0, SLOTS, LONGEST, rollback)
        whole = sum(ceil_div(p, n) for p, n in zip(probe.demand(LONGEST), probe.arena.pages_per_slab, strict=True))
        self.manager = KVManager(layout, whole * share // 100, SLOTS, LONGEST, rollback)
        self.device = Device(self.manager)
        self.history: dict[int, tuple[int, ...]] = {}
        self.points: list[tuple[RestorePoint, tuple[int, ...]]] = []
        self.fresh_token = 0

    def _flush(self):
        changes = self.manager.take_changes()
        self.device.apply(changes, given_up(changes, self.manager))

    def _pick(self, pick):
        """One of the running sequences."""
        return list(self.history)[pick % len(self.history)]

    @precondition(lambda self: len(self.history) < SLOTS)
    @rule(tokens=st.integers(1, LONGEST), count=st.integers(0, LONGEST))
    def start(self, tokens, count):
        slot = next(slot for slot in range(SLOTS) if slot not in self.history)
        fits = self.manager.can_reserve(self.manager.start_demand(tokens))
        if not fits:
            with pytest.raises(ReservationError):
                self.manager.start(slot, tokens)
            return
        self.manager.start(slot, tokens)
        self.history[slot] = ()
        self._flush()
        self.device.write_encoder(slot)
        self._extend(slot, count)

    @precondition(lambda self: len(self.history) < SLOTS and self.points)
    @rule(
        tokens=st.integers(1, LONGEST),
        pick=st.integers(0, 20),
        limit=st.one_of(st.none(), st.integers(1, LONGEST)),
    )
    def resume(self, tokens, pick, limit):
        slot = next(slot for slot in range(SLOTS) if slot not in self.history)
        alive = [(k, h) for k, h in self.points if k in self.manager.restore_points]
        assume(alive)
        point, history = alive[pick % len(alive)]
        length = point.length if limit is None else self.manager.longest_resume(point, limit)
        assume(length > 0)
        tokens = max(tokens, length)
        if not self.manager.can_reserve(self.manager.start_demand(tokens, point, length)):
            with pytest.raises(ReservationError):
                self.manager.start(slot, tokens, point, length)
            return
        self.manager.touch(point)
        self.manager.start(slot, tokens, point, length)
        self.history[slot] = history[:length]
        self._flush()

    @precondition(lambda self: self.history)
    @rule(
        pick=st.integers(0, SLOTS - 1),
        count=st.integers(1, 60),
        tails=st.lists(st.integers(1, 59), max_size=3, unique=True),
    )
    def extend(self, pick, count, tails):
        self._extend(self._pick(pick), count, tails)

    @precondition(lambda self: self.history)
    @rule(pick=st.integers(0, SLOTS - 1))
    def extend_by_one(self, pick):
        self._extend(self._pick(pick), 1)

    def _extend(self, slot, count, tails=()):
        old = len(self.history[slot])
        new = min(old + count, self.manager.reserved_tokens[slot])
        if new == old:
            return
        horizon = self.manager.horizon(slot)
        self.fresh_token += 1
        self.history[slot] += tuple(self.fresh_token * 1000 + i for i in range(new - old))
        inside = sorted(old + t for t in tails if old + t < new)
        points = self.manager.extend_with_tails(slot, new, inside)
        changes = self.manager.take_changes()
        if new <= horizon and not inside:
            moved = {(move.group, move.target) for move in changes.copies}  # gaps may be closed in any step
            updates = [u for u in changes.entries + changes.late if slot in u.slots]
            columns = [{(u.group, int(o)) for o in pages} for u in updates for pages in u.offsets[u.slots == slot]]
            assert all(pages & moved for pages in columns), "a table changed below the horizon"
        self.device.apply(changes, given_up(changes, self.manager))
        self.device.step(slot, self.history[slot], old, new, int(self.manager.state_slot[slot]))
        self.device.after_step(changes)
        self.manager.flip_states([slot])
        for point in points:
            self.manager.publish(point)
            self.points.append((point, self.history[slot][: point.length]))

    def _can_shrink(self):
        m = self.manager
        return [slot for slot, history in self.history.items() if m.shortest_truncation(slot) < len(history)]

    @precondition(lambda self: self._can_shrink())
    @rule(pick=st.integers(0, SLOTS - 1), count=st.integers(0, 20), again=st.integers(0, 30))
    def truncate(self, pick, count, again):
        slots = self._can_shrink()
        m, slot = self.manager, slots[pick % len(slots)]
        old, shortest = len(self.history[slot]), m.shortest_truncation(slot)
        assert shortest >= old - m.rollback_tokens
        if shortest:
            with pytest.raises(ValueError, match=f"can be truncated to {shortest}, not to {shortest - 1}"):
                m.truncate(slot, shortest - 1)
        length = shortest if m.has_state else old - 1 - count % (old - shortest)
        pages_before = [live + promised for live, promised in zip(m.live_pages, m.promised_pages, strict=True)]
        m.truncate(slot, length)
        self.history[slot] = self.history[slot][:length]
        assert [a + b for a, b in zip(m.live_pages, m.promised_pages, strict=True)] == pages_before
        for g, group in enumerate(m.layout.groups):
            if isinstance(group.retention, Full):
                held = len(m.tables[g].page_offsets(slot))
                assert held == ceil_div(length, group.block_tokens) * group.stripes
        self._extend(slot, again)

    @precondition(lambda self: self.history)
    @rule(pick=st.integers(0, SLOTS - 1), more=st.integers(1, LONGEST))
    def renew(self, pick, more):
        slot = self._pick(pick)
        tokens = min(LONGEST, self.manager.reserved_tokens[slot] + more)
        if self.manager.can_reserve(self.manager.renew_demand(slot, tokens)):
            self.manager.renew(slot, tokens)
        else:
            with pytest.raises(ReservationError):
                self.manager.renew(slot, tokens)

    @precondition(lambda self: any(self.history.values()))
    @rule(pick=st.integers(0, SLOTS - 1))
    def leave_point(self, pick):
        slot = self._pick(pick)
        assume(self.history[slot])
        point = self.manager.leave_point(slot)
        self._flush()
        if point is not None:
            self.points.append((point, self.history[slot]))
            self.manager.publish(point)

    @precondition(lambda self: self.points)
    @rule(pick=st.integers(0, 20))
    def drop(self, pick):
        point, _ = self.points.pop(pick % len(self.points))
        if point in self.manager.restore_points:
            self.manager.drop(point)

    @precondition(lambda self: self.history)
    @rule(pick=st.integers(0, SLOTS - 1))
    def release(self, pick):
        slot = self._pick(pick)
        self.manager.release(slot)
        del self.history[slot]

    @precondition(lambda self: any(self.history.values()))
    @rule(pick=st.integers(0, SLOTS - 1))
    def release_and_leave_point(self, pick):
        slot = self._pick(pick)
        assume(self.history[slot])
        self.points.append((self.manager.release_and_leave_point(slot), self.history.pop(slot)))

    @rule(tokens=st.integers(1, LONGEST))
    def give_way(self, tokens):
        demand = self.manager.demand(tokens)
        before = self.manager.restore_points
        if self.manager.give_way(demand):
            assert self.manager.can_reserve(demand)
        else:
            assert self.manager.restore_points == before

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "manager"):
            return
        m = self.manager
        m.check_integrity()
        groups = [m.group_bytes(g) for g in range(len(m.tables))]
        assert m.free_bytes + sum(g.live + g.cached + g.stranded for g in groups) == m.arena.total_bytes
        if not self.history:
            assert sum(g.live for g in groups) == 0
            assert m.promised_pages == [0] * len(groups)
        for slot in self.history:
            for g, group in enumerate(m.layout.groups):
                if isinstance(group.retention, Window):
                    bound = ceil_div(group.retention.tokens - 1 + m.rollback_tokens, group.block_tokens) + 1
                    assert m.owned_pages(slot, g) <= bound * group.stripes


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=int(LONG) if LONG else 100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def group_index(manager: KVManager, name: str) -> int:
    return manager.layout.groups.index(manager.layout.group(name))


def manager_31b(num_slabs: int = 5000, slots: int = 8, longest: int = 131_072) -> KVManager:
    return KVManager(layout_of(gemma_4_31b(), block_tokens=16), num_slabs, slots, longest)


def test_a_16001_token_prompt_owns_65_window_pages():
    """Others budget 1,001 pages (uncapped) or 576 (window + chunk) for the same prompt in 8,192-token chunks."""
    manager = manager_31b()
    window = group_index(manager, "window-1024")
    manager.start(0, 16_001 + 256)
    peak = 0
    for length in (8_192, 16_001, 16_002):
        manager.extend(0, length)
        peak = max(peak, manager.owned_pages(0, window))
    assert peak == 65


def test_a_65k_prefill_owns_no_more_window_pages_than_a_2k_one():
    manager = manager_31b()
    window = group_index(manager, "window-1024")
    owned = []
    for slot, length in enumerate((2_048, 65_536)):
        manager.start(slot, length)
        manager.extend(slot, length)
        owned.append(manager.owned_pages(slot, window))
    assert owned[0] == owned[1] == 64


def test_a_steady_window_takes_and_frees_nothing():
    manager = KVManager(layout_of([TokenCache(0, Window(64), 1, 64, 64)], block_tokens=16), 50, 1, 10_000)
    manager.start(0, 10_000)
    for length in range(1, 200):
        manager.extend(0, length)
    manager.take_changes()
    for length in range(200, 2_000):
        manager.extend(0, length)
    assert manager.take_changes().entries == ()


def test_joint_reservation_is_not_counted_twice():
    """What a sequence already took is no longer promised: two that fill the arena exactly both fit."""
    caches = [TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(32), 1, 64, 64)]
    layout = layout_of(caches, block_tokens=16)
    probe = KVManager(layout, 1, 1, 320)
    slabs = sum(ceil_div(2 * p, n) for p, n in zip(probe.demand(320), probe.arena.pages_per_slab, strict=True))
    manager = KVManager(layout, slabs, 3, 320)
    manager.start(0, 320)
    manager.extend(0, 300)
    manager.start(1, 320)
    assert not manager.can_reserve(manager.demand(1))
    manager.extend(1, 320)
    manager.extend(0, 320)
    manager.check_integrity()


def test_no_free_byte_is_out_of_reach_of_a_group():
    """A byte that one group lets go of serves any other."""
    layout = layout_of([TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(320), 4, 64, 64)], block_tokens=16)
    whole = KVManager(layout, 1, 1, 3200)
    slabs = sum(ceil_div(p, n) for p, n in zip(whole.demand(3200), whole.arena.pages_per_slab, strict=True))
    manager = KVManager(layout, slabs, 16, 3200)
    slot = 0
    while manager.can_reserve(manager.demand(320)):  # many short sequences: mostly window pages
        manager.start(slot, 320)
        manager.extend(slot, 320)
        slot += 1
    assert slot > 1
    for s in range(slot):
        manager.release(s)
    manager.start(0, 3200)  # one long one: mostly full pages
    manager.extend(0, 3200)


def test_stranded_pages_are_moved_when_only_they_are_in_the_way(monkeypatch):
    monkeypatch.setattr(books_module, "GAP_LIMIT", 1.0)  # no tidying beforehand
    caches = [TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(1024), 20, 64, 64)]
    layout = layout_of(caches, block_tokens=16)
    full, window = (layout.groups.index(layout.group(n)) for n in ("full", "window-1024"))
    per_slab = layout.pages_per_slab(layout.groups[full])
    assert per_slab > 4
    # Each sequence opens a slab for two full pages and takes two window pages.
    manager = KVManager(layout, 4 + 4 * 2 // layout.pages_per_slab(layout.groups[window]), 8, 10_000)
    device = Device(manager)
    for slot in range(4):
        manager.start(slot, 32)
        manager.extend(slot, 32)
        changes = manager.take_changes()
        device.apply(changes, given_up(changes, manager))
        device.step(slot, tuple(range(slot, slot + 32)), 0, 32, 0)
    assert manager.arena.free_slabs == 0
    manager.start(4, 32)
    manager.extend(4, 32)
    assert manager.moved_pages > 0
    changes = manager.take_changes()
    device.apply(changes, given_up(changes, manager))
    for slot in range(4):  # what was moved still reads right
        device.step(slot, (*range(slot, slot + 32), 99), 32, 32, 0)
    manager.check_integrity()


def test_gaps_are_closed_before_anyone_waits_for_them():
    layout = layout_of([TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(1024), 20, 64, 64)], block_tokens=16)
    manager = KVManager(layout, 130, 64, 1000)
    device = Device(manager)
    for slot in range(64):
        manager.start(slot, 16)
        manager.extend(slot, 16)
        changes = manager.take_changes()
        device.apply(changes, given_up(changes, manager))
        device.step(slot, tuple(range(slot, slot + 16)), 0, 16, 0)
    gaps = sum(manager.arena.gap_bytes(g) for g in range(len(layout.groups)))
    slabs_to_spare = manager.arena.free_slabs >= books_module.SCARCE * manager.arena.num_slabs
    assert slabs_to_spare or gaps <= books_module.GAP_LIMIT * manager.arena.total_bytes
    assert manager.moved_pages > 0
    for slot in range(64):
        device.step(slot, (*range(slot, slot + 16), 99), 16, 16, 0)


@pytest.mark.parametrize("moving", ["everything", "everything, beforehand", "only the page that takes its place"])
def test_a_shared_page_that_moves_in_the_step_that_slides_past_it_is_still_read(moving):
    layout = layout_of([TokenCache(0, Window(32), 1, 64, 64)], block_tokens=16, slab_bytes=16 * 2**14)
    manager = KVManager(layout, 8, 3, 1000)
    device = Device(manager)

    def step(slot: int, history: tuple[int, ...], old: int) -> None:
        changes = manager.take_changes()
        device.apply(changes, given_up(changes, manager))
        device.step(slot, history, old, len(history), 0)
        device.after_step(changes)

    history = tuple(range(32))
    manager.start(0, 32)
    manager.extend(0, 32)
    step(0, history, 0)
    point = manager.leave_point(0)
    manager.publish(point)
    manager.release(0)
    manager.start(1, 64, point)
    step(1, history, 32)
    # As if room had to be made within this very step: empty the slab that holds the shared pages.
    if moving == "everything, beforehand":
        manager.books.apply_moves(0, _move_pages(manager, but=set()))
    manager.extend(1, 49)  # slides past a shared page, which this step still reads
    if moving != "everything, beforehand":
        staying = set() if moving == "everything" else set(manager.point_offsets(point, 0).tolist())
        manager.books.apply_moves(0, _move_pages(manager, but=staying))
    step(1, (*history, *range(500, 517)), 32)
    manager.check_integrity()


def _move_pages(manager: KVManager, but: set[int]) -> list[Move]:
    """Move all pages of the first group, but these, into a slab of their own."""
    arena = manager.arena
    held = {int(o) for point in manager.restore_points for o in manager.point_offsets(point, 0)}
    held |= {int(o) for slot in range(manager.num_slots) for o in manager.tables[0].page_offsets(slot)}
    sources = sorted(held - but)
    targets = arena.take(0, len(sources), Cursor())
    arena.tag(0, targets, arena.tags(0, np.array(sources, dtype=np.int32)))
    arena.free(0, np.array(sources, dtype=np.int32))
    return [Move(0, source, int(target)) for source, target in zip(sources, targets, strict=True)]


def test_giving_up_restore_points_stops_once_it_fits():
    layout = layout_of([TokenCache(0, Full(), 1, 64, 64)], block_tokens=16)
    manager = KVManager(layout, 10 // layout.pages_per_slab(layout.groups[0]), 4, 160)
    points = []
    for _ in range(4):
        manager.start(0, 32)
        manager.extend(0, 32)
        points.append(manager.release_and_leave_point(0))

    manager.start(1, 48)
    manager.extend(1, 48)
    assert manager.restore_points == points[1:]


def test_a_pinned_page_is_never_given_up():
    layout = layout_of([TokenCache(0, Full(), 1, 64, 64)], block_tokens=16)
    manager = KVManager(layout, 10, 4, 160)
    manager.start(0, 64)
    manager.extend(0, 64)
    point = manager.leave_point(0)
    manager.publish(point)
    assert point is not None
    assert manager.can_reserve(manager.demand(96))
    assert not manager.can_reserve(manager.demand(97))
    manager.start(1, 96)
    manager.extend(1, 96)
    manager.check_integrity()
    assert manager.restore_points == [point]


def test_a_prompt_longer_than_a_window_pool_fits():
    """Nothing is set aside per window: only what a sequence can still see is charged."""
    manager = manager_31b(num_slabs=65 + 410)
    manager.start(0, 131_072)
    for length in range(8_192, 131_073, 8_192):
        manager.extend(0, length)
    assert manager.arena.free_slabs == 0


def test_very_many_groups():
    caches = [TokenCache(i, Window(16 * (i + 2)), 1, 64, 64) for i in range(46)]
    manager = KVManager(layout_of(caches, block_tokens=16), 2000, 2, 5000)
    manager.start(0, 5000)
    for length in (100, 3000, 5000):
        manager.extend(0, length)
    manager.check_integrity()
    manager.release(0)
    assert manager.free_bytes == manager.arena.total_bytes


def test_states_far_larger_than_attention_pages():
    caches = [
        TokenCache(0, Full(), 1, 64, 64),
        *(StateCache(i, (StatePart("recurrent", 16, 16_384, "float32"),)) for i in range(1, 4)),
    ]
    manager = KVManager(layout_of(caches), 60, 8, 100_000)
    manager.start(0, 100)
    manager.extend(0, 100)
    state = group_index(manager, "state")
    assert manager.live_pages[state] == 2 * 3
    pinned = manager.arena.total_bytes - manager.free_bytes - manager.group_bytes(state).live
    assert pinned < 2 * manager.layout.slab_bytes


def test_a_chunked_layer_forgets_at_its_boundary():
    manager = KVManager(layout_of([TokenCache(0, Chunk(64), 1, 64, 64)], block_tokens=16), 50, 1, 1000)
    manager.start(0, 1000)
    for length in range(1, 1001):
        manager.extend(0, length)
        assert manager.owned_pages(0, 0) <= 4


def test_reservations_are_kept_to():
    manager = manager_31b()
    manager.start(0, 100)
    with pytest.raises(ValueError, match="reserved 100"):
        manager.extend(0, 101)
    with pytest.raises(ValueError, match="in use"):
        manager.start(0, 10)


class Sequence:
    """One sequence over the device model: every step checks the rows that it reads."""

    def __init__(self, manager: KVManager, slot: int = 0, history: tuple[int, ...] = ()) -> None:
        self.manager, self.slot, self.history = manager, slot, history
        self.device = Device(manager)
        self.tokens = 0

    def grow(self, length: int) -> None:
        old = len(self.history)
        self.history += tuple(range(self.tokens, self.tokens + length - old))  # never the same tokens twice
        self.tokens += length - old
        self.manager.extend(self.slot, length)
        self._step(old)

    def truncate(self, length: int) -> None:
        self.manager.truncate(self.slot, length)
        self.history = self.history[:length]
        self.manager.check_integrity()

    def resume(self, point: RestorePoint, slot: int, tokens: int, length: int) -> None:
        self.manager.start(slot, tokens, point, length)
        self.slot, self.history = slot, self.history[:length]
        self._step(length)

    def _step(self, old: int) -> None:
        changes = self.manager.take_changes()
        self.device.apply(changes, given_up(changes, self.manager))
        self.device.step(self.slot, self.history, old, len(self.history), 0)
        self.device.after_step(changes)


def rollback_manager(*retentions, rollback: int = 4, slots: int = 2, slabs: int = 200) -> KVManager:
    caches = [TokenCache(i, retention, 1, 64, 64) for i, retention in enumerate(retentions)]
    return KVManager(layout_of(caches, block_tokens=16), slabs, slots, 1000, rollback)


@pytest.mark.parametrize("retention", [Full(), Window(1), Window(32), Window(33), Chunk(24), Chunk(64)])
@pytest.mark.parametrize("back", [1, 3, 4])
def test_what_drafts_wrote_can_be_taken_back_again_and_again(retention, back):
    manager = rollback_manager(retention)
    manager.start(0, 300)
    sequence = Sequence(manager)
    sequence.grow(82)
    sequence.truncate(82 - back)  # the first tokens of a window of 32 then lie in a page before those of 82 tokens
    while len(sequence.history) < 250:
        sequence.grow(len(sequence.history) + 5)
        sequence.truncate(len(sequence.history) - back)


def test_pages_given_back_by_a_truncation_stay_promised():
    manager = rollback_manager(Full(), rollback=40)
    per_slab = manager.arena.pages_per_slab[0]
    manager = rollback_manager(Full(), rollback=40, slabs=ceil_div(8, per_slab))
    manager.start(0, 128)
    manager.extend(0, 100)
    manager.truncate(0, 60)
    assert (manager.live_pages, manager.promised_pages) == ([4], [4])
    assert manager.horizon(0) == 64
    free_pages = ceil_div(8, per_slab) * per_slab - 8
    assert not manager.can_reserve([free_pages + 1])
    manager.extend(0, 128)
    manager.check_integrity()


def test_a_truncation_goes_back_no_further_than_the_manager_was_made_for():
    manager = rollback_manager(Window(32), Full())
    manager.start(0, 200)
    manager.extend(0, 100)
    manager.truncate(0, 97)
    manager.extend(0, 98)
    assert manager.shortest_truncation(0) == 96, "the window has forgotten what 95 tokens would see"
    with pytest.raises(ValueError, match=r"holds 98 tokens and can be truncated to 96, not to 95 \(rollback_tokens 4"):
        manager.truncate(0, 95)
    with pytest.raises(ValueError, match="not to 99"):
        manager.truncate(0, 99)


def test_without_rollback_nothing_is_taken_back():
    manager = rollback_manager(Full(), rollback=0)
    manager.start(0, 100)
    manager.extend(0, 50)
    with pytest.raises(ValueError, match=r"truncated to 50, not to 49 \(rollback_tokens 0"):
        manager.truncate(0, 49)


def test_a_recurrent_state_goes_back_to_where_its_last_step_began():
    caches = [TokenCache(0, Full(), 1, 64, 64), StateCache(1, (StatePart("recurrent", 4, 256),))]
    manager = KVManager(layout_of(caches), 60, 2, 1000, rollback_tokens=4)
    manager.start(0, 100)
    for length in (50, 54):
        manager.extend(0, length)
        manager.flip_states(np.array([0]))
    with pytest.raises(ValueError, match=r"truncated to 50, not to 52 .* exists before and behind the last step only"):
        manager.truncate(0, 52)
    manager.truncate(0, 50)
    assert manager.state_slot[0] == 1, "the first step's state"
    assert manager.shortest_truncation(0) == 50, "that before it is overwritten by the next step"
    manager.extend(0, 52)
    manager.flip_states(np.array([0]))
    manager.advance(np.array([0]))
    assert manager.shortest_truncation(0) == 53, "a step that did not extend it has overwritten the state before"


@pytest.mark.parametrize("retention", [Full(), Window(32), Chunk(64)])
def test_what_a_restore_point_keeps_is_never_written_again(retention):
    manager = rollback_manager(retention)
    manager.start(0, 300)
    sequence = Sequence(manager)
    sequence.grow(86)
    point = manager.leave_point(0)
    manager.publish(point)
    kept = sequence.history
    sequence.grow(89)
    with pytest.raises(ValueError, match=r"truncated to 86, not to 85 .*last restore point at 86"):
        manager.truncate(0, 85)
    sequence.truncate(86)
    sequence.grow(120)
    sequence.history = kept
    sequence.resume(point, 1, 300, 86)
    assert manager.shortest_truncation(1) == 86
    sequence.grow(130)


def test_a_sequence_resumes_inside_a_page_of_which_it_holds_nothing():
    """At a chunk's end nothing is asked for, although the sequence that left the point still held it for a rollback."""
    manager = rollback_manager(Chunk(24))
    manager.start(0, 300)
    sequence = Sequence(manager)
    sequence.grow(24)
    point = manager.release_and_leave_point(0)
    sequence.resume(point, 1, 300, 24)
    assert manager.horizon(1) == 24
    for length in range(25, 100):
        sequence.grow(length)


@pytest.mark.parametrize("rollback", [0, 1, 7, 16])
def test_windows_are_reserved_with_what_may_be_taken_back(rollback):
    manager = rollback_manager(Window(64), Full(), rollback=rollback)
    pages = Capacity(manager.layout, 0, rollback).pages(1000)
    assert manager.demand(1000) == pages == [ceil_div(64 - 2 + rollback, 16) + 1, 63]
    manager.start(0, 1000)
    owned = []
    for length in range(1, 1000):
        manager.extend(0, length)
        owned.append(manager.owned_pages(0, 0))
    assert max(owned) == pages[0]
