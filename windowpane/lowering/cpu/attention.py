"""Attention in compiled kernels, for float32 on CPUs: every mask, with soft-cap and sinks."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from functools import lru_cache

import numpy as np
import torch

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.device.pages import LayerPages
from windowpane.lowering.cpu.pages import Pages, covers
from windowpane.native.calls import address, count, function
from windowpane.schedule.step import Step

PART_TOKENS = 256  # PART in decoding.c
MOST_GROUPED_HEADS = 60  # ROWS in chunks.c, at the least


class _Chunk(ctypes.Structure):
    """`Chunk` in chunks.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "starts", "stops", "keys", "values")),
        *((name, c_void_p) for name in ("packed_keys", "packed_values", "out", "sinks")),
        *((name, c_int64) for name in ("key_head", "key_token", "value_head", "value_token")),
        *((name, c_int64) for name in ("tokens", "first_key", "num_keys", "query_heads", "kv_heads", "dim")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _Attention(ctypes.Structure):
    """`Attention` in kernels.h."""

    _fields_ = (
        ("pages", Pages),
        *((name, c_void_p) for name in ("offsets", "starts", "stops", "queries")),
        *((name, c_void_p) for name in ("now_keys", "now_values", "partial", "out", "sinks")),
        *((name, c_int64) for name in ("sequences", "blocks", "parts", "query_heads", "kv_heads", "dim")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class CAttention:
    """Each method returns None where no kernel covers what it is given: the caller takes the reference."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend_decoding = function(library, "attend_decoding", ctypes.POINTER(_Attention), c_int)
        self._attend_chunk = function(library, "attend_chunk", ctypes.POINTER(_Chunk), c_int)
        self._packed_tokens = count(library, "chunk_packed_tokens", c_long, c_long)
        self._packed_dim = count(library, "chunk_packed_dim", c_long)

    def decoding(
        self, stored: LayerPages, step: Step, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor | None:  # fmt: skip
        """Decoding tokens over their past in pages and themselves: all [sequences, heads, dim]."""
        sequences, query_heads, dim = queries.shape
        if not covers(stored):
            return None
        reads = stored.decoding_reads(step, mask)
        parts = parts_for(reads.most_tokens)
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        out = torch.empty_like(queries)
        partial = queries.new_empty(sequences * query_heads * parts * (dim + 16))
        asked = _Attention(
            pages=Pages.of(stored), offsets=reads.offsets.data_ptr(), starts=reads.starts.data_ptr(),
            stops=reads.stops.data_ptr(), queries=queries.data_ptr(), now_keys=keys.data_ptr(),
            now_values=values.data_ptr(), partial=partial.data_ptr(), out=out.data_ptr(), sinks=address(scores.sinks),
            sequences=sequences, blocks=reads.shape[1], parts=parts, query_heads=query_heads, kv_heads=keys.shape[1],
            dim=dim, scale=scores.scale, softcap=scores.softcap or 0.0,
        )  # fmt: skip
        self._attend_decoding(ctypes.byref(asked), torch.get_num_threads())
        return out

    def chunk(
        self, queries: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_key: int,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor | None:  # fmt: skip
        """Tokens of one chunk over their past and each other; see `reference.attend`."""
        tokens, query_heads, dim = queries.shape
        kv_heads, num_keys, _ = keys.shape
        contiguous = keys.stride(2) == values.stride(2) == 1
        if values.shape != keys.shape or not contiguous or query_heads // kv_heads > MOST_GROUPED_HEADS:
            return None
        queries = queries.contiguous()
        starts, stops = _seen(mask, first_key, positions.to(torch.int64).numpy().tobytes())
        out = torch.empty_like(queries)
        packed_tokens = kv_heads * self._packed_tokens(first_key, num_keys)
        packed_keys = queries.new_empty(packed_tokens * dim)
        packed_values = queries.new_empty(packed_tokens * self._packed_dim(dim))
        asked = _Chunk(
            queries=queries.data_ptr(), starts=starts.data_ptr(), stops=stops.data_ptr(), keys=keys.data_ptr(),
            values=values.data_ptr(), packed_keys=packed_keys.data_ptr(), packed_values=packed_values.data_ptr(),
            out=out.data_ptr(), sinks=address(scores.sinks), key_head=keys.stride(0), key_token=keys.stride(1),
            value_head=values.stride(0), value_token=values.stride(1), tokens=tokens, first_key=first_key,
            num_keys=num_keys, query_heads=query_heads, kv_heads=kv_heads, dim=dim, scale=scores.scale,
            softcap=scores.softcap or 0.0,
        )  # fmt: skip
        self._attend_chunk(ctypes.byref(asked), torch.get_num_threads())
        return out


@lru_cache(maxsize=8)
def _seen(mask: Mask, first_key: int, positions: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens at these int64 positions see, as starts and stops. Layers with one mask ask for it one by one."""
    seen = [mask.seen(position) for position in np.frombuffer(positions, dtype=np.int64).tolist()]
    return torch.tensor([s.start for s in seen]).clamp_(min=first_key), torch.tensor([s.stop for s in seen])


def parts_for(past_tokens: int) -> int:
    """How many parts decoding.c takes a past in."""
    return max(1, -(-past_tokens // PART_TOKENS))
