"""A pass: quantized weights of any checkpoint into the strips that compiled kernels multiply with rows in 8 bits.

A weight takes exactly as many bytes in strips, so that the plan counts either way alike. What kernels do not take (some
widths, outputs that would be cut within a strip) stays as it is and is dequantized a tile at a time.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.lowering.linear import Parameters
from windowpane.lowering.packed import JoinedWeight, PackedWeight, Weight
from windowpane.lowering.strips import StripWeight
from windowpane.models.blocks import Decoder, ExpertProjection, GatedDeltaNet, Projection
from windowpane.models.ggml import FP8, INT4, INT4_ZEROS, MXFP4, STRIP_OUTPUTS, StripForm
from windowpane.models.packing import BLOCK_INPUTS

GROUP_INPUTS = 32  # GROUP in packed.h
# Rows in 8 bits with the padding of a block take no more than twice their inputs: kernels have that much room for them.
LEAST_INPUTS = BLOCK_INPUTS // 2


def put_into_strips(decoder: Decoder, parameters: Parameters) -> None:
    cut = _cut_within_strips(decoder)

    def convert(of: Projection | ExpertProjection, weight: Weight, outputs: int) -> Weight:
        return weight if of in cut or outputs % STRIP_OUTPUTS else in_strips(weight)

    parameters.convert_weights(convert)


def _cut_within_strips(decoder: Decoder) -> set[Projection]:
    """Projections of which some outputs are computed alone, and do not begin with a strip."""
    cut = {attention.qkv for attention in decoder.attentions if attention.query_width % STRIP_OUTPUTS}
    for mixer in decoder.state_mixers:
        keys = mixer.key_heads * mixer.key_dim if isinstance(mixer, GatedDeltaNet) else 0
        if mixer.out.inputs % STRIP_OUTPUTS or 2 * keys % STRIP_OUTPUTS:
            cut.add(mixer.inputs)
    return cut


def in_strips(weight: Weight) -> Weight:
    """Its quantized parts in strips, where kernels take them."""
    if isinstance(weight, JoinedWeight):
        if any(len(part) % STRIP_OUTPUTS for part in weight.parts):
            return weight
        return JoinedWeight(tuple(in_strips(part) for part in weight.parts))  # type: ignore[misc]
    form = _form(weight) if isinstance(weight, PackedWeight) else None
    if form is None:
        return weight
    assert isinstance(weight, PackedWeight)
    found = replace(StripWeight.empty(form), order=weight.order)
    found.fill_from_units(weight.units, weight.scales, weight.zeros)
    assert found.nbytes == weight.nbytes, "a weight takes the same bytes in strips"
    return found


def _form(weight: PackedWeight) -> StripForm | None:
    outputs, inputs = weight.shape
    shared = weight.scale_outputs
    if outputs % STRIP_OUTPUTS or inputs % GROUP_INPUTS or inputs < LEAST_INPUTS:
        return None
    if shared > 1 and (weight.kind != "fp8" or shared % STRIP_OUTPUTS):
        return None
    integers = INT4 if weight.zeros is None else INT4_ZEROS
    kind = {"mxfp4": MXFP4, "fp8": FP8, "int4": integers}[weight.kind]
    padded = -(-inputs // BLOCK_INPUTS) * BLOCK_INPUTS
    return StripForm(kind, outputs, inputs, padded, 0 if kind == MXFP4 else weight.group_inputs or inputs, shared)
