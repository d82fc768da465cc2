"""Cutting one decode step into equal shares of work."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Work:
    """Items (sequence, KV head, first tile, tiles), which of them a program takes, and where those of a head start."""

    items: torch.Tensor
    program_items: torch.Tensor
    head_items: torch.Tensor
    programs: int

    @property
    def count(self) -> int:
        return len(self.items)


def plan_work(
    first_visible: list[int], past: list[int], tile_tokens: int, kv_heads: int, programs: int, device: str
) -> Work:
    """Give each program the same number of tiles, to within one.

    All tiles form one line, sequence by sequence and head by head; it is cut into `programs` equal pieces, and pieces
    are cut again where the sequence or the head changes. So any mix of lengths fills the GPU, in one wave.
    """
    lo = np.asarray(first_visible) // tile_tokens
    tiles = np.repeat(-(-np.asarray(past) // tile_tokens) - lo, kv_heads)
    ends = np.cumsum(tiles)
    starts = ends - tiles
    cuts = np.arange(programs + 1) * int(ends[-1]) // programs
    begin = np.unique(np.concatenate([starts, cuts[:-1]]))
    length = np.diff(np.append(begin, ends[-1]))
    owner = np.searchsorted(ends, begin, side="right")
    items = np.stack([owner // kv_heads, owner % kv_heads, lo[owner // kv_heads] + begin - starts[owner], length], 1)
    return Work(
        torch.tensor(items, dtype=torch.int32, device=device),
        torch.tensor(np.searchsorted(begin, cuts), dtype=torch.int32, device=device),
        torch.tensor(np.searchsorted(begin, np.append(starts, ends[-1])), dtype=torch.int32, device=device),
        programs,
    )
