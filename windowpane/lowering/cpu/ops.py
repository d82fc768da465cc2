"""The operations in compiled kernels, for float32 on CPUs. What a kernel does not cover goes the plain way.

Tensors are handed over by address, so each method first makes sure of dtype, contiguity and width.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p

import torch

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.device.pages import LayerPages
from windowpane.device.step import Step
from windowpane.lowering.cpu.attention import ALIGNED_FLOATS, CAttention, holds_plain_pairs, parts_for
from windowpane.lowering.packed import Weight
from windowpane.lowering.reference.ops import Angles, DecodingLayer, LayerParts, Ops
from windowpane.native import build
from windowpane.native.calls import address, count, function

# Up to here the kernel that reads weights in place is faster than those that repack them; for one row a library's does
# not.
FEW_ROWS = range(2, 49)
# Rows of an MLP at a time: what lies between its products then stays in a cache, and is small enough for the allocator
# to hand out the same memory again instead of fresh pages.
MLP_ROWS = 1024


def ops_for(embedding: torch.Tensor) -> Ops:
    """What a decoder with this embedding runs on."""
    if embedding.device.type == "cpu" and embedding.dtype == torch.float32:
        library = build.library()
        if library is not None:
            return CpuOps(library)
    return Ops()


_LAYER_TENSORS = (
    *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias"),
    *("post_attention_norm", "pre_mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "post_mlp_norm"),
)


class _Layer(ctypes.Structure):
    """`Layer` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in (*_LAYER_TENSORS, "sinks", "keys", "values")),
        *((name, c_int64) for name in ("hidden", "query_heads", "kv_heads", "dim", "mlp", "block_tokens")),
        *((name, c_int64) for name in ("row_floats", "sandwich", "head_norms", "v_norm", "is_gelu")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "scalar")),
    )


class _Tokens(ctypes.Structure):
    """`Tokens` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("offsets", "starts", "stops", "to_offsets", "to_rows", "cos", "sin")),
        *((name, c_int64) for name in ("sequences", "blocks", "parts")),
    )


class CpuOps(Ops):
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
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
        self._write = function(library, "write_rows", *[c_void_p] * 4, *[c_long] * 5)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):
            return super().linear(x, weight, bias)
        rows, (outputs, width) = x.shape[0], weight.shape
        if rows < FEW_ROWS.start or x.stride(1) != 1 or not weight.is_contiguous():
            return super().linear(x, weight, bias)
        if rows in FEW_ROWS and width % ALIGNED_FLOATS == 0:
            product, packed_floats = self._few, rows * width
        else:
            product, packed_floats = self._many, self._packed_floats(outputs, width)
        out, packed = x.new_empty(rows, outputs), x.new_empty(packed_floats)
        product(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            address(bias),
            out.data_ptr(),
            packed.data_ptr(),
            rows,
            outputs,
            width,
            torch.get_num_threads(),
        )
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if weight is None:
            return super().norm(x, weight, eps)
        return self._normed(x, weight, eps, None)

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._normed(x, weight, eps, hidden.contiguous())

    def _normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
        width = x.shape[-1]
        if width % ALIGNED_FLOATS:
            normed = super().norm(x, weight, eps)
            return normed if residual is None else residual + normed
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        self._norm(
            x.data_ptr(),
            weight.data_ptr(),
            address(residual),
            out.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def heads(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, angles: Angles | None
    ) -> torch.Tensor:
        rows, count, dim = x.shape
        if dim % (2 * ALIGNED_FLOATS) or x.stride(2) != 1 or x.stride(1) != dim:
            return super().heads(x, weight, eps, angles)
        out = x.new_empty(rows, count, dim)
        cos, sin = angles or (None, None)
        self._heads(
            x.data_ptr(),
            x.stride(0),
            int(eps is not None),
            address(weight),
            address(cos),
            address(sin),
            out.data_ptr(),
            rows,
            count,
            dim,
            eps or 0.0,
            torch.get_num_threads(),
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % ALIGNED_FLOATS or not gate_up.is_contiguous():
            return super().gated(gate_up, activation)
        out = gate_up.new_empty(rows, width)
        is_gelu = int(activation == "gelu_pytorch_tanh")
        self._gated(gate_up.data_ptr(), out.data_ptr(), rows, width, is_gelu, torch.get_num_threads())
        return out

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: tuple[Weight, torch.Tensor | None],
        down: tuple[Weight, torch.Tensor | None],
        activation: str,
    ) -> torch.Tensor:
        if len(x) <= MLP_ROWS:
            return super().mlp(x, gate_up, down, activation)
        plain = super().mlp
        return torch.cat([plain(rows, gate_up, down, activation) for rows in torch.split(x, MLP_ROWS)])

    def attend_decoding(
        self,
        stored: LayerPages,
        step: Step,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: Mask,
        scores: Scores,
    ) -> torch.Tensor:
        out = self._attention.decoding(stored, step, queries, keys, values, mask, scores)
        return super().attend_decoding(stored, step, queries, keys, values, mask, scores) if out is None else out

    def decoding_layer(self, parts: LayerParts, stored: LayerPages) -> DecodingLayer | None:
        widths = (parts.input_norm.shape[0], parts.down.shape[1])
        aligned = parts.head_dim % (2 * ALIGNED_FLOATS) == 0 and not any(width % ALIGNED_FLOATS for width in widths)
        weights = (parts.qkv, parts.out, parts.gate_up, parts.down)
        plain = all(isinstance(w, torch.Tensor) and w.is_contiguous() for w in weights)
        if not aligned or not plain or not holds_plain_pairs(stored) or not stored.keeps_every_token:
            return None
        return _DecodingLayer(self._library, parts, stored)

    def attend_chunk(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_key: int,
        mask: Mask,
        scores: Scores,
    ) -> torch.Tensor:
        out = self._attention.chunk(queries, positions, keys, values, first_key, mask, scores)
        return super().attend_chunk(queries, positions, keys, values, first_key, mask, scores) if out is None else out

    def write_decoding(self, stored: LayerPages, step: Step, rows: list[torch.Tensor]) -> None:
        if stored.dtype != torch.float32 or not stored.keeps_every_token:
            super().write_decoding(stored, step, rows)
            return
        offsets, within = stored.decoding_writes(step)
        for part, values in enumerate(rows):
            values = values.contiguous()
            sequences, heads, dim = values.shape
            self._write(
                stored.address(part),
                offsets.data_ptr(),
                within.data_ptr(),
                values.data_ptr(),
                sequences,
                heads,
                dim,
                stored.block_tokens,
                stored.row_elements(part),
            )


class _DecodingLayer:
    """A layer's addresses, gathered once."""

    def __init__(self, library: ctypes.CDLL, parts: LayerParts, stored: LayerPages) -> None:
        self._run = function(
            library, "decode_layer", ctypes.POINTER(_Layer), ctypes.POINTER(_Tokens), c_void_p, c_void_p, c_int
        )
        self._scratch_floats = count(library, "layer_scratch_floats", ctypes.POINTER(_Layer), c_long)
        self._stored, self._mask = stored, parts.mask
        self._parts = parts  # so that what lies at these addresses stays there
        addresses = {name: address(getattr(parts, name)) for name in _LAYER_TENSORS}
        self._layer = _Layer(
            **addresses,
            sinks=address(parts.scores.sinks),
            keys=stored.address(0),
            values=stored.address(1),
            hidden=parts.input_norm.shape[0],
            query_heads=parts.query_heads,
            kv_heads=parts.kv_heads,
            dim=parts.head_dim,
            mlp=parts.down.shape[1],
            block_tokens=stored.block_tokens,
            row_floats=stored.row_elements(0),
            sandwich=parts.post_mlp_norm is not None,
            head_norms=parts.head_norms,
            v_norm=parts.v_norm,
            is_gelu=parts.activation == "gelu_pytorch_tanh",
            eps=parts.eps,
            scale=parts.scores.scale,
            softcap=parts.scores.softcap or 0.0,
            scalar=1.0 if parts.scalar is None else float(parts.scalar),
        )

    def __call__(self, hidden: torch.Tensor, step: Step, angles: Angles | None) -> torch.Tensor:
        reads = self._stored.decoding_reads(step, self._mask)
        to_offsets, to_rows = self._stored.decoding_writes(step)
        sequences, parts = len(hidden), parts_for(reads.most_tokens)
        cos, sin = angles or (None, None)
        tokens = _Tokens(
            reads.offsets.data_ptr(),
            reads.starts.data_ptr(),
            reads.stops.data_ptr(),
            to_offsets.data_ptr(),
            to_rows.data_ptr(),
            address(cos),
            address(sin),
            sequences,
            reads.shape[1],
            parts,
        )
        scratch = hidden.new_empty(sequences * self._scratch_floats(ctypes.byref(self._layer), parts))
        out = hidden.contiguous().clone()
        self._run(
            ctypes.byref(self._layer),
            ctypes.byref(tokens),
            out.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return out
