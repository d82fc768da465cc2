"""Weights of few bits on a CPU: products and look-ups in compiled kernels, rows of inputs in 8 bits.

`StripWeight` holds what `windowpane.models.ggml` describes: a tensor of a GGUF file, or a quantized weight of another
checkpoint. A decoder treats it as it treats a tensor [outputs, inputs].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from windowpane.models.ggml import GGML_TYPES, STRIP_OUTPUTS, StripForm
from windowpane.native import build
from windowpane.native.calls import address, function

MOST_PARTS = 8  # of one product: packed_product in packed.c has room for one more
_INPUTS_BYTES = 2  # of one input in 8 bits, with its share of what stands beside: `Inputs` in packed.h


class Packed(ctypes.Structure):
    """`Packed` in packed.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales")),
        *((name, c_int64) for name in ("outputs", "inputs", "columns", "kind", "scaled", "scaled_outputs")),
    )


class Units(ctypes.Structure):
    """`Units` in repack.c."""

    _fields_ = (*((name, c_void_p) for name in ("units", "scales", "zeros")), ("scales_each", c_int64))


@dataclass(frozen=True)
class StripWeight:
    """`order`: column j is input order[j]. None where columns are in order."""

    form: StripForm
    values: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor | None = None

    @classmethod
    def empty(cls, form: StripForm) -> StripWeight:
        return cls(form, *(torch.empty(size, dtype=torch.uint8) for size in (form.values_bytes, form.scales_bytes)))

    def __len__(self) -> int:
        return self.form.outputs

    def __getitem__(self, outputs: slice) -> StripWeight:
        """Some consecutive outputs, as views: whole strips."""
        start, stop, _ = outputs.indices(len(self))
        if start % STRIP_OUTPUTS or (stop % STRIP_OUTPUTS and stop != len(self)):
            raise IndexError(f"outputs {start} to {stop} cut through strips of {STRIP_OUTPUTS}")
        if start % self.form.scaled_outputs or (stop % self.form.scaled_outputs and stop != len(self)):
            return self._with_scales_of_strips()[start:stop]
        form, before = replace(self.form, outputs=stop - start), replace(self.form, outputs=start)
        return StripWeight(
            form,
            self.values[before.values_bytes : before.values_bytes + form.values_bytes],
            self.scales[before.scales_bytes : before.scales_bytes + form.scales_bytes],
            self.order,
        )

    def _with_scales_of_strips(self) -> StripWeight:
        """Where several strips share scales, each gets its own."""
        shared = self.scales.view(-(-len(self) // self.form.scaled_outputs), -1)
        own = shared.repeat_interleave(self.form.scaled_outputs // STRIP_OUTPUTS, 0)[: self.form.strips]
        form = replace(self.form, scaled_outputs=STRIP_OUTPUTS)
        return StripWeight(form, self.values, own.flatten(), self.order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.form.outputs, self.form.inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.scales, self.order) if t is not None)

    @cached_property
    def described(self) -> Packed:
        """Where it lies, for kernels; true as long as this object lives."""
        form = self.form
        return Packed(
            self.values.data_ptr(), self.scales.data_ptr(), form.outputs, form.held_inputs, form.inputs, form.kind,
            form.scaled_inputs, form.scaled_outputs,
        )  # fmt: skip

    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Outputs from `first` on, whole strips, from rows of the file's bytes [outputs, row bytes]."""
        rows = rows.contiguous()
        part = self[first : first + len(rows)]
        _kernels().repack(ctypes.byref(part.described), rows.data_ptr(), rows.shape[1], torch.get_num_threads())

    def fill_from_units(self, units: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """All outputs, whole strips, from what `windowpane.models.packing` describes."""
        if self.form.scaled_outputs > 1:
            self.scales.copy_(scales.contiguous().view(torch.uint8).flatten())
        units, scales, zeros = units.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous()
        source = Units(units.data_ptr(), scales.data_ptr(), address(zeros), scales.shape[1])
        _kernels().repack_units(ctypes.byref(self.described), ctypes.byref(source), torch.get_num_threads())

    @property
    def has_finite_scales(self) -> bool:
        """Of ggml's types, whether every float16 scale is a number."""
        kind = GGML_TYPES[self.form.kind]
        if not kind.half_bytes:
            return True
        halves = self.scales
        if kind.half_bytes < kind.scale_bytes:
            halves = self.scales.view(-1, kind.scale_bytes)[:, : kind.half_bytes].contiguous()
        return bool(halves.view(torch.float16).isfinite().all())

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """float32 rows [which, inputs], exactly what the file means."""
        which = which.to(torch.int64).contiguous()
        out = torch.empty(*which.shape, self.form.held_inputs)
        count = which.numel()
        _kernels().rows(ctypes.byref(self.described), which.data_ptr(), out.data_ptr(), count, torch.get_num_threads())
        return out[..., : self.form.inputs]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole matrix."""
        return self.rows(torch.arange(len(self))).to(dtype)

    def permute_outputs(self, order: torch.Tensor) -> StripWeight:
        """Output j of the result is output order[j] of this; of ggml's types. A lane of every line is one output."""
        kind, form = GGML_TYPES[self.form.kind], self.form
        padded = torch.cat([order, torch.arange(len(order), form.strips * STRIP_OUTPUTS)])
        half_bytes = kind.half_bytes if kind.half_bytes < kind.scale_bytes else 0
        spans = self.scales.view(form.strips, len(self.scales) // form.strips)
        values = _permuted_lanes(self.values.view(form.strips, -1), padded, 2 if kind.bits == 16 else 4)
        if half_bytes:
            spans = spans.view(form.strips, -1, kind.scale_bytes)
            halves = _permuted_lanes(spans[..., :half_bytes].flatten(1), padded, 2).view(*spans.shape[:2], -1)
            small = _permuted_lanes(spans[..., half_bytes:].flatten(1), padded, 1).view(*spans.shape[:2], -1)
            scales = torch.cat([halves, small], dim=2)
        else:
            scales = _permuted_lanes(spans, padded, 2 if kind.half_bytes else 1)
        return StripWeight(form, values.flatten(), scales.flatten(), self.order)

    def permute_inputs(self, order: torch.Tensor) -> StripWeight:
        """A weight for inputs that come in another order: its input j is input order[j] of this one. Blocks of inputs
        have scales of their own, so columns stay, and inputs are put back in order before every product.
        """
        back = order.argsort()
        return replace(self, order=back if self.order is None else back[self.order])

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x if self.order is None else x.index_select(1, self.order), [self], bias)


def _permuted_lanes(strips: torch.Tensor, order: torch.Tensor, lane_bytes: int) -> torch.Tensor:
    """uint8 [strips, lines × 16 lanes × bytes], with lanes in another order over all strips."""
    lanes = strips.reshape(len(strips), -1, STRIP_OUTPUTS, lane_bytes).transpose(1, 2).flatten(0, 1)[order]
    return lanes.view(len(strips), STRIP_OUTPUTS, -1, lane_bytes).transpose(1, 2).flatten(1)


def packed_linear(x: torch.Tensor, parts: Sequence[StripWeight], bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, inputs] · weightᵀ + bias for weights of one input, in one order, one above the other."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = len(x)
    out = x.new_empty(rows, sum(map(len, parts)))
    quantized = torch.empty(rows * parts[0].form.held_inputs * _INPUTS_BYTES, dtype=torch.uint8)
    kernels, threads = _kernels(), torch.get_num_threads()
    described = (Packed * len(parts))(*(part.described for part in parts))
    if any(part.form.rounds_inputs for part in parts):
        kernels.quantize(x.data_ptr(), x.stride(0), quantized.data_ptr(), rows, described, threads)
    kernels.product(
        described, len(parts), quantized.data_ptr(), x.data_ptr(), x.stride(0), address(bias), out.data_ptr(),
        out.shape[1], rows, threads,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Kernels:
    repack: Callable[..., None]
    repack_units: Callable[..., None]
    rows: Callable[..., None]
    quantize: Callable[..., None]
    product: Callable[..., None]


@cache
def _kernels() -> _Kernels:
    library = build.library()
    assert library is not None, f"packed weights are loaded where kernels are: {build.why_not()}"
    packed = ctypes.POINTER(Packed)
    return _Kernels(
        function(library, "repack", packed, c_void_p, c_long, c_int),
        function(library, "repack_units", packed, ctypes.POINTER(Units), c_int),
        function(library, "packed_rows", packed, c_void_p, c_void_p, c_long, c_int),
        function(library, "quantize_rows", c_void_p, c_long, c_void_p, c_long, packed, c_int),
        function(
            library, "packed_product", packed, c_long, c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_long, c_long,
            c_int,
        ),
    )  # fmt: skip
