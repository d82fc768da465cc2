"""Which heads the Hopper kernels take, from how many queries on, and their scratch. Without torch: plans ask too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from windowpane.kv.retention import ceil_div

CAPABILITY = 9  # wgmma and TMA as these kernels use them: Hopper only
ROTARY_DIMS = 128  # of a latent's 512, rotated once per segment
ELEMENT_TYPE = "bfloat16"
ELEMENT_BYTES = 2
WIDE_DIM = 512
TILE_TOKENS = {64: 128, 128: 128, 256: 64, WIDE_DIM: 64}  # keys, by dims of a head
PROGRAM_ROWS = {64: 192, 128: 128, 256: 128, WIDE_DIM: 64}  # query tokens times query heads
# With few programs, a launch leaves multiprocessors idle (an H200 has 132). Segments that have fewer than these
# together go to the plain kernel, at half the speed of a full launch here, or at a quarter with 512 dims.
LEAST_PROGRAMS = {64: 128, 128: 128, 256: 128, WIDE_DIM: 64}
LAUNCH_SEGMENTS = 8  # that one launch takes
EDGES = 3  # tiles of a segment that lie in no one place: see `prepare.copy_edges`


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads on one rank."""

    kv_heads: int
    query_heads: int
    dim: int
    latent: bool
    windowed: bool
    chunked: bool = False

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def boxed(self) -> int:
        """Query heads of a TMA box, which are a power of two: a KV head's may be several times as many."""
        return self.group & -self.group

    @property
    def has_kernel(self) -> bool:
        """512 dims, latent or not, take all query heads of a KV head at once, and come without a window in the models
        we know. No kernel knows chunks.
        """
        if self.chunked or self.dim not in TILE_TOKENS or self.boxed > 64:
            return False
        return not self.latent if self.dim != WIDE_DIM else not self.windowed and self.boxed == self.group

    @property
    def program_tokens(self) -> int:
        """Queries of a program, for each of which it has `boxed` heads."""
        return PROGRAM_ROWS[self.dim] // self.boxed

    @property
    def least_queries(self) -> int:
        """From so many queries on, a launch of one segment is faster than the plain kernel."""
        return ceil_div(LEAST_PROGRAMS[self.dim] * PROGRAM_ROWS[self.dim], self.query_heads)

    @property
    def edge_elements(self) -> int:
        """Of all segments of a launch."""
        vectors = 1 if self.latent else 2
        return vectors * LAUNCH_SEGMENTS * EDGES * self.kv_heads * TILE_TOKENS[self.dim] * self.dim

    def rotated_elements(self, max_model_len: int) -> int:
        return self.kv_heads * rotated_rows(max_model_len) * ROTARY_DIMS if self.latent else 0


def rotated_rows(max_model_len: int) -> int:
    """Whole tiles of positions: of the longest segment, and a quarter more, so that four of a quarter fit beside what
    they compute.
    """
    return ceil_div(max_model_len * 5, 4 * TILE_TOKENS[WIDE_DIM]) * TILE_TOKENS[WIDE_DIM]


def scratch_elements(layers: Iterable[Heads], max_model_len: int) -> tuple[int, int]:
    """(edges, rotated keys) of bf16. Layers run one after another and share both."""
    heads = [layer for layer in layers if layer.has_kernel]
    edges = max((h.edge_elements for h in heads), default=0)
    return edges, max((h.rotated_elements(max_model_len) for h in heads), default=0)


def scratch_bytes(layers: Iterable[Heads], max_model_len: int) -> int:
    return sum(scratch_elements(layers, max_model_len)) * ELEMENT_BYTES
