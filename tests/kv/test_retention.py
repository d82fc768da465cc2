from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windowpane.kv.retention import Chunk, Cross, Full, Window

growing = st.one_of(st.just(Full()), st.builds(Window, st.integers(1, 60)), st.builds(Chunk, st.integers(1, 60)))


def pages_touched(held: range, block_tokens: int) -> int:
    return len({token // block_tokens for token in held})


@given(growing, st.integers(0, 400), st.integers(1, 20), st.integers(0, 5))
def test_max_pages_is_what_brute_force_counts(retention, length, block_tokens, rollback):
    counted = max(pages_touched(retention.held(n, rollback), block_tokens) for n in range(length + 1))
    promised = retention.max_pages(length, block_tokens, rollback)
    assert counted <= promised
    # The worst start of a chunk inside a page may lie several chunks ahead; everything else is exact at once.
    worst_start_reached = retention.kind != "chunk" or length >= retention.tokens * (block_tokens + 1)
    if rollback == 0 and worst_start_reached:
        assert counted == promised


@given(growing, st.integers(0, 100), st.integers(0, 5))
def test_held_covers_everything_a_later_token_sees(retention, length, rollback):
    held = retention.held(length, rollback)
    for back in range(min(rollback, length) + 1):
        assert retention.first_visible(length - back) >= held.start
    assert held.stop == length


def test_a_window_of_1024_in_blocks_of_16_owns_65_pages_at_any_length():
    assert Window(1024).max_pages(16_001, 16) == 65
    assert Window(1024).max_pages(131_072, 16) == 65


def test_a_short_sequence_pays_only_for_its_tokens():
    assert Window(1024).max_pages(100, 16) == 7


def test_a_window_of_one_token_keeps_nothing():
    assert Window(1).max_pages(1000, 16) == 0


def test_a_chunk_aligned_to_blocks_needs_no_straddling_page():
    assert Chunk(8192).max_pages(100_000, 16) == 512


def test_cross_attention_pays_for_the_encoder_whatever_the_length():
    assert Cross(1500).max_pages(1, 16) == Cross(1500).max_pages(448, 16) == 94


@pytest.mark.parametrize("bad", [0, -5])
@pytest.mark.parametrize("kind", [Window, Chunk, Cross])
def test_impossible_sizes_are_refused(kind, bad):
    with pytest.raises(ValueError, match="at least 1"):
        kind(bad)
