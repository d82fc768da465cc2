from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kv.strategies import layouts
from tests.kv.test_layout import gemma_4_31b, layout_of
from windowpane.kv.arena import Arena, ArenaFull, Cursor


class ArenaMachine(RuleBasedStateMachine):
    """Random takers; a model of who holds which byte checks every page handed out."""

    @initialize(layout=layouts(), num_slabs=st.integers(0, 12))
    def start(self, layout, num_slabs):
        self.arena = Arena(layout, num_slabs)
        self.held: list[tuple[int, int]] = []  # (group, offset)
        self.cursors = {(g, t): Cursor() for g in range(len(layout.groups)) for t in range(3)}

    @rule(data=st.data(), taker=st.integers(0, 2), pages=st.integers(0, 40))
    def take(self, data, taker, pages):
        group = data.draw(st.integers(0, len(self.arena.layout.groups) - 1))
        before = self.arena.available_pages(group)
        try:
            offsets = self.arena.take(group, pages, self.cursors[group, taker])
        except ArenaFull:
            assert pages > before
            assert self.arena.available_pages(group) == before
            return
        assert len(offsets) == pages <= before
        self.held += [(group, int(o)) for o in offsets]

    @rule(data=st.data(), taker=st.integers(0, 2), pages=st.integers(1, 6))
    def take_block(self, data, taker, pages):
        group = data.draw(st.integers(0, len(self.arena.layout.groups) - 1))
        before = self.arena.available_pages(group)
        try:
            offsets = self.arena.take_block(group, pages, self.cursors[group, taker], tag=100)
        except ArenaFull:
            assert pages > before
            assert self.arena.available_pages(group) == before
            return
        assert self.arena.tags(group, np.array(offsets, dtype=np.int32)).tolist() == list(range(100, 100 + pages))
        assert self.arena.tag_of_one(group, offsets[0]) == 100
        self.held += [(group, o) for o in offsets]

    @rule(data=st.data())
    def free_some(self, data):
        group = data.draw(st.integers(0, len(self.arena.layout.groups) - 1))
        mine = [h for h in self.held if h[0] == group]
        chosen = data.draw(st.lists(st.sampled_from(mine), unique=True) if mine else st.just([]))
        self.arena.free(group, np.array([o for _, o in chosen], dtype=np.int32))
        self.held = [h for h in self.held if h not in set(chosen)]

    @rule(data=st.data())
    def compact(self, data):
        group = data.draw(st.integers(0, len(self.arena.layout.groups) - 1))
        free_before, gaps = self.arena.free_slabs, self.arena.gap_pages(group)
        moves = self.arena.compact(group)
        if gaps >= self.arena.pages_per_slab[group]:
            assert self.arena.free_slabs == free_before + 1
        else:
            assert moves == []
        for move in moves:
            self.held.remove((group, move.source))
            self.held.append((group, move.target))

    @invariant()
    def no_byte_is_held_twice(self):
        if not hasattr(self, "arena"):
            return
        self.arena.check_integrity()
        units = self.arena.page_units
        spans = sorted((offset, offset + units[group]) for group, offset in self.held)
        assert all(a_end <= b for (_, a_end), (b, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] * 256 <= self.arena.total_bytes
        counts = [sum(1 for g, _ in self.held if g == group) for group in range(len(units))]
        assert counts == self.arena.used_pages


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def arena_31b(num_slabs: int) -> Arena:
    return Arena(layout_of(gemma_4_31b()), num_slabs)


def test_a_taker_fills_its_own_slab_before_it_opens_another():
    arena = arena_31b(4)
    full = arena.layout.groups.index(arena.layout.group("full"))
    mine, other = Cursor(), Cursor()
    arena.take(full, 3, mine)
    arena.take(full, 3, other)
    arena.take(full, 3, mine)
    assert arena.held_slabs[full] == 2


def test_gaps_of_others_are_used_when_no_slab_is_free():
    arena = arena_31b(1)
    full = arena.layout.groups.index(arena.layout.group("full"))
    arena.take(full, 1, Cursor())
    assert len(arena.take(full, arena.pages_per_slab[full] - 1, Cursor())) == arena.pages_per_slab[full] - 1
    with pytest.raises(ArenaFull, match="0 available"):
        arena.take_block(full, 1, Cursor())


def test_a_slab_freed_by_one_group_serves_another():
    arena = arena_31b(1)
    window, full = (arena.layout.groups.index(arena.layout.group(n)) for n in ("window-1024", "full"))
    page = arena.take(window, 1, Cursor())
    with pytest.raises(ArenaFull):
        arena.take(full, 1, Cursor())
    arena.free(window, page)
    assert len(arena.take(full, 1, Cursor())) == 1


def test_freeing_what_is_not_held_is_refused():
    arena = arena_31b(2)
    with pytest.raises(ValueError, match="does not hold"):
        arena.free(0, np.array([0], dtype=np.int32))


def test_offsets_reach_beyond_4_gib():
    arena = arena_31b(2000)
    window = arena.layout.groups.index(arena.layout.group("window-1024"))
    offsets = arena.take(window, 2000, Cursor())
    assert offsets.dtype == np.int32
    assert int(offsets.max()) * 256 == 1999 * arena.layout.slab_bytes > 2**34


def test_an_arena_beyond_the_reach_of_its_tables_is_refused():
    with pytest.raises(ValueError, match="512 GiB"):
        arena_31b(2**20)
