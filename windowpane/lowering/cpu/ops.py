"""The operations in compiled kernels, for float32 on CPUs. What a kernel does not cover goes the plain way.

Tensors are handed over by address, so each method first makes sure of dtype, contiguity and width.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p

import torch

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.device.pages import LayerPages
from windowpane.lowering.cpu.attention import CAttention
from windowpane.lowering.cpu.pages import ALIGNED_FLOATS, CPages, covers
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import product as plain_product
from windowpane.lowering.packed import strips_of
from windowpane.lowering.reference.ops import Angles, Ops
from windowpane.lowering.strips import packed_linear
from windowpane.models.blocks import RMS, Norm
from windowpane.native.calls import address, count, function
from windowpane.schedule.step import Step

# Up to here the kernel that reads weights in place is faster than those that repack them; for one row a library's does
# not.
FEW_ROWS = range(2, 49)
# Rows of an MLP at a time: what lies between its products then stays in a cache, and is small enough for the allocator
# to hand out the same memory again instead of fresh pages.
MLP_ROWS = 1024
MOST_SCRATCH_FLOATS = 16 * 1024**2  # that are held from one operation to the next


class CpuOps(Ops):
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._scratch = torch.empty(0)
        product = [c_void_p, c_long, *[c_void_p] * 4, *[c_long] * 3, c_int]
        self._few = function(library, "product_of_few", *product)
        self._many = function(library, "product_of_many", *product)
        self._packed_floats = count(library, "product_packed_floats", c_long, c_long)
        self._norm = function(library, "rms_norm", *[c_void_p] * 4, c_long, c_long, c_float, c_int)
        self._heads = function(
            library, "heads", *[c_void_p, c_long, c_int], *[c_void_p] * 4, *[c_long] * 3, c_float, c_int
        )
        self._gated = function(library, "gated", c_void_p, c_void_p, c_long, c_long, c_int, c_int)
        self._attention = CAttention(library)
        self._pages = CPages(library)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = self._product(x, linear)
        if linear.adapter is not None:
            linear.adapter.add(x, out)
        return out

    def _product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        weight = linear.weight
        if parts := strips_of(weight):
            return packed_linear(x, parts, linear.bias)
        if not isinstance(weight, torch.Tensor):
            return plain_product(x, weight, linear.bias)
        rows, (outputs, width) = x.shape[0], weight.shape
        if rows < FEW_ROWS.start or x.stride(1) != 1 or not weight.is_contiguous():
            return plain_product(x, weight, linear.bias)
        if rows in FEW_ROWS and width % ALIGNED_FLOATS == 0:
            product, packed_floats = self._few, rows * width
        else:
            product, packed_floats = self._many, self._packed_floats(outputs, width)
        out, packed = x.new_empty(rows, outputs), self.scratch(packed_floats)
        product(
            x.data_ptr(), x.stride(0), weight.data_ptr(), address(linear.bias), out.data_ptr(), packed.data_ptr(), rows,
            outputs, width, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def scratch(self, floats: int) -> torch.Tensor:
        """Memory that is the caller's until the next one asks: pages that were touched before cost nothing again."""
        if floats > MOST_SCRATCH_FLOATS:
            return torch.empty(floats)
        if floats > len(self._scratch):
            self._scratch = torch.empty(floats)
        return self._scratch

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        if weight is None:
            return super().norm(x, weight, norm)
        return self._normed(x, weight, norm, None)

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._normed(x, weight, norm, hidden.contiguous())

    def _normed(self, x: torch.Tensor, weight: torch.Tensor, norm: Norm, residual: torch.Tensor | None) -> torch.Tensor:
        width = x.shape[-1]
        if width % ALIGNED_FLOATS or norm.kind != RMS:
            normed = super().norm(x, weight, norm)
            return normed if residual is None else residual + normed
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        self._norm(
            x.data_ptr(), weight.data_ptr(), address(residual), out.data_ptr(), rows, width, norm.eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def heads(
        self, x: torch.Tensor, weight: torch.Tensor | None, norm: Norm | None, angles: Angles | None
    ) -> torch.Tensor:
        rows, heads, dim = x.shape
        if dim % (2 * ALIGNED_FLOATS) or x.stride(2) != 1 or x.stride(1) != dim:
            return super().heads(x, weight, norm, angles)
        out = x.new_empty(rows, heads, dim)
        cos, sin = angles or (None, None)
        self._heads(
            x.data_ptr(), x.stride(0), int(norm is not None), address(weight if norm is not None else None),
            address(cos), address(sin), out.data_ptr(), rows, heads, dim, 0.0 if norm is None else norm.eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % ALIGNED_FLOATS or not gate_up.is_contiguous():
            return super().gated(gate_up, activation)
        out = gate_up.new_empty(rows, width)
        is_gelu = int(activation == "gelu_pytorch_tanh")
        self._gated(gate_up.data_ptr(), out.data_ptr(), rows, width, is_gelu, torch.get_num_threads())
        return out

    def mlp(self, x: torch.Tensor, gate_up: Linear, down: Linear, activation: str) -> torch.Tensor:
        plain = super().mlp
        # Adapters are those of all rows of a step.
        if len(x) <= MLP_ROWS or (gate_up.adapter is not None and gate_up.adapter.is_active):
            return plain(x, gate_up, down, activation)
        return torch.cat([plain(rows, gate_up, down, activation) for rows in torch.split(x, MLP_ROWS)])

    def attend_decoding(
        self, stored: LayerPages, step: Step, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor:  # fmt: skip
        found = self._attention.decoding(stored, step, queries, keys, values, mask, scores)
        return super().attend_decoding(stored, step, queries, keys, values, mask, scores) if found is None else found

    def attend_chunk(
        self, queries: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_key: int,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor:  # fmt: skip
        asked = queries, positions, keys, values, first_key, mask, scores
        found = self._attention.chunk(*asked)
        return super().attend_chunk(*asked) if found is None else found

    def asked_form(self, stored: LayerPages, queries: torch.Tensor) -> torch.Tensor:
        if stored.balance is None or not covers(stored):
            return super().asked_form(stored, queries)
        return self._pages.transformed(queries, stored.balance[0])

    def stored_form(self, stored: LayerPages, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        if stored.balance is None or not covers(stored):
            return super().stored_form(stored, keys, values)
        keys, values = self._pages.transformed(keys, stored.balance[1]), self._pages.transformed(values)
        return [self._pages.through_format(stored, x) for x in (keys, values)]

    def attended_form(self, stored: LayerPages, attended: torch.Tensor) -> torch.Tensor:
        if stored.balance is None or not covers(stored):
            return super().attended_form(stored, attended)
        return self._pages.transformed(attended)

    def through_format(self, stored: LayerPages, rows: torch.Tensor, part: int) -> torch.Tensor:
        if stored.dtype == torch.float32 or not covers(stored):
            return super().through_format(stored, rows, part)
        return self._pages.through_format(stored, rows)

    def behind_past(
        self, stored: LayerPages, slot: int, first: int, start: int, present: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        read = self._pages.behind_past if covers(stored) else super().behind_past
        return read(stored, slot, first, start, present)

    def store(
        self, stored: LayerPages, part: int, offsets: torch.Tensor, within: torch.Tensor, rows: torch.Tensor
    ) -> None:
        write = self._pages.write if covers(stored) else super().store
        write(stored, part, offsets, within, rows)
