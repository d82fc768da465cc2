"""Plain attention against a softmax written out token by token: every mask, soft-cap, sinks and log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch

from windowpane.attention.mask import CAUSAL, Mask
from windowpane.attention.reference import QUERY_BLOCK, attend, attend_decoding
from windowpane.attention.scores import Scores
from windowpane.kv.retention import Chunk, Full, Window

TOKENS, QUERY_HEADS, KV_HEADS, DIM = QUERY_BLOCK + 40, 4, 2, 8
# Spans within a window, longer than one, across a chunk's border and across a block of queries.
SPANS = (range(3, 9), range(60, 100), range(QUERY_BLOCK - 5, QUERY_BLOCK + 5))
MASKS = {
    "full": CAUSAL,
    "window": Mask(Window(17)),
    "window of one token": Mask(Window(1)),
    "chunks": Mask(Chunk(50)),
    "full with spans": Mask(Full(), SPANS),
    "window with spans": Mask(Window(17), SPANS),
    "chunks with spans": Mask(Chunk(50), SPANS),
}
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])


def sees(mask: Mask, query: int, key: int) -> bool:
    """The rules in their own words, one pair of tokens at a time."""
    if any(query in span and key in span for span in mask.spans):
        return True
    if isinstance(mask.sees, Window):
        return 0 <= query - key < mask.sees.tokens
    if isinstance(mask.sees, Chunk):
        return key <= query and key // mask.sees.tokens == query // mask.sees.tokens
    return key <= query


def brute_force(q, keys, values, visible, scores: Scores, head: int) -> tuple[torch.Tensor, float]:
    """One query of one head over the keys [tokens, dim] that are visible."""
    logits = [float(q @ k) * scores.scale for k, seen in zip(keys, visible, strict=True) if seen]
    if scores.softcap is not None:
        logits = [scores.softcap * math.tanh(s / scores.softcap) for s in logits]
    weights = [math.exp(s) for s in logits]
    total = sum(weights) + (0.0 if scores.sinks is None else math.exp(float(scores.sinks[head])))
    seen_values = [v for v, seen in zip(values, visible, strict=True) if seen]
    return sum(w / total * v for w, v in zip(weights, seen_values, strict=True)), math.log(total)


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", MASKS)
def test_a_chunk(name, softcap, sinks):
    mask, scores = MASKS[name], Scores(0.6, softcap, sinks)
    keys, values = random_rows(KV_HEADS, TOKENS, DIM), random_rows(KV_HEADS, TOKENS, DIM + 4)
    positions = torch.cat([torch.tensor([2, 5, 40, 61, 99, 100]), torch.arange(TOKENS - QUERY_BLOCK, TOKENS)])
    queries = random_rows(len(positions), QUERY_HEADS, DIM)
    out = attend(queries, positions, keys, values, 0, mask, scores)
    sums = torch.empty(queries.shape[:2])
    again = attend(queries, positions, keys, values, 0, mask, scores, sums)
    for row in range(0, len(positions), 7):
        visible = [sees(mask, int(positions[row]), key) for key in range(TOKENS)]
        for head in range(QUERY_HEADS):
            shared = head // (QUERY_HEADS // KV_HEADS)
            expected, total = brute_force(queries[row, head], keys[shared], values[shared], visible, scores, head)
            torch.testing.assert_close(out[row, head], expected, rtol=0, atol=1e-9)
            torch.testing.assert_close(again[row, head], expected, rtol=0, atol=1e-9)
            assert float(sums[row, head]) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("name", ["window", "chunks", "window with spans"])
def test_keys_that_begin_late(name):
    """What no query sees need not be there."""
    mask, start = MASKS[name], 60
    keys, values = random_rows(KV_HEADS, TOKENS, DIM), random_rows(KV_HEADS, TOKENS, DIM)
    queries, positions = random_rows(40, QUERY_HEADS, DIM), torch.arange(start, start + 40)
    whole = attend(queries, positions, keys, values, 0, mask, Scores(1.0))
    first = mask.first_visible(start)
    assert first > 0
    assert torch.equal(whole, attend(queries, positions, keys[:, first:], values[:, first:], first, mask, Scores(1.0)))


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_decoding(softcap, sinks):
    scores = Scores(0.6, softcap, sinks)
    past_keys, past_values = random_rows(3, KV_HEADS, 9, DIM), random_rows(3, KV_HEADS, 9, DIM)
    keys, values, queries = (
        random_rows(3, KV_HEADS, DIM),
        random_rows(3, KV_HEADS, DIM),
        random_rows(3, QUERY_HEADS, DIM),
    )
    counts = torch.tensor([[1] * 9, [0] * 9, [0, 0, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    sums = torch.empty(queries.shape[:2])
    out = attend_decoding(queries, past_keys, past_values, counts, keys, values, scores, sums)
    assert torch.equal(out, attend_decoding(queries, past_keys, past_values, counts, keys, values, scores))
    for row in range(3):
        for head in range(QUERY_HEADS):
            shared = head // (QUERY_HEADS // KV_HEADS)
            all_keys = torch.cat([past_keys[row, shared], keys[row, shared][None]])
            all_values = torch.cat([past_values[row, shared], values[row, shared][None]])
            visible = [*counts[row].tolist(), True]
            expected, total = brute_force(queries[row, head], all_keys, all_values, visible, scores, head)
            torch.testing.assert_close(out[row, head], expected, rtol=0, atol=1e-9)
            assert float(sums[row, head]) == pytest.approx(total, abs=1e-5)


def test_decoding_without_a_past():
    queries, keys, values = random_rows(1, 2, DIM), random_rows(1, 1, DIM), random_rows(1, 1, DIM)
    nothing = torch.zeros(1, 1, 0, DIM, dtype=torch.float64)
    out = attend_decoding(queries, nothing, nothing, torch.zeros(1, 0, dtype=torch.bool), keys, values, Scores(1.0))
    torch.testing.assert_close(out, values.expand(1, 2, DIM))


class TestMask:
    def test_a_query_sees_one_range(self):
        mask = Mask(Window(4), (range(10, 20),))
        assert [mask.seen(p) for p in (2, 9, 10, 12, 19, 20)] == [
            range(3), range(6, 10), range(7, 20), range(9, 20), range(10, 20), range(17, 21),
        ]  # fmt: skip
        assert mask.first_visible(19) == 10

    def test_kernels_that_only_look_back(self):
        assert CAUSAL.reach_tokens is None and Mask(Window(7)).reach_tokens == Mask(Chunk(7)).reach_tokens == 7
        assert Mask(Window(7)).is_windowed and Mask(Chunk(7)).is_chunked
        assert not any(mask.is_windowed for mask in (CAUSAL, Mask(Chunk(7))))
        assert not any(mask.is_chunked for mask in (CAUSAL, Mask(Window(7))))
        with pytest.raises(ValueError, match="range"):
            _ = Mask(Full(), (range(3, 5),)).reach_tokens
