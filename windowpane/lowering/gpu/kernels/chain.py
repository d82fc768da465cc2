"""All int4 products between two layers' attention for one row, from the host's side: which layers, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from windowpane.attention.triton.view import processors_of
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.chain_forms import AT_A_TURN, GATED, LONG, PIECE_GROUPS, TALL, WARPS
from windowpane.lowering.gpu.kernels.chain_inputs import pieces_of
from windowpane.lowering.gpu.kernels.chain_kernel import chain_kernel
from windowpane.lowering.gpu.kernels.chain_portions import ends_within_a_turn
from windowpane.lowering.gpu.kernels.hopper_tiled import GROUP_INPUTS, is_hopper, is_symmetric_int4
from windowpane.lowering.packed import PackedWeight

STEP_INPUTS = 256
LONG_STEPS = 8  # of which each warp has one
PART_OUTPUTS = {TALL: 128, GATED: 64, LONG: 16}
PORTION_BYTES = 128 * (128 + 16)
# Turns that are on their way. More of them make what programs leave for each other wait behind weights.
STAGES = 2
DIGIT_BYTES = 2 * (32 + 4)  # of a group
SHARED_BYTES = 227 * 1024
OTHER_SHARED_BYTES = 4096  # sums that meet, and what the compiler needs for reductions
MOST_PARTS = 12  # of a program; more were never checked
MOST_WIDTH = 8192  # of a row that a program norms


class ProgramShare(NamedTuple):
    """A product's outputs of one program, in `parts`."""

    form: int
    parts: int
    turns: int


@cache
def cut(outputs: int, inputs: int, programs: int, *, gated: bool = False) -> ProgramShare:
    """The form with the fewest turns. `outputs` of a gated product are what it leaves."""
    share, steps = ceil_div(outputs, programs), ceil_div(inputs, STEP_INPUTS)
    tall = _cut(GATED if gated else TALL, share, steps)
    long = _cut(LONG, share, ceil_div(steps, LONG_STEPS))
    return long if long.turns <= tall.turns and not gated else tall


def _cut(form: int, share: int, steps: int) -> ProgramShare:
    parts = ceil_div(share, PART_OUTPUTS[form])
    if parts == 1 and form == TALL and steps % AT_A_TURN == 0:
        return ProgramShare(form, 1, steps // AT_A_TURN)
    parts = ceil_div(parts, AT_A_TURN) * AT_A_TURN
    return ProgramShare(form, parts, parts // AT_A_TURN * steps)


@dataclass(frozen=True, slots=True)
class Links:
    """What happens between two layers' attention. Norms are float32; `following` are the next layer's projections,
    None behind the last layer, where the norm is all that follows.
    """

    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    following: PackedWeight | None
    post_attention_norm: torch.Tensor | None
    pre_mlp_norm: torch.Tensor
    post_mlp_norm: torch.Tensor | None
    next_norm: torch.Tensor
    scalar: torch.Tensor | None
    eps: float
    gelu: bool

    @property
    def weights(self) -> list[PackedWeight]:
        return [w for w in (self.out, self.gate_up, self.down, self.following) if w is not None]

    @property
    def fit(self) -> bool:
        """Whether each product takes what the one before leaves."""
        width = len(self.out)
        inputs = [w.inputs for w in (self.gate_up, self.following) if w is not None]
        return len(self.gate_up) == 2 * self.down.inputs and {width, len(self.down), *inputs} == {width}


class ChainScratch:
    """What programs leave for each other; chains of a device run one after the other and share it.

    Layers of a model whose MLPs have this inner width may share it. The next layers' projections have `most_following`
    outputs or fewer, and all are cut as if they had so many: then these layers are one kernel, and its code is at hand
    (docs/performance.md). 0: projections are cut for themselves.
    """

    def __init__(self, width: int, inner_width: int, device: torch.device, most_following: int = 0) -> None:
        self.most_following = most_following
        ones = torch.full((2, 2 * width + inner_width), -1, dtype=torch.int16, device=device)  # no result yet
        self.results = ones.view(torch.bfloat16)
        self.side = torch.zeros(processors_of(device), dtype=torch.int32, device=device)  # one for each program


def has_chain(links: Links, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for it on the device that the weights are on."""
    return is_hopper(links.out.device) and is_chain(links, dtype, processors_of(links.out.device))


def is_chain(links: Links, dtype: torch.dtype, programs: int) -> bool:
    if dtype != torch.bfloat16 or not links.fit or not all(_is_taken(w, dtype) for w in links.weights):
        return False
    cuts = _cuts(links, programs)
    if cuts[0].form != LONG or cuts[2].form != LONG or len(links.out) > MOST_WIDTH:
        return False
    ahead_is_one_product = all(c.turns >= STAGES for c in cuts)
    return ahead_is_one_product and max(c.parts for c in cuts) <= MOST_PARTS and _shared_bytes(links) <= SHARED_BYTES


def _is_taken(weight: PackedWeight, dtype: torch.dtype) -> bool:
    return (
        is_symmetric_int4(weight, dtype)
        and weight.order is None
        and weight.inputs % STEP_INPUTS == 0
        and weight.units.numel() < 2**31
        and weight.units.is_contiguous()
        and weight.scales.is_contiguous()
        and all(t.data_ptr() % 16 == 0 for t in (weight.units, weight.scales))
    )


def _cuts(links: Links, programs: int) -> list[ProgramShare]:
    """Of the products, one after the other."""
    gated_width = links.down.inputs
    cuts = [
        cut(*links.out.shape, programs),
        cut(gated_width, links.gate_up.inputs, programs, gated=True),
        cut(*links.down.shape, programs),
    ]
    return cuts if links.following is None else [*cuts, cut(*links.following.shape, programs)]


def _held_pieces(links: Links) -> int:
    return int(max(pieces_of(w.inputs) for w in links.weights))


def _shared_bytes(links: Links) -> int:
    ring = STAGES * AT_A_TURN * PORTION_BYTES
    residual: int = pieces_of(len(links.out)) * PIECE_GROUPS * GROUP_INPUTS * 2
    return ring + residual + _held_pieces(links) * PIECE_GROUPS * DIGIT_BYTES + OTHER_SHARED_BYTES


def try_chain(links: Links, scratch: ChainScratch, dtype: torch.dtype, *, pdl: bool) -> None:
    """Raises RuntimeError where the card cannot hold all programs at once: they wait for each other, and a launch of a
    step would never end.

    One layer answers for the others: in each of them a multiprocessor has registers and shared memory for a program
    (`is_chain`), so the only question is whether all multiprocessors are at hand.
    """
    attended, hidden = (
        torch.zeros(1, n, dtype=dtype, device=links.out.device) for n in (links.out.inputs, len(links.out))
    )
    run_chain(attended, hidden, links, scratch, pdl=pdl, cooperative=True)


def run_chain(
    attended: torch.Tensor,
    hidden: torch.Tensor,
    links: Links,
    scratch: ChainScratch,
    *,
    pdl: bool,
    cooperative: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From what one row attended [1, inputs] to the next layer's projections [1, outputs], or to the norm behind the
    last layer; and the residual stream [1, width] that `hidden` becomes.

    `cooperative` launches raise RuntimeError where the card cannot hold all programs at once. They do not overlap the
    launch before them, which costs some 3 µs, so steps do without (`try_chain`). Both are the same code: they differ in
    launch attributes alone, and the instructions of PDL do nothing in a launch without that attribute.
    """
    assert scratch.results.shape[1] == 2 * hidden.shape[1] + links.down.inputs, "scratch is for layers of other widths"
    programs = processors_of(hidden.device)
    out_cut, gate_cut = _cuts(links, programs)[:2]
    following = links.following
    next_cut = ProgramShare(TALL, 0, 0)
    if following is not None:
        next_cut = cut(max(len(following), scratch.most_following), following.inputs, programs)
        assert next_cut.turns >= STAGES and next_cut.parts <= MOST_PARTS, "most_following is of a layer with a chain"
    result = hidden.new_empty(1, hidden.shape[1] if following is None else len(following))
    new_hidden = torch.empty_like(hidden)
    weights = [t for w in links.weights for t in (w.units, w.scales)]
    chain_kernel[(programs,)](
        attended, hidden, new_hidden, scratch.results, result, *weights, *((None, None) if following is None else ()),
        links.post_attention_norm, links.pre_mlp_norm, links.post_mlp_norm, links.next_norm, links.scalar,
        scratch.side, links.out.inputs // STEP_INPUTS, 0 if following is None else len(following), links.eps,
        WIDTH=hidden.shape[1], INNER_WIDTH=links.down.inputs, PARTS=out_cut.parts, GATE_PARTS=gate_cut.parts,
        OUT_ENDS=ends_within_a_turn(links.out.inputs, *out_cut[:2]), NEXT_PARTS=next_cut.parts, NEXT_FORM=next_cut.form,
        PIECES=_held_pieces(links), STAGES=STAGES, GELU=links.gelu, PDL=pdl, num_warps=WARPS,
        launch_pdl=pdl and not cooperative, launch_cooperative_grid=cooperative,
    )  # fmt: skip
    return result, new_hidden
