"""Checks of routing and experts against plain torch, for a process with TRITON_INTERPRET=1; named by its arguments."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton.language as tl

from tests.kernels import hopper_in_torch
from tests.kernels.gluon_in_torch import Interpreted
from tests.kernels.test_packed_kernels import random_weight
from windowpane.lowering.gpu.kernels import experts_hopper, experts_sorted
from windowpane.lowering.gpu.kernels.experts import Few, Grouped, run_experts
from windowpane.lowering.gpu.kernels.experts_hopper import Boxed
from windowpane.lowering.gpu.kernels.experts_sorted import sort_pairs
from windowpane.lowering.gpu.kernels.routing import FEW_ROWS, route
from windowpane.lowering.packed import PackedWeight, Weight
from windowpane.lowering.reference.routing import Routing

EXPERTS = 6
# Large tiles: the interpreter goes through programs one by one.
FEW = (Few(64, 1), Few(64, 1))
GROUPED = (Grouped(16, 64, 64, 4, 1), Grouped(16, 64, 32, 4, 1))
BOXES = (Grouped(16, 64, 32, 4, 1, tma=True), Grouped(16, 64, 32, 4, 1, tma=True))
KINDS_GROUPED = (Grouped(16, 128, 128, 4, 1), Grouped(16, 256, 128, 4, 1))


# -- routing -------------------------------------------------------------------------------------------------------


def plain_route(x, weight, bias, correction, scales, *, chosen, scoring, renormalize, multiplier, groups, kept_groups):
    """Sorted by value and then by place, so that equal experts come in order."""
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(scoring, logits)
    choice = scores if correction is None else scores + correction
    if groups > 1:
        parts = choice.view(len(x), groups, -1)
        best = parts.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :kept_groups]
        keeps = torch.zeros(len(x), groups).scatter_(1, best, 1.0).bool()
        choice = parts.masked_fill(~keeps[:, :, None], -math.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    shares = scores.gather(1, ids)
    if scoring == "chosen_softmax":
        shares = shares.softmax(-1)
    elif scoring == "chosen_sigmoid":
        shares = shares.sigmoid()
    if renormalize:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    shares = shares * multiplier
    return ids.int(), shares if scales is None else shares * scales[ids]


def routing_agrees(rows, hidden, experts, chosen, scoring, *, renormalize=False, multiplier=1.0, groups=1, kept=1,
                   bias=False, correction=False, scales=False, ties=False, dtype=torch.float32):  # fmt: skip
    x = torch.randn(rows, hidden + 8)[:, :hidden].to(dtype)
    weight = torch.randn(experts, hidden) / hidden**0.5
    if ties:
        weight = weight[torch.arange(experts) // 2]
    extras = [torch.randn(experts) if has else None for has in (bias, correction, scales)]
    options = {"chosen": chosen, "scoring": scoring, "renormalize": renormalize, "multiplier": multiplier}
    found = route(x, weight, *extras, groups=groups, chosen_groups=kept, **options)
    ids, shares = plain_route(x, weight, *extras, groups=groups, kept_groups=kept, **options)
    assert torch.equal(found.ids, ids), (found.ids, ids)
    torch.testing.assert_close(found.shares, shares, rtol=1e-5, atol=1e-6)
    return x, weight, found


def scorings() -> None:
    routing_agrees(3, 200, 40, 8, "softmax", renormalize=True, scales=True)
    routing_agrees(2, 72, 5, 1, "softmax")
    routing_agrees(3, 136, 40, 4, "chosen_softmax", bias=True)
    routing_agrees(2, 64, 130, 22, "sigmoid", correction=True, renormalize=True, multiplier=2.5)
    routing_agrees(17, 64, 48, 6, "sigmoid", correction=True, groups=6, kept=2, renormalize=True, multiplier=1.5)
    routing_agrees(3, 64, 16, 1, "chosen_sigmoid")
    routing_agrees(3, 64, 16, 3, "chosen_sigmoid", dtype=torch.float16)


def ties() -> None:
    routing_agrees(3, 64, 20, 5, "softmax", ties=True)
    routing_agrees(3, 64, 32, 5, "sigmoid", groups=4, kept=2, ties=True)
    found = route(torch.zeros(2, 64), torch.randn(40, 64), None, None, None, chosen=4, scoring="sigmoid",
                  renormalize=True, multiplier=1.0, groups=4, chosen_groups=2)  # fmt: skip
    assert found.ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(found.shares, torch.full((2, 4), 0.25))


def rows_are_routed_alone_as_together() -> None:
    x, weight, together = routing_agrees(FEW_ROWS + 4, 300, 33, 4, "softmax")
    for row in (0, 17, FEW_ROWS + 3):
        alone = route(x[row : row + 1], weight, None, None, None, chosen=4, scoring="softmax", renormalize=False)
        assert torch.equal(alone.ids, together.ids[row : row + 1])
        assert torch.equal(alone.shares, together.shares[row : row + 1])


# -- experts -------------------------------------------------------------------------------------------------------


def matrix(weight: Weight) -> torch.Tensor:
    return (weight.dequantize(torch.float32) if isinstance(weight, PackedWeight) else weight).float()


def plain_experts(x, routing, gate_up, down, *, experts, activation, gate_up_bias=None, down_bias=None, limit=None,
                  alpha=1.702, weighs_inputs=False, first_expert=0, local_experts=None):  # fmt: skip
    local = experts if local_experts is None else local_experts
    gate_up, down = (matrix(w).view(local, -1, w.shape[1]) for w in (gate_up, down))
    out = torch.zeros(len(x), down.shape[1])
    for row, (ids, shares) in enumerate(zip(routing.ids.tolist(), routing.shares, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            if not first_expert <= expert < first_expert + local:
                continue
            e = expert - first_expert
            y = gate_up[e] @ (x[row].float() * (share if weighs_inputs else 1.0))
            y = y if gate_up_bias is None else y + gate_up_bias[e]
            y = down[e] @ activated(y, activation, limit, alpha)
            y = y if down_bias is None else y + down_bias[e]
            out[row] += y if weighs_inputs else share * y
    return out


def activated(y, activation, limit, alpha):
    if activation == "relu2":
        return y.relu().square()
    gate, up = y.chunk(2)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def random_routing(rows: int, chosen: int, experts: int = EXPERTS) -> Routing:
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(rows)])
    return Routing(ids.int(), torch.rand(rows, chosen) + 0.1)


def plain_weights(hidden: int, width: int, experts: int = EXPERTS, sets: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(experts * sets * width, hidden) / hidden**0.5,
        torch.randn(experts * hidden, width) / width**0.5,
    )


def experts_agree(rows, weights, chosen, launches, *, routing=None, experts=EXPERTS, **options) -> torch.Tensor:
    routing = routing or random_routing(rows, chosen, experts)
    hidden = weights[0].shape[1]
    x = torch.randn(rows, hidden + 8)[:, :hidden]
    out = torch.full((rows, hidden), math.nan)
    options = {"experts": experts, "activation": "silu"} | options
    run_experts(x, routing, *weights, **options, out=out, launches=launches)
    want = plain_experts(x, routing, *weights, **options)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
    return out


def forms() -> None:
    """Few and many rows, each with one and several experts to a row, and sizes that no tile divides."""
    weights = plain_weights(72, 44)
    for rows, chosen in ((1, 1), (2, 5)):
        experts_agree(rows, weights, chosen, FEW)
    for rows, chosen in ((1, 1), (1, 5), (40, 1), (40, 3)):
        experts_agree(rows, weights, chosen, GROUPED)
    for rows in (1, 12):
        experts_agree(rows, plain_weights(40, 12), 1, None)
    experts_agree(3, weights, 2, BOXES)
    nobody = Routing(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
    assert run_experts(torch.zeros(0, 72), nobody, *weights, experts=EXPERTS, activation="silu").shape == (0, 72)


def activations() -> None:
    biases = {"gate_up_bias": torch.randn(EXPERTS, 88), "down_bias": torch.randn(EXPERTS, 72)}
    for launches in (FEW, GROUPED, BOXES):
        weights = plain_weights(72, 44)
        experts_agree(2, weights, 2, launches, activation="gelu_pytorch_tanh")
        experts_agree(2, weights, 2, launches, limit=0.7, alpha=1.5, **biases)
        experts_agree(2, weights, 2, launches, weighs_inputs=True, **biases)
        experts_agree(2, plain_weights(72, 44, sets=1), 2, launches, activation="relu2")


def ranks() -> None:
    """Ranks hold a part of the experts, and what they find adds up to the whole."""
    weights = plain_weights(72, 44)
    routing = random_routing(5, 3)
    for launches in (FEW, GROUPED):
        experts_agree(5, (weights[0][2 * 88 : 5 * 88], weights[1][2 * 72 : 5 * 72]), 3, launches, routing=routing,
                      first_expert=2, local_experts=3)  # fmt: skip


def crowds() -> None:
    """All rows to one expert, and to the last."""
    weights = plain_weights(72, 44)
    for expert in (2, EXPERTS - 1):
        routing = Routing(torch.full((35, 1), expert, dtype=torch.int32), torch.rand(35, 1))
        experts_agree(35, weights, 1, GROUPED, routing=routing)
    experts_agree(3, weights, 1, FEW, routing=Routing(routing.ids[:3], routing.shares[:3]))


def sorting() -> None:
    """Pairs of an expert are in order and blocks cover them all: few, which are compared with all others at once and
    in turns, and many, whose counts are added at once and in turns.
    """
    for rows in (5, 200, 1000, 1024, 1025, 3000):
        sorted_rows(rows)
    experts_sorted._ADDED = tl.constexpr(8)
    sorted_rows(3000)


def sorted_rows(rows: int) -> None:
    routing = random_routing(rows, 2)
    found = sort_pairs(routing, 1, 4, 64, pdl=False)
    ids = routing.ids.flatten()
    count, *taken = found.count.tolist()
    assert count <= len(found.blocks) and taken == [0, 0]
    begin, want = 0, torch.cat([(ids == expert).nonzero().flatten() for expert in range(1, 5)])
    assert torch.equal(found.pairs[: len(want)].long(), want)
    for expert, first, end in found.blocks[:count].tolist():
        assert first == begin
        begin = min(end, first + 64)
        assert (ids[found.pairs[first:begin].long()] == expert + 1).all()
    assert begin == len(want)


def kinds() -> None:
    """Every kind of packed weight in both forms, with blocks of inputs that are not whole."""
    for kind, group, zeros, scale_outputs in (
        ("int4", 32, False, 1), ("int4", 64, True, 1), ("int4", None, True, 1), ("mxfp4", 32, False, 1),
        ("fp8", None, False, 1), ("fp8", 128, False, 32),
    ):  # fmt: skip
        # A rest of 32 inputs after a whole block, and less than a block.
        inputs, width = (192, 64) if group == 64 else (160, 32)
        gate_up = random_weight(kind, 3 * 2 * width, inputs, group, zeros, scale_outputs)
        down = random_weight(kind, 3 * inputs, width, group, zeros, scale_outputs)
        gate_up, down = small(gate_up), small(down)
        for rows, launches in ((1, (Few(128, 1), Few(256, 1))), (5, KINDS_GROUPED)):
            experts_agree(rows, (gate_up, down), 2, launches, experts=3, limit=5.0 if kind == "mxfp4" else None)


def boxes() -> None:
    """The experts of one rank by the kernel for Hopper, run in torch, between those that sort and add pairs."""
    experts_hopper.mxfp4_experts_kernel = Interpreted(experts_hopper.mxfp4_experts_kernel, hopper_in_torch.NAMES)
    gate_up, down = small(random_weight("mxfp4", 3 * 80, 136, 32)), small(random_weight("mxfp4", 3 * 136, 40, 32))
    x, routing = torch.randn(21, 144).bfloat16()[:, :136], random_routing(21, 2, 5)
    options = {"experts": 5, "first_expert": 1, "local_experts": 3, "activation": "silu", "limit": 7.0}
    want = plain_experts(x, routing, gate_up, down, **options)
    found = run_experts(x, routing, gate_up, down, **options, launches=(Boxed(16), Boxed(16)))
    torch.testing.assert_close(found.float(), want, rtol=8e-3, atol=8e-3 * float(want.abs().max()))


def halves() -> None:
    """float16, and scales that are read as words."""
    for kind, group in (("int4", 64), ("mxfp4", 32)):
        gate_up, down = small(random_weight(kind, 3 * 64, 128, group)), small(random_weight(kind, 3 * 128, 32, group))
        if kind == "int4":
            gate_up, down = (replace(weight, scales=weight.scales.half()) for weight in (gate_up, down))
        x, routing = torch.randn(3, 128).half(), random_routing(3, 2, 3)
        want = plain_experts(x, routing, gate_up, down, experts=3, activation="silu")
        for launches in ((Few(64, 1), Few(128, 1)), KINDS_GROUPED):
            found = run_experts(x, routing, gate_up, down, experts=3, activation="silu", launches=launches)
            torch.testing.assert_close(found.float(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))


def small(weight: PackedWeight) -> PackedWeight:
    """So that activations stay in their range."""
    if weight.kind == "mxfp4":
        return replace(weight, scales=weight.scales - 6)
    return replace(weight, scales=weight.scales / (64 if weight.kind == "int4" else 2048))


def real_widths() -> None:
    """Inputs that are no multiple of 128, as gpt-oss (2,880) and Gemma 4 (704) have."""
    gate_up = small(random_weight("mxfp4", 2 * 64, 2880, 32))
    down = small(random_weight("mxfp4", 2 * 2880, 32, 32))
    experts_agree(1, (gate_up, down), 2, (Few(64, 4), Few(1024, 1)), experts=2)
    experts_agree(2, (gate_up, down), 2, (Grouped(16, 64, 128, 4, 1), Grouped(16, 1024, 128, 4, 1)), experts=2)
    weights = plain_weights(64, 704, 2)
    experts_agree(1, weights, 2, (Few(512, 1), Few(64, 1)), experts=2)
    experts_agree(2, weights, 2, (Grouped(16, 512, 64, 4, 1), Grouped(16, 64, 128, 4, 1)), experts=2)


def rows_alone_as_together() -> None:
    """Bits of a row do not depend on the rows beside it."""
    weights, routing = plain_weights(72, 44), random_routing(40, 3)
    x = torch.randn(40, 72)
    options = {"experts": EXPERTS, "activation": "silu"}
    for launches in (FEW, GROUPED):
        rows = slice(0, 40 if launches is GROUPED else 2)
        together = run_experts(x[rows], Routing(routing.ids[rows], routing.shares[rows]), *weights, launches=launches,
                               **options)  # fmt: skip
        for row in (0, len(together) - 1):
            one = slice(row, row + 1)
            alone = run_experts(x[one], Routing(routing.ids[one], routing.shares[one]), *weights, launches=launches,
                                **options)  # fmt: skip
            assert torch.equal(alone, together[one])


if __name__ == "__main__":
    warnings.filterwarnings("error")
    # the interpreter's own use of NumPy
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    for check in sys.argv[1:]:
        globals()[check]()
