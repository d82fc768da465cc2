"""Rows to pages and back in compiled kernels, for the formats that they have; `pages.c` and `stored.h`."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_long, c_void_p

import torch

from windowpane.device.pages import LayerPages
from windowpane.native.calls import address, function

ALIGNED_FLOATS = 16  # widths that kernels take are multiples of it
FORMATS = ("float32", "float16", "bfloat16", "int8_per_token_head")  # by their numbers in stored.h


class Pages(ctypes.Structure):
    """`Pages` in stored.h."""

    _fields_ = (
        *((name, c_void_p * 2) for name in ("rows", "scales")),
        *((name, c_int64) for name in ("block_tokens", "row_bytes", "format")),
    )

    @classmethod
    def of(cls, stored: LayerPages) -> Pages:
        parts = range(stored.parts)
        return cls(
            (c_void_p * 2)(*map(stored.address, parts)), (c_void_p * 2)(*map(stored.scale_address, parts)),
            stored.block_tokens, stored.row_bytes(0), FORMATS.index(stored.kv_format.name),
        )  # fmt: skip


def covers(stored: LayerPages) -> bool:
    """The kernels have its format and width, and it is known what rows are multiplied with before they are coded."""
    aligned = ALIGNED_FLOATS * (2 if stored.is_coded else 1)
    return (
        stored.kv_format.name in FORMATS
        and len({*stored.dims}) == 1
        and stored.dims[0] % aligned == 0
        and not stored.warming_up
    )


class CPages:
    """Callers make sure that `covers` is true. Rows are float32 [rows, heads, dim]."""

    def __init__(self, library: ctypes.CDLL) -> None:
        counts = [c_long] * 3
        pages = ctypes.POINTER(Pages)
        self._write = function(library, "write_rows", pages, c_int, *[c_void_p] * 3, c_long, *counts, c_int)
        self._read = function(library, "read_rows", pages, c_int, c_void_p, *[c_long] * 2, c_void_p, *counts, c_int)
        self._through = function(library, "through_format", c_void_p, c_long, c_void_p, *counts, c_int, c_int)
        self._transform = function(
            library, "transform_rows", c_void_p, c_long, c_void_p, c_long, c_void_p, *counts, c_int
        )

    def write(
        self, stored: LayerPages, part: int, offsets: torch.Tensor, within: torch.Tensor, rows: torch.Tensor
    ) -> None:
        rows, pages = _heads_together(rows), Pages.of(stored)
        self._write(
            ctypes.byref(pages), part, offsets.data_ptr(), within.data_ptr(), rows.data_ptr(), rows.stride(0),
            *rows.shape, torch.get_num_threads(),
        )  # fmt: skip

    def behind_past(
        self, stored: LayerPages, slot: int, first: int, start: int, present: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        offsets, pages, past = stored.past_offsets(slot, first, start), Pages.of(stored), start - first
        found = []
        for part, new in enumerate(present):
            heads, tokens, dim = new.shape
            rows = new.new_empty(heads, past + tokens, dim)
            self._read(
                ctypes.byref(pages), part, offsets.data_ptr(), first, past, rows.data_ptr(), rows.stride(0), heads, dim,
                torch.get_num_threads(),
            )  # fmt: skip
            rows[:, past:] = new
            found.append(rows)
        return found

    def through_format(self, stored: LayerPages, rows: torch.Tensor) -> torch.Tensor:
        rows, out = _heads_together(rows), rows.new_empty(rows.shape)
        which = FORMATS.index(stored.kv_format.name)
        self._through(
            rows.data_ptr(), rows.stride(0), out.data_ptr(), *rows.shape, which, torch.get_num_threads()
        )  # fmt: skip
        return out

    def transformed(self, rows: torch.Tensor, balance: torch.Tensor | None = None) -> torch.Tensor:
        """Into the basis of coded rows, or out of it; `balance` is [KV heads, dim]."""
        rows, out = _heads_together(rows), rows.new_empty(rows.shape)
        heads_each = 1 if balance is None else rows.shape[1] // len(balance)
        self._transform(
            rows.data_ptr(), rows.stride(0), address(balance), heads_each, out.data_ptr(), *rows.shape,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def _heads_together(rows: torch.Tensor) -> torch.Tensor:
    """Rows may lie apart from each other, the heads of one may not."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
