"""The Hopper kernels: who takes which segment, scratch, what is made ready for them, and what their source gives.

`python3 -m bench.gpu_check hopper` checks them on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.interpreting import run_interpreted
from windowpane.attention.chunk_attention import ChunkAttention, has_rows_for_hopper, hopper_scratch
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import CAUSAL, Mask
from windowpane.attention.scores import Scores
from windowpane.attention.segments import Large, Tiling, prefill_tiles
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.kv.hopper_scratch import Heads, scratch_bytes
from windowpane.kv.retention import Chunk, Window

CPU = torch.device("cpu")
WINDOW_31B = Heads(16, 32, 256, latent=False, windowed=True)
FULL_31B = Heads(4, 32, 512, latent=True, windowed=False)
WINDOW = Window(1024)
LATENT = LayerView(4, 512, 16, 8, False, (0,), 0, 1, torch.bfloat16)
PAIR = LayerView(16, 256, 16, 8, True, (0, 131_072), 0, 1, torch.bfloat16)


@pytest.mark.parametrize("check", ["edges", "rotated", "attended"])
def test_what_is_made_ready_for_the_kernels_and_what_they_give(check):
    """In a process of its own: the interpreter is chosen when triton is imported."""
    run_interpreted("tests.kernels.interpreted_hopper", check)


class TestHeads:
    def test_layers_of_real_models_have_kernels(self):
        assert WINDOW_31B.has_kernel and FULL_31B.has_kernel
        assert Heads(2, 8, 512, latent=False, windowed=False).has_kernel
        assert Heads(8, 16, 128, latent=False, windowed=False).has_kernel
        assert Heads(8, 64, 64, latent=False, windowed=True).has_kernel

    def test_others_are_left_to_the_plain_kernel(self):
        assert not replace(WINDOW_31B, dim=96).has_kernel
        assert not replace(WINDOW_31B, latent=True).has_kernel
        assert not replace(FULL_31B, windowed=True).has_kernel
        assert not replace(WINDOW_31B, windowed=False, chunked=True).has_kernel
        assert not replace(FULL_31B, query_heads=12).has_kernel, "3 query heads to a KV head make no TMA box"
        assert not replace(FULL_31B, kv_heads=1, query_heads=128).has_kernel

    def test_a_large_segment_fills_the_gpu(self):
        assert WINDOW_31B.program_tokens == 64 and FULL_31B.program_tokens == 8
        assert WINDOW_31B.least_queries == 512 and FULL_31B.least_queries == 128
        assert Heads(2, 8, 512, latent=False, windowed=False).least_queries == 512


class TestScratch:
    def test_layers_share_it(self):
        rotated = 163_840 * 4 * 128 * 2
        sliding_edges = 2 * 8 * 3 * 16 * 64 * 256 * 2
        assert scratch_bytes([FULL_31B], 131_072) == rotated + 1 * 8 * 3 * 4 * 64 * 512 * 2
        assert scratch_bytes([FULL_31B, WINDOW_31B, FULL_31B], 131_072) == rotated + sliding_edges

    def test_what_is_allocated_is_what_was_planned(self):
        layers = [FULL_31B, WINDOW_31B, replace(WINDOW_31B, dim=64)]
        scratch = PrefillScratch(layers, 1000, CPU)
        assert scratch.bytes == scratch_bytes(layers, 1000)
        assert scratch.rotated(FULL_31B).shape == (4, 1280, 128), "whole tiles of positions"
        assert scratch.edges(WINDOW_31B).shape == (2, 8, 3, 16, 64, 256)
        assert scratch.edges(FULL_31B).shape == (1, 8, 3, 4, 64, 512)

    def test_heads_without_a_kernel_need_none(self):
        assert scratch_bytes([replace(WINDOW_31B, dim=96)], 131_072) == 0
        assert hopper_scratch([(LATENT, FULL_31B)], 1000, CPU) is None


def pair_layer(scores: Scores, sees: Window | Chunk = WINDOW) -> PagedLayer:
    arena, table = torch.zeros(2**20, dtype=torch.uint8), torch.zeros(1, 8, 1, dtype=torch.int32)
    return PagedLayer(arena, PAIR, table, 32, Mask(sees), scores)


def segments_of(*asking: tuple[int, int]) -> np.ndarray:
    """Of these pasts and queries, one behind another."""
    rows = np.cumsum([0, *(n for _, n in asking)])
    return np.array([(i, past, past + n, rows[i], rows[i], n) for i, (past, n) in enumerate(asking)], np.int32)


class TestSplitting:
    SEGMENTS = segments_of((0, 600), (9, 127), (0, 512))
    LARGE = Large(64, 16, 128)

    def test_large_segments_get_no_tile(self):
        full = segments_of((9, 127), *[(0, 512)] * 8)
        tiles = prefill_tiles(Tiling(64, self.LARGE).queries(full), 64)
        assert sorted(tiles.tolist()) == [[0, 0], [0, 1]]
        assert full[1, 5] == 512, "the segments themselves stay as they are"

    def test_small_segments_join_where_a_launch_has_room_and_those_that_see_most_first(self):
        assert self.LARGE.takes(self.SEGMENTS).all()
        large, asks_nothing = [(0, 512)] * 6, (70_000, 0)
        some = segments_of(*large, (100, 1), asks_nothing, (5000, 1), (60_000, 1))
        assert np.flatnonzero(~self.LARGE.takes(some)).tolist() == [6, 7]
        assert replace(self.LARGE, rotated_rows=1152 + 192).takes(self.SEGMENTS).all()
        assert np.flatnonzero(~replace(self.LARGE, rotated_rows=1152 + 191).takes(self.SEGMENTS)).tolist() == [1]
        assert not self.LARGE.takes(segments_of((0, 256), (60_000, 1))).any(), "no launch is made for them"

    def test_without_a_limit_all_do(self):
        tiles = prefill_tiles(Tiling(64).queries(self.SEGMENTS), 64)
        assert len(tiles) == 10 + 2 + 8

    def test_segments_fill_a_launch_together_or_are_left_to_the_plain_kernel(self):
        assert self.LARGE.takes(segments_of((0, 256), (0, 256))).all(), "8 tiles of 16 programs"
        assert not self.LARGE.takes(segments_of((0, 256), (0, 192))).any()
        assert self.LARGE.takes(segments_of((0, 512))).all()

    def test_a_launch_has_every_tile_of_its_segments_once_and_those_that_see_most_first(self):
        [launch] = self.LARGE.launches(self.SEGMENTS)
        assert launch.members.tolist() == [[0, 0], [1, 640], [2, 832]] and launch.longest == 600
        assert sorted(launch.tiles.tolist()) == [
            *([0, i] for i in range(10)), [1, 0], [1, 1], *([2, i] for i in range(8))
        ]  # fmt: skip
        assert launch.tiles[0].tolist() == [0, 9]

    def test_launches_share_scratch(self):
        many = segments_of(*[(32_768, 256)] * 9)
        assert [len(launch.members) for launch in self.LARGE.launches(many)] == [8, 1]
        rotated = replace(self.LARGE, rotated_rows=163_840)
        launches = rotated.launches(many)
        assert [launch.members[:, 0].tolist() for launch in launches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert launches[0].members[:, 1].tolist() == [0, 33_024, 66_048, 99_072]
        longest = replace(self.LARGE, rotated_rows=163_840).launches(segments_of((163_000, 512)))
        assert len(longest) == 1

    def test_without_scratch_a_layer_leaves_everything_to_the_plain_kernel(self):
        assert ChunkAttention(pair_layer(Scores(1.0)), None).tiling == Tiling(64)

    def test_with_scratch_large_segments_leave_the_plain_kernel(self):
        scratch = PrefillScratch([WINDOW_31B], 4096, CPU)
        assert ChunkAttention(pair_layer(Scores(1.0)), scratch).tiling == Tiling(64, Large(64, 16, 128))

    def test_soft_caps_are_the_plain_kernels(self):
        scratch = PrefillScratch([WINDOW_31B], 4096, CPU)
        assert ChunkAttention(pair_layer(Scores(1.0, softcap=50.0)), scratch).tiling == Tiling(64)

    def test_sinks_are_known_to_the_kernel_of_pairs_and_not_to_that_of_the_widest_heads(self):
        scores, scratch = Scores(1.0, sinks=torch.zeros(32)), PrefillScratch([WINDOW_31B, FULL_31B], 4096, CPU)
        assert ChunkAttention(pair_layer(scores), scratch).tiling == Tiling(64, Large(64, 16, 128))
        table = torch.zeros(1, LATENT.columns, LATENT.stripes, dtype=torch.int32)
        wide = PagedLayer(torch.zeros(2**20, dtype=torch.uint8), replace(LATENT, data_offsets=(0, 2**17)),
                          table, 32, CAUSAL, scores)  # fmt: skip
        assert ChunkAttention(wide, scratch).tiling.large is None
        plain = ChunkAttention(replace(wide, scores=Scores(1.0)), scratch)
        assert plain.tiling.large is not None

    def test_chunked_layers_are_the_plain_kernels(self):
        scratch = PrefillScratch([WINDOW_31B], 4096, CPU)
        assert ChunkAttention(pair_layer(Scores(1.0), Chunk(1024)), scratch).tiling == Tiling(64)

    def test_rows_that_tma_cannot_bring(self):
        assert has_rows_for_hopper(PAIR)
        assert not has_rows_for_hopper(replace(PAIR, dtype=torch.float16))
        assert not has_rows_for_hopper(replace(PAIR, block_tokens=8))
