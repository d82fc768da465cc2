"""Which experts a row goes to, and with what shares: a product for the logits, then a choice row by row.

The inputs are cut in one way and the sums of all parts are added in order, whatever the number of rows: what a row is
given never depends on the rows beside it. Of few rows, each part has a program of its own, and the choice adds them;
of more, a program goes through them all.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.reference.routing import Routing

# A tile of logits. Larger ones read weights less often; from 64 rows on they would be multiplied by instructions that
# need not add in the same order.
TILE, LARGE_TILE = (16, 32), (32, 128)
FEW_ROWS, MANY_ROWS = 256, 1024
# Inputs that are multiplied at once.
PART_INPUTS, MOST_PARTS = 128, 32

SOFTMAX, CHOSEN_SOFTMAX, SIGMOID, CHOSEN_SIGMOID = (tl.constexpr(i) for i in range(4))
SCORINGS = {
    "softmax": SOFTMAX.value,
    "chosen_softmax": CHOSEN_SOFTMAX.value,
    "sigmoid": SIGMOID.value,
    "chosen_sigmoid": CHOSEN_SIGMOID.value,
}


class RouteWrite(NamedTuple):
    """Where a layer's choices are stored: in `arena`, row i's from element `places[i]` + `first` on, unless that place
    is negative.
    """

    arena: torch.Tensor
    places: torch.Tensor
    first: int


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None,
    expert_scales: torch.Tensor | None, *, chosen: int, scoring: str, renormalize: bool, multiplier: float = 1.0,
    groups: int = 1, chosen_groups: int = 1, write: RouteWrite | None = None, pdl: bool = False,
) -> Routing:  # fmt: skip
    """The `chosen` best experts of each row of `x` [rows, hidden], by `weight` [experts, hidden] and `bias`.

    scoring: what shares are. "softmax": probabilities among all experts. "chosen_softmax": among the chosen.
    "sigmoid": σ(logits); experts are chosen by that plus `correction`, among the `chosen_groups` of `groups` groups
    whose two best add up to most. "chosen_sigmoid": σ(logits) of the chosen.
    Shares then add up to 1 (`renormalize`) and are multiplied by `multiplier` and by the expert's own scale. Of equal
    experts the first is chosen. `write`: where the choices are stored beside.
    """
    (rows, hidden), experts = x.shape, len(weight)
    inputs = PART_INPUTS
    while ceil_div(hidden, inputs) > MOST_PARTS:
        inputs *= 2
    parts = ceil_div(hidden, inputs)
    splits = parts if rows <= FEW_ROWS else 1
    large = rows > MANY_ROWS and weight.dtype == torch.bfloat16
    tile_rows, tile_experts = LARGE_TILE if large else TILE
    logits = torch.empty(splits, rows, experts, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, chosen, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, chosen, dtype=torch.float32, device=x.device)
    if not rows:
        return Routing(ids, shares)
    logits_kernel[(ceil_div(rows, tile_rows), ceil_div(experts, tile_experts), splits)](
        x, weight, logits, x.stride(0), weight.stride(0), rows, hidden, experts, parts // splits, 1.0,
        IS_SPLIT=splits > 1, TILE_ROWS=tile_rows, TILE_EXPERTS=tile_experts, INPUTS=inputs, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    arena, places, first = write or (None, None, 0)
    choose_kernel[(rows,)](
        logits, bias, correction, expert_scales, ids, shares, arena, places, first, rows, float(multiplier),
        EXPERTS=experts,
        PADDED=max(32, triton.next_power_of_2(experts)), SPLITS=splits, CHOSEN=chosen,
        CHOSEN_PADDED=triton.next_power_of_2(chosen), SCORING=SCORINGS[scoring], RENORMALIZE=renormalize,
        GROUPS=groups, GROUPS_PADDED=triton.next_power_of_2(groups), CHOSEN_GROUPS=chosen_groups, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return Routing(ids, shares)


@triton.jit(do_not_specialize=["parts"])
def logits_kernel(
    X, W, LOGITS, x_stride, w_stride, rows, hidden, experts, parts, one, IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_EXPERTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (rows, experts, part of the inputs or all). Where the weight is in float32, so are the products."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    expert = tl.program_id(1) * TILE_EXPERTS + tl.arange(0, TILE_EXPERTS)
    part, k = tl.program_id(2), tl.arange(0, INPUTS)
    x_at = X + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = W + expert.to(tl.int64)[None, :] * w_stride + k[:, None]
    is_row, is_expert = (row < rows)[:, None], (expert < experts)[None, :]
    sums = tl.zeros([TILE_ROWS, TILE_EXPERTS], tl.float32)
    if IS_SPLIT:
        # Weights are on their way before the launch ahead has ended.
        inside = part * INPUTS + k < hidden
        w = tl.load(w_at + part * INPUTS, mask=is_expert & inside[:, None], other=0.0)
        if PDL:
            gdc_wait()
        x = tl.load(x_at + part * INPUTS, mask=is_row & inside[None, :], other=0.0, cache_modifier=".cg")
        sums = tl.dot(x.to(w.dtype), w, sums, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(0, parts * INPUTS, INPUTS, num_stages=3):
            inside = start + k < hidden
            w = tl.load(w_at + start, mask=is_expert & inside[:, None], other=0.0)
            x = tl.load(x_at + start, mask=is_row & inside[None, :], other=0.0, cache_modifier=".cg")
            product = tl.dot(x.to(w.dtype), w, tl.zeros_like(sums), input_precision="ieee")
            # A plain sum would become part of the product, and round otherwise than the sum over programs does.
            sums = tl.fma(product, one, sums)
    at = (part.to(tl.int64) * rows + row)[:, None] * experts + expert[None, :]
    tl.store(LOGITS + at, sums, mask=is_row & is_expert)


@triton.jit
def _best(values, places, NONE: tl.constexpr):
    """The largest value and its first place."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, places, NONE), 0)


@triton.jit
def _among_groups(
    choice, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by, -∞ outside of the best groups."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    PADDED: tl.constexpr = choice.shape[0]
    place = tl.arange(0, GROUPS_PADDED)
    scores = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(expert // SIZE == group, choice, float("-inf"))
        first, at = _best(members, expert, PADDED)
        second = tl.max(tl.where(expert == at, float("-inf"), members), 0)
        scores = tl.where(place == group, first + second, scores)
    kept = tl.zeros([PADDED], tl.int1)
    for _ in tl.static_range(CHOSEN_GROUPS):
        _, group = _best(scores, place, GROUPS)
        kept = kept | (expert // SIZE == group)
        scores = tl.where(place == group, float("-inf"), scores)
    return tl.where(kept, choice, float("-inf"))


@triton.jit(do_not_specialize=["first"])
def choose_kernel(
    LOGITS, BIAS, CORRECTION, EXPERT_SCALES, IDS, SHARES, ARENA, PLACES, first, rows, multiplier, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    is_expert = expert < EXPERTS
    logits = tl.zeros([PADDED], tl.float32)
    for split in tl.static_range(SPLITS):
        at = LOGITS + (split * rows + row) * EXPERTS + expert
        logits += tl.load(at, mask=is_expert, other=0.0, cache_modifier=".cg")
    if BIAS is not None:
        logits += tl.load(BIAS + expert, mask=is_expert, other=0.0).to(tl.float32)
    logits = tl.where(is_expert, logits, float("-inf"))
    scores = logits
    choice = logits
    if SCORING == SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORING == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores
        if CORRECTION is not None:
            choice += tl.load(CORRECTION + expert, mask=is_expert, other=0.0).to(tl.float32)
        choice = tl.where(is_expert, choice, float("-inf"))
        if GROUPS > 1:
            choice = _among_groups(choice, expert, EXPERTS, GROUPS, GROUPS_PADDED, CHOSEN_GROUPS)
    # NaN compares with nothing: chosen or not, it shows in the shares of softmax, and ids stay experts.
    choice = tl.where(choice == choice, choice, float("-inf"))
    # As integers of the same order: a warp finds the largest of those in one instruction, and so it does a sum.
    bits = tl.where(choice == 0.0, 0.0, choice).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    score_bits = scores.to(tl.int32, bitcast=True)
    slot = tl.arange(0, CHOSEN_PADDED)
    ids = tl.zeros([CHOSEN_PADDED], tl.int32)
    shares = tl.full([CHOSEN_PADDED], float("-inf"), tl.float32)
    for i in tl.static_range(CHOSEN):
        _, at = _best(keys, expert, EXPERTS - 1)
        score = tl.sum(tl.where(expert == at, score_bits, 0), 0).to(tl.float32, bitcast=True)
        ids = tl.where(slot == i, at, ids)
        shares = tl.where(slot == i, score, shares)
        keys = tl.where(expert == at, -0x80000000, keys)
    is_slot = slot < CHOSEN
    if SCORING == CHOSEN_SOFTMAX:
        powers = tl.exp(shares - tl.max(shares, 0))
        shares = powers / tl.sum(powers, 0)
    elif SCORING == CHOSEN_SIGMOID:
        shares = 1.0 / (1.0 + tl.exp(-shares))
    shares = tl.where(is_slot, shares, 0.0)
    if RENORMALIZE:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    shares *= multiplier
    if EXPERT_SCALES is not None:
        shares *= tl.load(EXPERT_SCALES + ids, mask=is_slot, other=0.0).to(tl.float32)
    tl.store(IDS + row * CHOSEN + slot, ids, mask=is_slot)
    if ARENA is not None:
        place = tl.load(PLACES + row)
        tl.store(ARENA + place + first + slot, ids.to(ARENA.dtype.element_ty), mask=is_slot & (place >= 0))
    tl.store(SHARES + row * CHOSEN + slot, shares, mask=is_slot)
