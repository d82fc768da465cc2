"""Pairs of a row and an expert by expert, in blocks that have their expert in common.

Few pairs are compared with all others: where a pair goes is how many come before it. Of more, a chunk is counted by one
program and placed by another: where a pair goes is told by the counts of all chunks, which a launch between adds up,
and by the pairs of its own chunk before it.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.reference.routing import Routing

# Up to so many pairs, all are compared: those of a program with so many at once.
RANKED_PAIRS, RANKED_BY, RANKED_WITH = 2048, 32, 1024
# Pairs of a chunk, each of which is compared with all others.
CHUNK = 256
# Chunks whose counts are added at once, and experts of a program that adds them.
_ADDED, ADDED_BINS = tl.constexpr(256), 8


class Sorted(NamedTuple):
    """Pairs by expert, int32 [pairs]; blocks [most, 3]: expert, first pair and the end of pairs; how many, and two
    zeros for the kernels that count the tiles that are taken of both products, [3].

    `places`, [pairs]: where among `pairs` each one is; -1 where its expert is another rank's.
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    count: torch.Tensor
    places: torch.Tensor


def sort_pairs(routing: Routing, first: int, local: int, block_rows: int, *, pdl: bool) -> Sorted:
    """The pairs of experts `first` to `first + local`, by expert and then in order of rows."""
    pairs = routing.ids.numel()
    # Every block has a pair, and every expert at most one block that is not full.
    most = min(pairs, pairs // block_rows + local)
    # Each begins at whole 16 bytes: kernels would be compiled anew for those that do not.
    sizes = [pairs, 3 * most, 3, pairs]
    padded = [ceil_div(size, 4) * 4 for size in sizes]
    parts = torch.empty(sum(padded), dtype=torch.int32, device=routing.ids.device).split(padded)
    by_expert, blocks, count, places = (part[:size] for part, size in zip(parts, sizes, strict=True))
    found = Sorted(by_expert, blocks.view(most, 3), count, places)
    bins = max(32, triton.next_power_of_2(local + 1))
    common = {"LOCAL": local, "BINS": bins, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    if pairs <= RANKED_PAIRS:
        whole = max(32, triton.next_power_of_2(pairs))
        rank_kernel[(ceil_div(pairs, RANKED_BY) + 1,)](
            routing.ids, *found, pairs, first, ROWS=block_rows, OWN=RANKED_BY, CHUNK=min(whole, RANKED_WITH), ALL=whole,
            **common,
        )  # fmt: skip
        return found
    chunks = ceil_div(pairs, CHUNK)
    counts = torch.empty(chunks + 1, bins, dtype=torch.int32, device=routing.ids.device)
    count_kernel[(chunks,)](routing.ids, counts, pairs, first, CHUNK=CHUNK, **common)
    add_counts_kernel[(bins // ADDED_BINS,)](
        counts, chunks, BINS=bins, OWN=ADDED_BINS, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    place_kernel[(chunks,)](routing.ids, counts, *found, pairs, first, ROWS=block_rows, CHUNK=CHUNK, **common)
    return found


@triton.jit(do_not_specialize=["pairs", "first"])
def rank_kernel(
    IDS, PAIRS, BLOCKS, COUNT, PLACES, pairs, first, ROWS: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: OWN pairs; the last one: the blocks of all experts."""
    wait_if_overlapped(PDL)
    mine = tl.program_id(0)
    if mine == tl.num_programs(0) - 1:
        totals = tl.histogram(_experts(IDS, 0, pairs, first, LOCAL, ALL), BINS)
        _write_blocks(BLOCKS, COUNT, totals, ROWS, LOCAL)
    else:
        expert, pair = _experts(IDS, mine, pairs, first, LOCAL, OWN), mine * OWN + tl.arange(0, OWN)
        key = expert * ALL + pair
        to = tl.zeros([OWN], tl.int32)
        for chunk in tl.range(0, ALL // CHUNK):
            other = _experts(IDS, chunk, pairs, first, LOCAL, CHUNK) * ALL + chunk * CHUNK + tl.arange(0, CHUNK)
            to += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        _write_pairs(PAIRS, PLACES, expert, pair, to, pairs, LOCAL)


@triton.jit(do_not_specialize=["pairs", "first"])
def count_kernel(
    IDS, COUNTS, pairs, first, LOCAL: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """One chunk: its pairs of each expert."""
    wait_if_overlapped(PDL)
    counts = tl.histogram(_experts(IDS, tl.program_id(0), pairs, first, LOCAL, CHUNK), BINS)
    tl.store(COUNTS + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["chunks"])
def add_counts_kernel(COUNTS, chunks, BINS: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr):
    """Some experts: counts become those of the chunks before, and all of them come behind the last chunk."""
    wait_if_overlapped(PDL)
    bins = tl.program_id(0) * OWN + tl.arange(0, OWN)
    before = tl.zeros([OWN], tl.int32)
    for start in tl.range(0, chunks, _ADDED):
        chunk = start + tl.arange(0, _ADDED)[:, None]
        at = COUNTS + chunk * BINS + bins[None, :]
        counts = tl.load(at, mask=chunk < chunks, other=0, cache_modifier=".cg")
        tl.store(at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=chunk < chunks)
        before += tl.sum(counts, 0)
    tl.store(COUNTS + chunks * BINS + bins, before)


@triton.jit(do_not_specialize=["pairs", "first"])
def place_kernel(
    IDS, COUNTS, PAIRS, BLOCKS, COUNT, PLACES, pairs, first, ROWS: tl.constexpr, LOCAL: tl.constexpr,
    BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk; the first program writes the blocks of all experts besides."""
    wait_if_overlapped(PDL)
    mine, bins = tl.program_id(0), tl.arange(0, BINS)
    totals = tl.load(COUNTS + tl.num_programs(0) * BINS + bins, cache_modifier=".cg")
    ahead = tl.load(COUNTS + mine * BINS + bins, cache_modifier=".cg")
    begins = tl.cumsum(totals, 0) - totals
    expert = _experts(IDS, mine, pairs, first, LOCAL, CHUNK)
    place = tl.arange(0, CHUNK)
    is_before = (expert[:, None] == expert[None, :]) & (place[None, :] < place[:, None])
    to = tl.gather(begins + ahead, expert, 0) + tl.sum(is_before.to(tl.int32), 1)
    _write_pairs(PAIRS, PLACES, expert, mine * CHUNK + place, to, pairs, LOCAL)
    if mine == 0:
        _write_blocks(BLOCKS, COUNT, totals, ROWS, LOCAL)


@triton.jit
def _write_pairs(PAIRS, PLACES, expert, pair, to, pairs, LOCAL: tl.constexpr):
    tl.store(PAIRS + to, pair, mask=expert < LOCAL)
    tl.store(PLACES + pair, tl.where(expert < LOCAL, to, -1), mask=pair < pairs)


@triton.jit
def _write_blocks(BLOCKS, COUNT, totals, ROWS: tl.constexpr, LOCAL: tl.constexpr):
    """`totals`: the pairs of each expert."""
    bins = tl.arange(0, totals.shape[0])
    begins = tl.cumsum(totals, 0) - totals
    blocks = tl.where(bins < LOCAL, (totals + ROWS - 1) // ROWS, 0)
    at = BLOCKS + (tl.cumsum(blocks, 0) - blocks) * 3
    tl.store(COUNT, tl.sum(blocks, 0))
    tl.store(COUNT + 1, 0)
    tl.store(COUNT + 2, 0)
    for n in tl.range(0, tl.max(blocks, 0)):
        tl.store(at + n * 3, bins, mask=n < blocks)
        tl.store(at + n * 3 + 1, begins + n * ROWS, mask=n < blocks)
        tl.store(at + n * 3 + 2, begins + totals, mask=n < blocks)


@triton.jit
def _experts(IDS, chunk, pairs, first, LOCAL: tl.constexpr, CHUNK: tl.constexpr):
    """Of a chunk's pairs; LOCAL where an expert is another rank's, and beyond the last pair."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(IDS + at, mask=at < pairs, other=-1, cache_modifier=".cg") - first
    return tl.where((at < pairs) & (expert >= 0) & (expert < LOCAL), expert, LOCAL)
