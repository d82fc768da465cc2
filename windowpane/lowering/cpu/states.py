"""Mixers with a recurrent state in compiled kernels: `states.c`. Projections are the reference's.

States in other dtypes than float32, and widths that are no multiples of 16, go the plain way.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p

import torch

from windowpane.device.pages import StatePages
from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.cpu.pages import ALIGNED_FLOATS
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.states import GatedDeltaMixer, Mamba2Mixer, ShortConvMixer
from windowpane.models.blocks import RMS, GatedDeltaNet, Mamba2, ShortConv
from windowpane.native.calls import address, count, function
from windowpane.schedule.step import Step

MOST_TAILS, MOST_TAPS = 3, 8  # MOST_TAILS and TAPS in states.c


class _States(ctypes.Structure):
    """`States` in states.c."""

    _fields_ = (
        ("tails", c_void_p * MOST_TAILS),
        ("tail_channels", c_int64 * MOST_TAILS),
        *((name, c_void_p) for name in ("recurrent", "before", "after")),
        *((name, c_int64) for name in ("before_stride", "after_stride")),
        *((name, c_void_p) for name in ("is_new", "first_rows", "first_leaves", "stops")),
        ("sequences", c_int64),
    )


class _Convolution(ctypes.Structure):
    """`Convolution` in states.c."""

    _fields_ = (
        ("x", c_void_p),
        *((name, c_int64) for name in ("x_stride", "channels", "taps")),
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("section", "width", "rest_width")),
    )


class _Delta(ctypes.Structure):
    """`Delta` in states.c."""

    _fields_ = (
        ("states", _States),
        ("convolution", _Convolution),
        *((name, c_void_p) for name in ("rates", "steps")),
        *((name, c_int64) for name in ("rates_stride", "steps_stride")),
        *((name, c_void_p) for name in ("decay", "dt_bias", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "key_heads", "value_heads", "key_dim", "value_dim")),
    )


class _Scan(ctypes.Structure):
    """`Scan` in states.c."""

    _fields_ = (
        ("states", _States),
        ("convolution", _Convolution),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        *((name, c_void_p) for name in ("rates", "dt_bias", "skip", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "heads", "groups", "head_dim", "state_dim")),
        *((name, c_float) for name in ("least_step", "most_step")),
    )


class _Short(ctypes.Structure):
    """`Short` in states.c."""

    _fields_ = (
        ("states", _States),
        ("convolution", _Convolution),
        *((name, c_void_p) for name in ("inputs", "b", "x")),
        *((name, c_int64) for name in ("b_stride", "x_stride")),
        ("out", c_void_p),
        ("rows", c_int64),
    )


class _Held:
    """The states of a step's sequences as kernels find them, and the tensors that are to live until they are done.

    `is_tail`: they are convolutions' tails and nothing else.
    """

    def __init__(self, stored: StatePages, step: Step, taps: int, *, is_tail: bool = False) -> None:
        tails, recurrent = (stored.parts, None) if is_tail else (stored.parts[:-1], stored.parts[-1])
        self._plan = plan = stored.plan(step)
        self._before, self._after = (pages[:, stored.stripe] for pages in (plan.before, plan.after))
        sequences = len(self._before)
        self._is_new = torch.zeros(sequences, dtype=torch.uint8).index_fill_(0, plan.new, 1)
        channels = [part.shape[1] * part.shape[2] // (taps - 1) for part in tails]
        self.described = _States(
            (c_void_p * MOST_TAILS)(*(part.data_ptr() for part in tails)), (c_int64 * MOST_TAILS)(*channels),
            address(recurrent), self._before.data_ptr(), self._after.data_ptr(), self._before.stride(0),
            self._after.stride(0), self._is_new.data_ptr(), *(rows.data_ptr() for rows in plan.in_tensors), sequences,
        )  # fmt: skip


def _covers(stored: StatePages, taps: int) -> bool:
    return (
        len(stored.parts) <= MOST_TAILS + 1
        and 2 <= taps <= MOST_TAPS
        and all(part.dtype == torch.float32 for part in stored.parts)
    )


class _Kernels:
    """What both mixers have of the library: the norm of what is read, and memory."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.ops, CpuOps)
        self.ops, self.library = context.ops, context.ops.library
        self._gated_norm = function(
            self.library, "gated_norm", *[c_void_p] * 2, c_long, c_void_p, c_long, c_int, c_void_p, *[c_long] * 3,
            c_float, c_int,
        )  # fmt: skip

    def gated_norm(
        self, x: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, *, norms_last: bool
    ) -> torch.Tensor:
        """x [rows, groups × dim], normed group by group and gated; a weight of one group serves all."""
        out, dim = torch.empty_like(x), x.shape[1] // groups
        self._gated_norm(
            x.data_ptr(), gates.data_ptr(), gates.stride(0), weight.data_ptr(), dim if len(weight) > dim else 0,
            norms_last, out.data_ptr(), len(x), groups, dim, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out


class CpuGatedDelta(GatedDeltaMixer):
    def __init__(self, described: GatedDeltaNet, context: Context) -> None:
        super().__init__(described, context)
        self._kernels = _Kernels(context)
        self._run = function(self._kernels.library, "delta_states", ctypes.POINTER(_Delta), c_int)
        self._columns = count(self._kernels.library, "delta_columns_at_once", c_long)(described.value_dim)
        self._taps_first = self.conv.t().contiguous()
        self._aligned = not any(dim % ALIGNED_FLOATS for dim in (described.key_dim, described.value_dim))

    def _read(self, qkv: torch.Tensor, rates_and_steps: torch.Tensor, state: StepState) -> torch.Tensor:
        described, (channels, taps) = self.described, self.conv.shape
        stored = state.pages.states[described.layer]
        if not self._aligned or not _covers(stored, taps):
            return super()._read(qkv, rates_and_steps, state)
        held, rows, heads = _Held(stored, state.step, taps), len(qkv), described.value_heads
        rates, steps = rates_and_steps[:, :heads], rates_and_steps[:, heads:]
        out = qkv.new_empty(rows, heads, described.value_dim)
        scratch = self._kernels.ops.scratch(rows * (channels + 2 * heads))
        asked = _Delta(
            held.described,
            _Convolution(
                qkv.data_ptr(), qkv.stride(0), channels, taps, self._taps_first.data_ptr(), None,
                2 * described.key_heads * described.key_dim, described.key_dim, self._columns,
            ),
            rates.data_ptr(), steps.data_ptr(), rates.stride(0), steps.stride(0), self.decay.data_ptr(),
            self.dt_bias.data_ptr(), out.data_ptr(),
            scratch.data_ptr(), rows, described.key_heads, heads,
            described.key_dim, described.value_dim,
        )  # fmt: skip
        self._run(ctypes.byref(asked), torch.get_num_threads())
        return out

    def _gated(self, read: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if not self._aligned or self.norm is None or self.described.norm.kind != RMS:
            return super()._gated(read, gates)
        heads, eps = self.described.value_heads, self.described.norm.eps
        return self._kernels.gated_norm(read.flatten(1).contiguous(), gates, self.norm, heads, eps, norms_last=False)


class CpuMamba2(Mamba2Mixer):
    def __init__(self, described: Mamba2, context: Context) -> None:
        super().__init__(described, context)
        self._kernels = _Kernels(context)
        self._run = function(self._kernels.library, "scan_states", ctypes.POINTER(_Scan), c_int)
        self._rows_at_once = count(self._kernels.library, "scan_rows_at_once")()
        self._taps_first = self.conv.t().contiguous()
        self._aligned = not any(dim % ALIGNED_FLOATS for dim in (described.head_dim, described.state_dim))

    def _read(self, made: torch.Tensor, state: StepState) -> torch.Tensor:
        described, (channels, taps) = self.described, self.conv.shape
        stored = state.pages.states[described.layer]
        if not self._aligned or not _covers(stored, taps):
            return super()._read(made, state)
        held, rows = _Held(stored, state.step, taps), len(made)
        out = made.new_empty(rows, self._inner)
        scratch = self._kernels.ops.scratch(rows * (channels + 2 * described.heads))
        asked = _Scan(
            held.described,
            _Convolution(
                made.data_ptr(), made.stride(0), channels, taps, self._taps_first.data_ptr(), address(self.conv_bias),
                self._inner, self._rows_at_once, described.state_dim,
            ),
            made[:, channels:].data_ptr(), made.stride(0), self.rates.data_ptr(), self.dt_bias.data_ptr(),
            self.skip.data_ptr(), out.data_ptr(),
            scratch.data_ptr(), rows, described.heads,
            described.groups, described.head_dim, described.state_dim, *described.dt_limits,
        )  # fmt: skip
        self._run(ctypes.byref(asked), torch.get_num_threads())
        return out

    def _gated(self, y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        described, norm = self.described, self.described.norm
        groups = described.groups if described.norms_groups else 1
        together = groups == 1 and self._context.group.place.ranks > 1
        if norm is None or self.norm is None or together or y.shape[1] // groups % ALIGNED_FLOATS:
            return super()._gated(y, gates)
        return self._kernels.gated_norm(
            y.contiguous(), gates, self.norm, groups, norm.eps, norms_last=not described.norms_first
        )


class CpuShortConv(ShortConvMixer):
    def __init__(self, described: ShortConv, context: Context) -> None:
        super().__init__(described, context)
        assert isinstance(context.ops, CpuOps)
        self._run = function(context.ops.library, "short_states", ctypes.POINTER(_Short), c_int)
        self._scratch, self._taps_first = context.ops.scratch, self.conv.t().contiguous()
        self._width = 64 if len(self.conv) % 64 == 0 else ALIGNED_FLOATS  # channels at once

    def _mixed(self, before: torch.Tensor, inner: torch.Tensor, state: StepState) -> torch.Tensor:
        stored, (channels, taps) = state.pages.states[self.described.layer], self.conv.shape
        if channels % ALIGNED_FLOATS or len(stored.parts) > MOST_TAILS or not _covers(stored, taps):
            return super()._mixed(before, inner, state)
        held, out = _Held(stored, state.step, taps, is_tail=True), before.new_empty(len(before), channels)
        inputs = self._scratch(out.numel())
        asked = _Short(
            held.described,
            _Convolution(
                inputs.data_ptr(), channels, channels, taps, self._taps_first.data_ptr(), address(self.conv_bias),
                channels, self._width, self._width,
            ),
            inputs.data_ptr(), before.data_ptr(), inner.data_ptr(), before.stride(0), inner.stride(0), out.data_ptr(),
            len(out),
        )  # fmt: skip
        self._run(ctypes.byref(asked), torch.get_num_threads())
        return out
