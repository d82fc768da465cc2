"""A layer of experts: each row goes through those that routing chose for it, and their results are added by shares.

Few rows: `experts_few`, two launches that read the weights of every pair. More rows: `experts_grouped`, where pairs are
sorted by expert and each expert's weights are read once; `experts_hopper` has other products for Hopper. All weights
of a projection are one weight of experts × outputs rows, plain or packed. Nothing waits for the host, so that a graph
can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from windowpane.lowering.gpu.kernels.experts_activation import NO_ACTIVATION, RELU2, code_of
from windowpane.lowering.gpu.kernels.experts_few import Few, few_product
from windowpane.lowering.gpu.kernels.experts_grouped import Grouped, add_pairs, grouped_product
from windowpane.lowering.gpu.kernels.experts_hopper import Boxed, boxed_product, gather_rows, takes_boxes, takes_rows
from windowpane.lowering.gpu.kernels.experts_sorted import sort_pairs
from windowpane.lowering.packed import PackedWeight, Weight
from windowpane.lowering.reference.routing import Routing

# Up to these, every pair reads its expert's weights by itself; packed ones leave more time for that.
FEW_ROWS, FEW_ROWS_OF_PACKED = 2, 4

Launches = tuple[Few, Few] | tuple[Grouped, Grouped] | tuple[Boxed, Boxed]


def run_experts(
    x: torch.Tensor, routing: Routing, gate_up: Weight, down: Weight, *, experts: int, activation: str,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, limit: float | None = None,
    alpha: float = 1.702, weighs_inputs: bool = False, first_expert: int = 0, local_experts: int | None = None,
    large_scales: bool = False, out: torch.Tensor | None = None, launches: Launches | None = None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """out [rows, hidden] = Σ share · expert(x), added in float32 in the order of `routing`.

    `gate_up` has for each expert the rows of its gate, then those of what it gates; with the ungated activation
    "relu2" one set of rows. `limit` (gpt-oss): gate = min(gate, limit), up = clamp(up, ±limit), and the result of both
    is gate · σ(alpha · gate) · (up + 1). `weighs_inputs` (Llama 4): Σ expert(share · x). Weights and biases
    [experts, outputs] may be those of `local_experts` experts from `first_expert` on: others then add nothing.
    `large_scales` is what `has_large_scales` says of the weights.
    `launches`: how both products are shared out, where that is not to be planned here.
    """
    local = experts if local_experts is None else local_experts
    weights = _single(gate_up, "gate and up"), _single(down, "down")
    code = code_of(activation, limit)
    (rows, chosen), hidden = routing.ids.shape, len(down) // local
    width = len(gate_up) // local // (1 if code == RELU2.value else 2)
    out = x.new_empty(rows, hidden) if out is None else out
    if not rows:
        return out
    if launches is None:
        has_boxes = code != RELU2.value and not weighs_inputs and not large_scales
        launches = plan_experts(rows, chosen, experts, x.dtype, *weights, has_boxes=has_boxes)
    inner = x.new_empty(rows * chosen, width)
    common: dict[str, Any] = {"limit": float(limit or 0.0), "alpha": float(alpha), "local": local, "pdl": pdl}
    first, second = launches
    if isinstance(first, Few) and isinstance(second, Few):
        few_product(
            x, weights[0], gate_up_bias, routing, inner, first=first_expert, activation=code, weighted=weighs_inputs,
            launch=first, **common,
        )  # fmt: skip
        few_product(
            inner, weights[1], down_bias, routing, out, first=first_expert, activation=NO_ACTIVATION.value,
            weighted=not weighs_inputs, launch=second, **common,
        )  # fmt: skip
        return out
    assert not isinstance(first, Few) and not isinstance(second, Few) and first.rows == second.rows
    by_expert = sort_pairs(routing, first_expert, local, first.rows, pdl=pdl)
    if isinstance(first, Boxed) and isinstance(second, Boxed):
        common["chosen"] = chosen
        read = x if takes_rows(weights[0], code) else gather_rows(x, by_expert, routing, pdl=pdl)
        boxed_product(read, weights[0], gate_up_bias, by_expert, inner, activation=code, launch=first, **common)
        # What was gathered is as large, and no longer needed.
        results = x.new_empty(rows * chosen, hidden) if read is x else read
        boxed_product(
            inner, weights[1], down_bias, by_expert, results, activation=NO_ACTIVATION.value, launch=second, **common
        )
    elif isinstance(first, Grouped) and isinstance(second, Grouped):
        grouped_product(
            x, weights[0], gate_up_bias, routing, by_expert, inner, activation=code, weighted=weighs_inputs,
            launch=first, **common,
        )  # fmt: skip
        results = x.new_empty(rows * chosen, hidden)
        grouped_product(
            inner, weights[1], down_bias, routing, by_expert, results, activation=NO_ACTIVATION.value, weighted=False,
            launch=second, **common,
        )  # fmt: skip
    add_pairs(results, routing, out, first=first_expert, local=local, weighted=not weighs_inputs, pdl=pdl)
    return out


def plan_experts(
    rows: int, chosen: int, experts: int, dtype: torch.dtype, gate_up: torch.Tensor | PackedWeight,
    down: torch.Tensor | PackedWeight, *, has_boxes: bool = True,
) -> Launches:  # fmt: skip
    """By the number of rows alone, never by where they go. `has_boxes`: what stands between the products has a kernel
    in `experts_hopper`.
    """
    if rows <= (FEW_ROWS_OF_PACKED if isinstance(gate_up, PackedWeight) else FEW_ROWS):
        return _plan_few(gate_up), _plan_few(down)
    # Most experts then have one block, or their last block is mostly full.
    per_expert = rows * chosen / experts
    block = min(128, max(16, triton.next_power_of_2(int(1.25 * per_expert) + 1)))
    if has_boxes and takes_boxes(gate_up, dtype, block) and takes_boxes(down, dtype, block):
        return Boxed(block), Boxed(block)
    return plan_grouped(block, gate_up, dtype), plan_grouped(block, down, dtype)


def _plan_few(weight: torch.Tensor | PackedWeight) -> Few:
    """The best that `bench.gpu_checks.experts sweep` found on an H200, as is `plan_grouped`."""
    if isinstance(weight, PackedWeight):
        return Few(32, 4, 3) if weight.units.dtype == torch.int16 else Few(16, 2, 3)
    # Threads beyond the last input would have nothing to read.
    if weight.shape[1] * weight.element_size() < 1024:
        return Few(4, 1)
    return Few(8 if weight.shape[1] >= 1024 else 4, 4)


def plan_grouped(block: int, weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> Grouped:
    if dtype.itemsize != 2:  # without tensor cores, for checks: as small as kernels come
        return Grouped(block, 32, 32, 4, 1)
    if isinstance(weight, PackedWeight):
        if block >= 128 and weight.kind == "mxfp4":  # others need more registers than there are
            return Grouped(block, 256, 128, 8, 2)
        return Grouped(block, 128, 128, 8 if block >= 64 else 4, 3)
    if block >= 128:
        return Grouped(block, 256, 64, 8, 3)
    return Grouped(block, 64, 128, 4, 4) if weight.shape[1] >= 1024 else Grouped(block, 128, 64, 4, 4)


def _single(weight: Weight, name: str) -> torch.Tensor | PackedWeight:
    if not isinstance(weight, torch.Tensor | PackedWeight):
        raise TypeError(
            f"{name} weights of experts are a {type(weight).__name__}; kernels take tensors and PackedWeight"
        )
    if isinstance(weight, PackedWeight) and weight.order is not None:
        raise ValueError(f"{name} weights of experts take their inputs in another order; there is no kernel for that")
    return weight
