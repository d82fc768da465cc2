"""Several rows of one sequence in one pass over its pages: a token and the drafts behind it, 2 to 16 in all.

A tile of queries then has the rows of a segment one after another, each with the query heads of one KV head. All rows
see the past from pages, later ones less of it where a window slides; among themselves they are attended from the
activations, as one more tile, which the program that has the past's last tile takes too.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from windowpane.attention.triton.view import add_scores, first_visible, with_sinks
from windowpane.schedule.step import Segment

MOST_ROWS = 16
PRESENT = tl.constexpr(MOST_ROWS)  # rows of the tile of present tokens
FIELDS = tl.constexpr(len(Segment._fields))
WIDE_DIM = 256  # wider heads have sums for half as many queries


def rows_at_once(group: int, dim: int) -> int:
    """Rows of a segment that one tile of queries takes: their sums are registers."""
    return min((128 if dim <= WIDE_DIM else 64) // group, MOST_ROWS)


def split_rows(segments: Sequence[Segment], most_rows: int) -> list[Segment]:
    """The same queries in segments of at most so many; each sees the same past and the present up to its own end."""
    found = []
    for slot, start, stop, row, q_row, count in segments:
        first = stop - count
        for at in range(0, count, most_rows):
            own = min(most_rows, count - at)
            found.append(Segment(slot, start, first + at + own, row, q_row + at, own))
    return found


# What kernels are told of a segment beside its past: how many rows of the tile ask, the position of the first, how far
# a query looks back, and from one token's row to the next of q, out, K and V. With one row to a sequence it is empty.
ASKING, POSITION, REACH, Q_STRIDE, OUT_STRIDE, K_STRIDE, V_STRIDE = (tl.constexpr(i) for i in range(7))


@triton.jit
def asks(g, several, G: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile of queries are somebody's."""
    return g < G if ROWS == 1 else g < several[ASKING]


@triton.jit
def places(g, several, STRIDE: tl.constexpr, D: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
    """Where each row of a tile of queries lies behind the first."""
    return g * D if ROWS == 1 else g // G * several[STRIDE] + g % G * D


@triton.jit
def first_seen(g, several, G: tl.constexpr, CHUNKED: tl.constexpr):
    """The first token that each query sees."""
    return first_visible(several[POSITION] + g // G, several[REACH], CHUNKED)


@triton.jit
def seen_present(g, past, several, G: tl.constexpr, CHUNKED: tl.constexpr):
    """Which of the segment's own tokens each query sees, [tokens, queries]."""
    t = past + tl.arange(0, PRESENT)[:, None]
    return (t <= (several[POSITION] + g // G)[None, :]) & (t >= first_seen(g, several, G, CHUNKED)[None, :])


@triton.jit
def present_rows(X, stride, first, past, several, W: tl.constexpr, G: tl.constexpr):
    """W dims of the segment's own K or V, [tokens, dims]. What lies behind its last query is 0."""
    n = tl.arange(0, PRESENT)[:, None]
    last = several[POSITION] + several[ASKING] // G - 1 - past
    return tl.load(X + n * stride + first + tl.arange(0, W)[None, :], mask=n <= last, other=0.0)


@triton.jit
def present_scores(q, g_ok, K, past, several, W: tl.constexpr, D: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr):
    """Products of the segment's own keys and all queries q [queries, 1], as [tokens, queries]: W dims at a time."""
    s = tl.zeros([PRESENT, QUERIES], tl.float32)
    for first in tl.static_range(0, D, W):
        own = tl.load(q + first + tl.arange(0, W)[None, :], mask=g_ok, other=0.0)
        keys = present_rows(K, several[K_STRIDE], first, past, several, W, G)
        s = add_scores(keys.to(own.dtype), own, s)
    return s


@triton.jit
def leave_rows(
    PART, LSE, OUT, SINKS, slot, head, m, norm, acc, whole, several, FIRST: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Dims from FIRST on of an item's result, [queries, dims]: to the output, or as a part of it."""
    g = tl.arange(0, acc.shape[0])
    d = FIRST + tl.arange(0, acc.shape[1])[None, :]
    ok = asks(g, several, G, ROWS)
    if whole:
        total = with_sinks(norm, m, SINKS, head * G + g % G, ok)
        to = OUT + places(g, several, OUT_STRIDE, D, G, ROWS)[:, None] + d
        tl.store(to, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=ok[:, None])
    else:
        # A later row may see nothing of this part: its window has slid past it.
        total = tl.where(norm > 0, norm, 1.0)
        at = slot * (ROWS * G) + g
        tl.store(PART + at[:, None] * D + d, acc / total[:, None], mask=ok[:, None])
        if FIRST == 0:
            tl.store(LSE + at, tl.where(norm > 0, m + tl.log2(total), float("-inf")), mask=ok)
