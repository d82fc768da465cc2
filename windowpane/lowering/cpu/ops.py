"""The operations in compiled kernels, for float32 on CPUs. What a kernel does not cover goes the plain way.

Tensors are handed over by address, so each method first makes sure of dtype, contiguity and width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_long, c_void_p

import torch

from windowpane.device.pages import LayerPages
from windowpane.device.step import Step
from windowpane.lowering.packed import Weight
from windowpane.lowering.reference.ops import Angles, DecodingLayer, LayerParts, Ops
from windowpane.native import build

# Up to here the kernel that reads weights in place is faster than those that repack them; for one row a library's does
# not.
FEW_ROWS = range(2, 49)
PART_TOKENS = 256  # PART in decoding.c
# Rows of an MLP at a time: what lies between its products then stays in a cache, and is small enough for the allocator
# to hand out the same memory again instead of fresh pages.
MLP_ROWS = 1024
MOST_GROUPED_HEADS = 60  # ROWS in chunks.c, at the least
ALIGNED_FLOATS = 16  # widths that kernels take are multiples of it, those of heads of twice as many


def ops_for(embedding: torch.Tensor) -> Ops:
    """What a decoder with this embedding runs on."""
    if embedding.device.type == "cpu" and embedding.dtype == torch.float32:
        library = build.library()
        if library is not None:
            return CpuOps(library)
    return Ops()


class _Chunk(ctypes.Structure):
    """`Chunk` in chunks.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "positions", "keys", "values")),
        *((name, c_void_p) for name in ("packed_keys", "packed_values", "out")),
        *((name, c_int64) for name in ("key_head", "key_token", "value_head", "value_token")),
        *((name, c_int64) for name in ("tokens", "first_key", "num_keys", "window")),
        *((name, c_int64) for name in ("query_heads", "kv_heads", "dim")),
        ("scale", c_float),
    )


class _Attention(ctypes.Structure):
    """`Attention` in decoding.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "offsets", "starts", "stops", "queries")),
        *((name, c_void_p) for name in ("now_keys", "now_values", "partial", "out")),
        *((name, c_int64) for name in ("sequences", "blocks", "parts", "block_tokens")),
        *((name, c_int64) for name in ("query_heads", "kv_heads", "dim", "row_floats")),
        ("scale", c_float),
    )


_LAYER_TENSORS = (
    *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias"),
    *("post_attention_norm", "pre_mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "post_mlp_norm"),
)


class _Layer(ctypes.Structure):
    """`Layer` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in (*_LAYER_TENSORS, "keys", "values")),
        *((name, c_int64) for name in ("hidden", "query_heads", "kv_heads", "dim", "mlp", "block_tokens")),
        *((name, c_int64) for name in ("row_floats", "sandwich", "head_norms", "v_norm", "is_gelu")),
        *((name, c_float) for name in ("eps", "scale", "scalar")),
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
        self._few = _function(library, "product_of_few", *product)
        self._many = _function(library, "product_of_many", *product)
        self._packed_floats = _count(library, "product_packed_floats", 2)
        self._norm = _function(library, "rms_norm", *[c_void_p] * 4, c_long, c_long, c_float, c_int)
        self._heads = _function(
            library, "heads", *[c_void_p, c_long, c_int], *[c_void_p] * 4, *[c_long] * 3, c_float, c_int
        )
        self._gated = _function(library, "gated", c_void_p, c_void_p, c_long, c_long, c_int, c_int)
        self._attend = _function(library, "attend_decoding", ctypes.POINTER(_Attention), c_int)
        self._attend_chunk = _function(library, "attend_chunk", ctypes.POINTER(_Chunk), c_int)
        self._packed_tokens = _count(library, "chunk_packed_tokens", 2)
        self._packed_dim = _count(library, "chunk_packed_dim", 1)
        self._write = _function(library, "write_rows", *[c_void_p] * 4, *[c_long] * 5)

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
            _address(bias),
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
            _address(residual),
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
            _address(weight),
            _address(cos),
            _address(sin),
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
        window_tokens: int | None,
        scale: float,
    ) -> torch.Tensor:
        sequences, query_heads, dim = queries.shape
        if not _holds_plain_pairs(stored) or dim % ALIGNED_FLOATS or values.shape != keys.shape:
            return super().attend_decoding(stored, step, queries, keys, values, window_tokens, scale)
        reads = stored.decoding_reads(step, window_tokens)
        kv_heads, parts = keys.shape[1], max(1, -(-reads.most_tokens // PART_TOKENS))
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        out = torch.empty_like(queries)
        partial = queries.new_empty(sequences * query_heads * parts * (dim + 16))
        asked = _Attention(
            stored.address(0),
            stored.address(1),
            reads.offsets.data_ptr(),
            reads.starts.data_ptr(),
            reads.stops.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            partial.data_ptr(),
            out.data_ptr(),
            sequences,
            reads.shape[1],
            parts,
            stored.block_tokens,
            query_heads,
            kv_heads,
            dim,
            stored.row_elements(0),
            scale,
        )
        self._attend(ctypes.byref(asked), torch.get_num_threads())
        return out

    def decoding_layer(self, parts: LayerParts, stored: LayerPages) -> DecodingLayer | None:
        widths = (parts.input_norm.shape[0], parts.down.shape[1])
        aligned = parts.head_dim % (2 * ALIGNED_FLOATS) == 0 and not any(width % ALIGNED_FLOATS for width in widths)
        weights = (parts.qkv, parts.out, parts.gate_up, parts.down)
        plain = all(isinstance(w, torch.Tensor) and w.is_contiguous() for w in weights)
        if not aligned or not plain or not _holds_plain_pairs(stored) or not stored.keeps_every_token:
            return None
        return _DecodingLayer(self._library, parts, stored)

    def attend_chunk(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_key: int,
        window_tokens: int | None,
        scale: float,
    ) -> torch.Tensor:
        tokens, query_heads, dim = queries.shape
        kv_heads, num_keys, _ = keys.shape
        contiguous = keys.stride(2) == values.stride(2) == 1
        if values.shape != keys.shape or not contiguous or query_heads // kv_heads > MOST_GROUPED_HEADS:
            return super().attend_chunk(queries, positions, keys, values, first_key, window_tokens, scale)
        queries, positions = queries.contiguous(), positions.to(torch.int64).contiguous()
        out = torch.empty_like(queries)
        packed_tokens = kv_heads * self._packed_tokens(first_key, num_keys)
        packed_keys = queries.new_empty(packed_tokens * dim)
        packed_values = queries.new_empty(packed_tokens * self._packed_dim(dim))
        asked = _Chunk(
            queries.data_ptr(),
            positions.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            packed_keys.data_ptr(),
            packed_values.data_ptr(),
            out.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            tokens,
            first_key,
            num_keys,
            window_tokens or 0,
            query_heads,
            kv_heads,
            dim,
            scale,
        )
        self._attend_chunk(ctypes.byref(asked), torch.get_num_threads())
        return out

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
        self._run = _function(
            library, "decode_layer", ctypes.POINTER(_Layer), ctypes.POINTER(_Tokens), c_void_p, c_void_p, c_int
        )
        scratch_floats = library.layer_scratch_floats
        scratch_floats.argtypes, scratch_floats.restype = (ctypes.POINTER(_Layer), c_long), c_long
        self._scratch_floats = scratch_floats
        self._stored, self._window_tokens = stored, parts.window_tokens
        self._parts = parts  # so that what lies at these addresses stays there
        addresses = {name: _address(getattr(parts, name)) for name in _LAYER_TENSORS}
        self._layer = _Layer(
            **addresses,
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
            scale=parts.scale,
            scalar=1.0 if parts.scalar is None else float(parts.scalar),
        )

    def __call__(self, hidden: torch.Tensor, step: Step, angles: Angles | None) -> torch.Tensor:
        reads = self._stored.decoding_reads(step, self._window_tokens)
        to_offsets, to_rows = self._stored.decoding_writes(step)
        sequences, parts = len(hidden), max(1, -(-reads.most_tokens // PART_TOKENS))
        cos, sin = angles or (None, None)
        tokens = _Tokens(
            reads.offsets.data_ptr(),
            reads.starts.data_ptr(),
            reads.stops.data_ptr(),
            to_offsets.data_ptr(),
            to_rows.data_ptr(),
            _address(cos),
            _address(sin),
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


def _holds_plain_pairs(stored: LayerPages) -> bool:
    return stored.dtype == torch.float32 and stored.parts == 2 and stored.row_elements(0) == stored.row_elements(1)


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function  # type: ignore[no-any-return]


def _count(library: ctypes.CDLL, name: str, arguments: int) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = (c_long,) * arguments, c_long
    return function  # type: ignore[no-any-return]


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
