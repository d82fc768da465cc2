"""How `decode` is launched: tiles, programs, warps and stages, as they measured fastest on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from windowpane.attention.triton.codes import INT4
from windowpane.attention.triton.view import LayerView


@dataclass(frozen=True, slots=True)
class Tuning:
    """`tile_tokens` are read at a time (they divide 64); programs per multiprocessor must fit its shared memory.

    Where a thread may have fewer `registers` than it would take, more programs fit those too.
    """

    tile_tokens: int
    programs_per_sm: int
    num_warps: int
    num_stages: int
    registers: int | None = None


# By (dim, latent), for 16-bit rows. The page lookup takes a pipeline stage: with 3 stages a tile is on its way only
# while another program computes, with 5 while this one does too. Wide rows have the shared memory for one or the other.
TUNINGS = {
    (64, False): Tuning(64, 3, 4, 5),
    (128, False): Tuning(64, 2, 4, 5),
    (256, False): Tuning(32, 2, 4, 5),
    (512, False): Tuning(32, 2, 4, 3),
    (512, True): Tuning(32, 2, 4, 5),
}
# By (dim, latent, bits), for coded rows. A tile of 16 tokens lies in one page and is one warp's: nothing waits at a
# barrier, and many programs hide each other's waits. Wide rows have too many sums for one warp.
CODED_TUNINGS = {
    (64, False, 8): Tuning(16, 8, 1, 5),
    (128, False, 8): Tuning(16, 8, 1, 5),
    (256, False, 8): Tuning(16, 8, 1, 3),
    (512, False, 8): Tuning(16, 3, 2, 4),
    (512, True, 8): Tuning(16, 4, 2, 3),
    (64, False, 4): Tuning(16, 8, 1, 5),
    (128, False, 4): Tuning(16, 8, 1, 5),
    (256, False, 4): Tuning(16, 12, 1, 4, 168),
    (512, False, 4): Tuning(16, 4, 2, 4),
    (512, True, 4): Tuning(32, 3, 4, 4, 168),
}
# By (dim, latent): a window of a lone row, which is a tile or two for each program. There is nothing to read ahead.
# What takes time is fetching instructions, unless those of all launches of a layer fit into a multiprocessor's cache
# together (docs/performance.md): threads that have less to do each need fewer.
LONE_WINDOWS = {(256, False): replace(TUNINGS[256, False], num_warps=8, num_stages=2)}
# Several rows to a sequence: 16 warps of a multiprocessor have 128 registers a thread, of which sums may take half.
SUMS_OF_A_THREAD, MOST_WARPS = 64, 8
# By (dim, latent, bits, queries in a tile), where something else than that rule measured faster. Latents of 512 dims
# have more sums than a thread has registers from 4 rows of 8 query heads on: tensor cores are the limit there.
ROWS_TUNINGS = {
    (64, False, 16, 16): Tuning(64, 3, 4, 2),
    (64, False, 16, 32): Tuning(64, 3, 4, 2),
    (64, False, 16, 64): Tuning(64, 3, 4, 2),
    (256, False, 8, 8): Tuning(16, 4, 2, 3),
    (256, False, 8, 16): Tuning(16, 4, 2, 3),
    (512, True, 16, 32): Tuning(16, 2, 4, 4),
    (512, True, 16, 64): Tuning(32, 1, 8, 5),
    (512, True, 8, 16): Tuning(16, 2, 4, 4),
    (512, True, 8, 32): Tuning(16, 2, 4, 4),
    (512, True, 8, 64): Tuning(16, 1, 8, 5),
    (512, True, 4, 32): Tuning(16, 2, 4, 4),
    (512, True, 4, 64): Tuning(16, 1, 8, 5),
}
# float32 runs for exactness, not for speed: tiles that fit any head.
EXACT = Tuning(16, 2, 4, 1)


def tuning_for(view: LayerView, activations: torch.dtype | None = None, *, lone_window: bool = False) -> Tuning:
    if torch.float32 in (view.dtype, activations):
        return EXACT
    if view.code:
        bits = _bits(view)
        return CODED_TUNINGS.get((view.dim, view.latent, bits), CODED_TUNINGS[512, view.latent, bits])
    tuning = TUNINGS.get((view.dim, view.latent), TUNINGS[256, False])
    return LONE_WINDOWS.get((view.dim, view.latent), tuning) if lone_window else tuning


def tuning_for_rows(view: LayerView, queries: int, activations: torch.dtype | None = None) -> Tuning:
    """For tiles of so many queries: more warps where their sums take too many registers of a thread."""
    tuning = tuning_for(view, activations)
    if tuning is EXACT:
        return tuning
    tile = max(8 if view.code else 16, triton.next_power_of_2(queries))
    bits = _bits(view)
    if (view.dim, view.latent, bits, tile) in ROWS_TUNINGS:
        return ROWS_TUNINGS[view.dim, view.latent, bits, tile]
    sums = tile * view.dim // 32
    warps = tuning.num_warps
    while sums > SUMS_OF_A_THREAD * warps and warps < MOST_WARPS:
        warps *= 2
    if warps == tuning.num_warps:
        return tuning
    if sums > SUMS_OF_A_THREAD * warps:
        return replace(tuning, num_warps=warps, programs_per_sm=1, registers=None)
    programs = min(tuning.programs_per_sm, 2 * MOST_WARPS // warps)
    return replace(tuning, num_warps=warps, programs_per_sm=programs, registers=2 * SUMS_OF_A_THREAD)


def _bits(view: LayerView) -> int:
    return 16 if not view.code else 4 if view.code == INT4 else 8
