"""A pass: one row of int4 weights goes from a layer's attention to the next one's in one launch (`kernels.chain`).

Leave out the call of `chain_layers` in `lowering.gpu.model` (`--no-enable-layer-chain`), and every layer runs block by
block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links, has_chain, run_chain, try_chain
from windowpane.lowering.gpu.kernels.gated import is_gelu
from windowpane.lowering.gpu.layers import GpuLayer
from windowpane.lowering.gpu.mixers import GpuAttention, GpuMlp, GpuStepState
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import PackedWeight
from windowpane.models.blocks import RMS

log = logging.getLogger("windowpane.lowering")


class ChainedLayer:
    """A step of one decoding row takes the chain, all others go block by block."""

    def __init__(self, layer: GpuLayer, links: Links, scratch: ChainScratch, pdl: bool) -> None:
        self._layer, self.blocks, self.links, self._scratch, self._pdl = layer, layer.blocks, links, scratch, pdl
        self._attention: GpuAttention = layer.blocks[0].mixer

    def __call__(
        self, hidden: torch.Tensor, normed: torch.Tensor, state: GpuStepState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(hidden) != 1 or state.step.chunks is not None:
            return self._layer(hidden, normed, state)
        attended = self._attention.attend(normed, state)
        made, hidden = run_chain(attended, hidden, self.links, self._scratch, pdl=self._pdl)
        if self.links.following is None:
            return hidden, made
        state.projected = made
        return hidden, normed  # which nobody reads


def chain_layers(
    layers: Sequence[GpuLayer], hidden_size: int, dtype: torch.dtype, device: torch.device, pdl: bool
) -> list[GpuLayer | ChainedLayer]:
    """The same layers, those that can be chained to the next one wrapped; none where the card refuses the launch."""
    links = [_links(a, b) for a, b in zip(layers, [*layers[1:], None], strict=True)]
    found = [link if link is not None and has_chain(link, dtype) else None for link in links]
    following = [len(link.following) for link in found if link is not None and link.following is not None]
    most_following = max(following, default=0)
    widths = {link.down.inputs: link for link in reversed(found) if link is not None}  # the first layer of each
    scratch = {width: ChainScratch(hidden_size, width, device, most_following) for width in widths}
    try:
        for width, link in widths.items():
            try_chain(link, scratch[width], dtype, pdl=pdl)
    except RuntimeError as error:
        log.warning("int4 layers run block by block: this card refuses to run a layer in one launch (%s)", error)
        return list(layers)
    return [
        layer if link is None else ChainedLayer(layer, link, scratch[link.down.inputs], pdl)
        for layer, link in zip(layers, found, strict=True)
    ]


def _links(layer: GpuLayer, following: GpuLayer | None) -> Links | None:
    """What lies between this layer's attention and the next one's, None unless it is all packed and plain."""
    mixers = [block.mixer for block in layer.blocks]
    if len(mixers) != 2 or not isinstance(mixers[0], GpuAttention) or not isinstance(mixers[1], GpuMlp):
        return None
    attends, feeds = layer.blocks
    attention, mlp = mixers[0], mixers[1]
    next_attention = None if following is None else following.blocks[0].mixer
    if not isinstance(next_attention, GpuAttention | None):
        return None
    gated = [a.described.gated for a in (attention, next_attention) if a is not None]
    if any(gated) or not mlp.described.has_gate or mlp.described.gate_multiplier != 1.0 or mlp.out_gate is not None:
        return None
    norms = [attends.described.after, feeds.described.before, feeds.described.after, feeds.following]
    if feeds.described.before is None or feeds.following is None:
        return None
    if any(norm is not None and (norm.kind != RMS or norm.eps != feeds.following.eps) for norm in norms):
        return None
    if any(block.described.multiplier != 1.0 for block in layer.blocks):
        return None
    out, gate_up, down = _packed(attention.out), _packed(mlp.gate_up), _packed(mlp.down)
    qkv = None if next_attention is None else _packed(next_attention.qkv)
    if out is None or gate_up is None or down is None or (next_attention is not None and qkv is None):
        return None
    assert feeds.before is not None and feeds.next_norm is not None
    return Links(
        out=out, gate_up=gate_up, down=down, following=qkv, post_attention_norm=attends.after,
        pre_mlp_norm=feeds.before, post_mlp_norm=feeds.after, next_norm=feeds.next_norm, scalar=feeds.scalar,
        eps=feeds.following.eps, gelu=is_gelu(mlp.described.activation),
    )  # fmt: skip


def _packed(linear: Linear) -> PackedWeight | None:
    """Its weight, where that is packed and there is no bias."""
    return linear.weight if isinstance(linear.weight, PackedWeight) and linear.bias is None else None
