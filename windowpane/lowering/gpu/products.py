"""Products on a GPU: a few rows stream the weights once, many are a matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from windowpane.lowering.gpu.adapters import rows_with
from windowpane.lowering.gpu.kernels.gated import gated, relu2
from windowpane.lowering.gpu.kernels.matvec import matvec, pays
from windowpane.lowering.gpu.kernels.packed import SPLIT_ROWS, packed_linear, packed_product
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import JoinedWeight, PackedWeight


def product(x: torch.Tensor, linear: Linear, *, pdl: bool) -> torch.Tensor:
    """x · weightᵀ + bias, and what adapters add. `pdl` lets a launch begin while the one before it ends."""
    out = _product(x, linear, pdl=pdl)
    if linear.adapter is not None and (rows := rows_with(linear.adapter, x)) is not None:
        rows.add(linear.adapter, x, out)
    return out


def _product(x: torch.Tensor, linear: Linear, *, pdl: bool) -> torch.Tensor:
    weight, bias = linear.weight, linear.bias
    if isinstance(weight, PackedWeight):
        return packed_product(x, weight, bias, pdl=pdl)
    if isinstance(weight, JoinedWeight):
        out = torch.cat([product(x, Linear(part), pdl=pdl) for part in weight.parts], dim=-1)
        return out if bias is None else out + bias
    assert isinstance(weight, torch.Tensor)  # strips are refused before they are loaded on a GPU
    if len(x) and pays(len(x)):
        out = x.new_empty(len(x), len(weight))
        matvec(x, weight, out, bias, pdl=pdl)
        return out
    return F.linear(x, weight, bias)


def ungated_product(x: torch.Tensor, up: Linear, *, pdl: bool) -> torch.Tensor:
    """max(up, 0)²: the one activation of MLPs without a gate."""
    inner = product(x, up, pdl=pdl)
    relu2(inner, pdl=pdl)
    return inner


def gated_product(
    x: torch.Tensor, gate_up: Linear, activation: str, *, multiplier: float = 1.0, pdl: bool
) -> torch.Tensor:
    """activation(multiplier × gate) × up, in the launch that makes them where there is one."""
    inner = x.new_empty(len(x), gate_up.outputs // 2)
    weight, has_bias = gate_up.weight, gate_up.bias is not None
    if multiplier != 1.0:
        made = product(x, gate_up, pdl=pdl)
        made[:, : inner.shape[1]] *= multiplier
        gated(made, inner, activation, pdl=pdl)
    elif gate_up.adapter is not None and (rows := rows_with(gate_up.adapter, x)) is not None:
        rows.gate(gate_up.adapter, x, _product(x, gate_up, pdl=pdl), inner, activation)
    elif isinstance(weight, PackedWeight) and not has_bias and len(x) <= SPLIT_ROWS:
        packed_linear(x, weight, inner, activation=activation)
    elif isinstance(weight, torch.Tensor) and not has_bias and pays(len(x)):
        matvec(x, weight, inner, activation=activation, pdl=pdl)
    else:
        gated(product(x, gate_up, pdl=pdl), inner, activation, pdl=pdl)
    return inner
