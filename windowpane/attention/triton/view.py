"""Where the rows of one layer lie: what every kernel here is told about the arena, and how it finds a token's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.attention.triton.codes import CODES, WORD_BYTES
from windowpane.device.pages import TORCH_DTYPES
from windowpane.kv.caches import TokenCache
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Group, Slice

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NO_END = 2**30  # a window that no sequence fills
LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)

# Angles and the key norm's weight of a latent layer: cos and sin [positions, R] and w [dim], float32. Row t rotates by
# t times the angles of row 1; made in float64, such tables lose nothing when a rotation is made in two steps.
LatentRope = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's slice of a page. `data_offsets` are bytes from the page's start: of K and V, or of one latent.

    `columns` counts the columns of the group's table; in a ring, block b stands in column b % columns. Coded rows have
    a `code` (see `codes`), lie `row_words` 16-bit words apart and have their scales at `scale_offsets`, or one for all.
    """

    kv_heads: int
    dim: int
    block_tokens: int
    columns: int
    ring: bool
    data_offsets: tuple[int, ...]
    stripe: int
    stripes: int
    dtype: torch.dtype
    code: int = 0
    row_words: int = 0
    scale_offsets: tuple[int, ...] = ()
    layer_scales: tuple[float, ...] = ()

    @classmethod
    def of(cls, group: Group, piece: Slice, columns: int, layer_scales: Sequence[float] | None = None) -> LayerView:
        cache, fmt = piece.cache, group.kv_format
        if not isinstance(cache, TokenCache) or fmt is None or group.block_tokens is None:
            raise ValueError(f"group {group.name} keeps no tokens: it has no attention to run")
        if len(set(cache.row_dims)) > 1:
            raise ValueError(
                f"layer {cache.layer}: K of {cache.key_dim} and V of {cache.value_dim} dims have no kernel"
            )
        return cls(
            cache.kv_heads, cache.key_dim, group.block_tokens, max(columns, 1), not group.grows, piece.data_offsets,
            piece.stripe, group.stripes, TORCH_DTYPES.get(fmt.name, torch.int16), CODES.get(fmt.name, 0),
            piece.row_bytes[0] // WORD_BYTES, piece.scale_offsets,
            tuple(layer_scales or (1.0,) * len(piece.data_offsets)),
        )  # fmt: skip

    @property
    def latent(self) -> bool:
        return len(self.data_offsets) == 1

    @property
    def unit_elements(self) -> int:
        """What one step of a table entry is, in elements."""
        return OFFSET_UNIT_BYTES // self.dtype.itemsize

    def scales_at(self) -> tuple[int, int]:
        """Byte offsets of the scales of K (or the latent) and V; 0 where there are none."""
        return (self.scale_offsets[0], self.scale_offsets[-1]) if self.scale_offsets else (0, 0)

    def require_dtype(self, x: torch.Tensor) -> None:
        """The present is attended exactly as the past is, so it comes in the dtype of the pages, unless they are coded:
        then it went through the format already.
        """
        if x.dtype != self.dtype and not self.code:
            raise ValueError(f"activations are {x.dtype} and pages {self.dtype}: cast the activations to that first")


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """What kernels are told of one layer: where its past lies, what its queries see of it and how they weigh it.

    `table` [slots, columns, stripes] is int32 on the device. A latent needs `rope` to rebuild K.
    """

    arena: torch.Tensor
    view: LayerView
    table: torch.Tensor
    query_heads: int
    mask: Mask
    scores: Scores
    rope: LatentRope | None = None

    def __post_init__(self) -> None:
        _ = self.reach_tokens  # raises here rather than at the first launch

    @property
    def group(self) -> int:
        return self.query_heads // self.view.kv_heads

    @property
    def reach_tokens(self) -> int:
        return reach_of(self.mask)

    @property
    def scale_log2(self) -> float:
        return self.scores.scale * LOG2E

    @property
    def softcap(self) -> float:
        """For kernels: 0 for none."""
        return self.scores.softcap or 0.0

    @property
    def rotary_pairs(self) -> int:
        """R: dims [0, R) rotate with dims [R, 2R). 1/8, 1/4 or 1/2 of the head; 0 for a stored pair."""
        if not self.view.latent:
            return 0
        if self.rope is None:
            raise ValueError("a latent layer needs rope=(cos, sin, w) to rebuild K")
        pairs, dim = self.rope[0].shape[1], self.view.dim
        if dim not in (2 * pairs, 4 * pairs, 8 * pairs):
            raise ValueError(f"{pairs} rotary pairs of {dim} dims: kernels know 1/8, 1/4 and 1/2 of the head")
        return pairs


def reach_of(mask: Mask) -> int:
    """For kernels, beside `mask.is_chunked`: tokens of a window or chunk, or more than any sequence has."""
    return mask.reach_tokens or NO_END


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors; a number that shares work out where there are none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def launch_registers(warp_groups: int) -> int:
    """Of each thread, where so many warp groups and one that brings what they multiply have all of a multiprocessor's
    65,536; they then trade them. Registers come in eights.
    """
    return 65_536 // (128 * (warp_groups + 1)) // 8 * 8


@triton.jit
def last_hidden(position, reach, CHUNKED: tl.constexpr):
    """The token before the first that `position` sees, below 0 where it sees them all. How far a layer looks back is
    said here and nowhere else.
    """
    return position - position % reach - 1 if CHUNKED else position - reach


@triton.jit
def first_visible(position, reach, CHUNKED: tl.constexpr):
    return tl.maximum(last_hidden(position, reach, CHUNKED) + 1, 0)


@triton.jit
def ring_base(first, columns, P: tl.constexpr, RING: tl.constexpr):
    """What to subtract from a block to find its column: blocks seen from token `first` on fill a ring at most once."""
    base = 0
    if RING:
        block = first // P
        base = block - block % columns
    return base


@triton.jit
def column_of(t, base, columns, P: tl.constexpr, RING: tl.constexpr):
    column = t // P
    if RING:
        column -= base
        column = tl.where(column >= columns, column - columns, column)
    return column


@triton.jit
def section(ARENA, offset, DTYPE: tl.constexpr):
    """K, V or the latent of the page at the arena's start. Offsets are added in bytes: they are multiples of 16."""
    return (ARENA + offset).to(tl.pointer_type(DTYPE))


@triton.jit
def soft_capped(s, CAP: tl.constexpr):
    """Scores in powers of two, below the cap: cap x tanh(s / cap). From 2^126 on tanh is 1, and NaN stays NaN."""
    if CAP > 0:
        s *= 2 / CAP
        s = CAP * _LOG2E * (1 - 2 / (tl.exp2(tl.where(s > 126, 126.0, s)) + 1))
    return s


@triton.jit
def with_sinks(norm, m, SINKS, head, ok):
    """A sum of weights relative to 2^m, and the query heads' sinks. One far above m makes it infinite: all weigh 0."""
    if SINKS is not None:
        norm += tl.exp2(tl.load(SINKS + head, mask=ok, other=float("-inf")) * _LOG2E - m)
    return norm


@triton.constexpr_function
def piece_start(i, R):
    """The first dim of piece i of a latent: two pieces of R dims that rotate with each other, then pieces of 2R."""
    return i * R if i < 2 else (i - 1) * 2 * R


@triton.jit
def rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def add_scores(a, b, s):
    """s + a . b of rows a and rows b. Tensor cores take 16 dims or more; fewer only occur in small test models."""
    if a.shape[1] < 16:
        s += tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], 2)
    else:
        s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    return s


@triton.jit
def weighted(q, w, ok, DTYPE: tl.constexpr):
    """q with the key norm's weight folded in: right for dims that do not rotate."""
    return (tl.load(q, mask=ok, other=0.0).to(tl.float32) * tl.load(w)).to(DTYPE)
