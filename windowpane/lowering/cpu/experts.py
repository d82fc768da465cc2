"""Experts in compiled kernels: `experts.c`. Weights in float32 are put into panels when they are loaded, so that no
product packs them; weights in strips are read as they are.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.cpu.pages import ALIGNED_FLOATS
from windowpane.lowering.linear import ExpertLinear
from windowpane.lowering.packed import strips_of
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.mixers import ExpertsMixer
from windowpane.lowering.reference.routing import Routing
from windowpane.lowering.strips import StripWeight
from windowpane.models.blocks import Experts
from windowpane.models.ggml import STRIP_OUTPUTS
from windowpane.native.calls import address, count, function

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu2", "clamped")  # by their numbers in experts.c
MOST_CHOSEN = 64  # add_up in experts.c
# Visits at a time: what lies between their products then takes little memory, and weights are still read seldom.
MOST_VISITS = 16384


class _Weights(ctypes.Structure):
    """`Weights` in experts.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "packed", "up", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    )


class _Experts(ctypes.Structure):
    """`Experts` in experts.c."""

    _fields_ = (
        *((name, _Weights) for name in ("first", "second")),
        *((name, c_int64) for name in ("experts", "first_expert", "activation", "weighs_inputs")),
        *((name, c_float) for name in ("limit", "alpha")),
    )


class _Visits(ctypes.Structure):
    """`Visits` in experts.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "ids", "shares", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "chosen")),
    )


@dataclass(frozen=True)
class _Held:
    """What an `ExpertLinear` is held as: panels or strips, in one part or gate and up apart, and its bias."""

    weight: torch.Tensor | tuple[StripWeight, ...]
    bias: torch.Tensor | None
    outputs: int
    inputs: int

    @property
    def described(self) -> _Weights:
        if isinstance(self.weight, torch.Tensor):
            places: tuple[int | None, ...] = (self.weight.data_ptr(), None, None)
        else:
            places = (None, *(ctypes.addressof(part.described) for part in self.weight))
        return _Weights(*places[:3], bias=address(self.bias), outputs=self.outputs, inputs=self.inputs)


def make_experts(described: Experts, context: Context) -> ExpertsMixer:
    """Compiled ones where kernels have the weights and widths and adapters add nothing, else the reference's."""
    linears = [context.parameters.experts(of) for of in (described.gate_up, described.down)]
    covered = all(map(_covers, linears)) and described.router.chosen <= MOST_CHOSEN
    return CpuExperts(described, context) if covered else ExpertsMixer(described, context)


def _covers(linear: ExpertLinear) -> bool:
    weight, inputs = linear.weight, linear.weight.shape[1]
    if linear.adapter is not None:
        return False
    if parts := strips_of(weight):
        each = linear.outputs // len(parts)
        alike = {(len(part) // linear.experts, part.form.rounds_inputs) for part in parts}
        return len(parts) <= 2 and len(alike) == 1 and each % STRIP_OUTPUTS == 0 and inputs % ALIGNED_FLOATS == 0
    plain = isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 and weight.is_contiguous()
    return plain and inputs % ALIGNED_FLOATS == 0 and linear.outputs % ALIGNED_FLOATS == 0


class CpuExperts(ExpertsMixer):
    def __init__(self, described: Experts, context: Context) -> None:
        super().__init__(described, context)
        assert isinstance(context.ops, CpuOps)
        del self.gate_up, self.down  # what they held is freed as panels are made of it
        gate_up, down = (context.parameters.take_experts(of) for of in (described.gate_up, described.down))
        self.visited = VisitedExperts(context.ops, gate_up, down, described, self.first)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        routing, norm = self.route(x, state), self.described.norm
        if norm is not None:
            x = self._ops.norm(x, self.norm, norm)
        return self._context.group.all_reduce(self.visited(x.contiguous(), routing))


class VisitedExperts:
    """Σ share × expert(x) over the experts that are here; `first` is the first of them."""

    def __init__(self, ops: CpuOps, gate_up: ExpertLinear, down: ExpertLinear, described: Experts, first: int) -> None:
        self._ops, library = ops, ops.library
        self._held = [_held(linear, library) for linear in (gate_up, down)]
        activation = "clamped" if described.limit is not None else described.activation
        self._described = _Experts(
            *(held.described for held in self._held), gate_up.experts, first, ACTIVATIONS.index(activation),
            described.weighs_inputs, described.limit or 0.0, described.alpha,
        )  # fmt: skip
        self._run = function(library, "run_experts", ctypes.POINTER(_Experts), ctypes.POINTER(_Visits), c_int)
        self._scratch_floats = count(library, "experts_scratch_floats", ctypes.POINTER(_Experts), c_long)

    def __call__(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        chosen = routing.ids.shape[1]
        at_once = max(1, MOST_VISITS // chosen)
        ids, shares, out = routing.ids.contiguous(), routing.shares.contiguous(), torch.empty_like(x)
        described = ctypes.byref(self._described)
        scratch = self._ops.scratch(self._scratch_floats(described, min(len(x), at_once) * chosen))
        for start in range(0, len(x), at_once):
            rows = slice(start, start + at_once)
            visits = _Visits(
                x[rows].data_ptr(), ids[rows].data_ptr(), shares[rows].data_ptr(), out[rows].data_ptr(),
                scratch.data_ptr(), len(x[rows]), chosen,
            )  # fmt: skip
            self._run(described, ctypes.byref(visits), torch.get_num_threads())
        return out


def _held(linear: ExpertLinear, library: Any) -> _Held:
    weight, outputs, inputs = linear.weight, linear.outputs, linear.weight.shape[1]
    if parts := strips_of(weight):
        return _Held(parts, linear.bias, outputs, inputs)
    assert isinstance(weight, torch.Tensor)
    pack = function(library, "pack_outputs", c_void_p, c_void_p, c_long, c_long, c_int)
    floats = count(library, "product_packed_floats", c_long, c_long)(outputs, inputs)
    panels = weight.new_empty(linear.experts, floats)
    for expert, rows in enumerate(weight.view(linear.experts, outputs, inputs)):
        pack(rows.data_ptr(), panels[expert].data_ptr(), outputs, inputs, torch.get_num_threads())
    return _Held(panels, None if linear.bias is None else linear.bias.float().contiguous(), outputs, inputs)
