from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.strategies import layouts
from tests.kv.test_layout import gemma_4_31b, layout_of
from windowpane.kv.arena import Arena, ArenaFull, Cursor
from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.retention import Full, Window

GIB = 2**30


def allocate(capacity: Capacity, sequences: int, length: int) -> bool:
    """Really take the pages of so many sequences."""
    arena = Arena(capacity.layout, capacity.num_slabs)
    try:
        for _ in range(sequences):
            for group, pages in enumerate(capacity.pages(length)):
                arena.take(group, pages, Cursor())
    except ArenaFull:
        return False
    arena.check_integrity()
    return True


def allocate_together(capacity: Capacity, sequences: int, length: int) -> bool:
    """The same, group by group, so that no partly filled slab of one group keeps another group out."""
    arena = Arena(capacity.layout, capacity.num_slabs)
    try:
        for group, pages in enumerate(capacity.pages(length)):
            arena.take(group, sequences * pages, Cursor())
    except ArenaFull:
        return False
    return True


@settings(max_examples=150)
@given(layouts(), st.integers(0, 200_000), st.integers(1, 2000))
def test_sequences_fit_and_one_more_does_not(layout, kv_bytes, length):
    capacity = Capacity(layout, kv_bytes)
    if capacity.bytes_at(length) == 0:
        assert capacity.sequences(length) == 0
        return
    most = capacity.sequences(length)
    assert allocate_together(capacity, most, length)
    assert not allocate_together(capacity, most + 1, length)
    assert most <= capacity.byte_ratio(length) + 1e-9


@settings(max_examples=100)
@given(layouts(), st.integers(0, 100_000), st.integers(1, 4))
def test_the_longest_length_fits_and_one_token_more_does_not(layout, kv_bytes, sequences):
    capacity = Capacity(layout, kv_bytes)
    longest = capacity.longest(sequences)
    if longest is None:
        assert allocate_together(capacity, sequences, 10**6)
        return
    assert longest == 0 or allocate_together(capacity, sequences, longest)
    assert not allocate_together(capacity, sequences, longest + 1)


@given(layouts(), st.integers(1, 5000))
def test_fixed_and_per_token_bytes_bound_the_exact_need(layout, length):
    """Fixed + per token × length is the need of a long sequence, up to one page per growing group."""
    capacity = Capacity(layout, 2**30)
    line = capacity.fixed_bytes_per_sequence + capacity.bytes_per_token * length
    one_page_each = sum(g.stripes * g.page_bytes for g in layout.groups if g.grows)
    assert capacity.bytes_at(length) <= line + one_page_each
    far = 10**6
    assert capacity.bytes_at(far) >= capacity.fixed_bytes_per_sequence + capacity.bytes_per_token * far - 1


@pytest.mark.parametrize(
    ("gib", "ranks", "choice", "at_least"),
    [
        (64.74, 1, "bfloat16", 11.0),
        (11.54, 2, "bfloat16", 3.9),
        (64.74, 1, "int8_per_token_head", 1.9 * 11.0),
        (11.54, 2, "int8_per_token_head", 1.9 * 3.9),
    ],
)
def test_gemma_4_31b_at_131072_tokens(gib, ranks, choice, at_least):
    capacity = Capacity(layout_of(gemma_4_31b(ranks), choice), int(gib * GIB))
    assert capacity.byte_ratio(131_072) >= at_least
    assert capacity.sequences(131_072) == int(capacity.byte_ratio(131_072))
    assert allocate(capacity, capacity.sequences(131_072), 131_072)


def test_a_sliding_layer_costs_the_same_at_any_length_beyond_its_window():
    capacity = Capacity(layout_of(gemma_4_31b()), 64 * GIB)
    grown = capacity.bytes_at(131_072) - capacity.bytes_at(65_536)
    assert grown == 65_536 * 10 * 4 * 512 * 2


def test_a_100_token_prompt_of_a_state_model_pins_little_beyond_its_states():
    state = (StatePart("conv", 64, 384), StatePart("recurrent", 32, 128 * 128, "float32"))
    caches = [TokenCache(i, Full(), 2, 256, 256) if i % 4 == 3 else StateCache(i, state) for i in range(48)]
    capacity = Capacity(layout_of(caches), GIB)
    arena = Arena(capacity.layout, capacity.num_slabs)
    for group, pages in enumerate(capacity.pages(100)):
        arena.take(group, pages, Cursor())
    states = 2 * 36 * capacity.layout.group("state").page_bytes
    assert arena.total_bytes - arena.free_bytes - states < 10 * 2**20


def test_a_model_that_sees_no_further_than_its_windows_has_no_longest_length():
    caches = [TokenCache(0, Window(64), 1, 64, 64)]
    assert Capacity(layout_of(caches), 2**20).longest() is None


def test_the_curve_falls_and_ends_at_the_length_asked():
    curve = Capacity(layout_of(gemma_4_31b()), 64 * GIB).curve(100_000)
    assert [n for n, _ in curve] == [1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000]
    counts = [s for _, s in curve]
    assert counts == sorted(counts, reverse=True)
