"""Random weights in real shapes: for measuring without a checkpoint.

The same name and seed give the same tensor on the same kind of device, whatever else is made. A rank makes the whole
tensor and keeps its part, so that all ranks together have what one alone would.
"""

from __future__ import annotations

import hashlib
import math

import torch

from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import MIDDLE_OF_INT4, MXFP4_ONE
from windowpane.models.quantization import Quantization
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import ONLY_RANK, RankPlace, TensorSpec
from windowpane.weights.checkpoint import held_dtype
from windowpane.weights.quantized import held_form

# What transformers initialises Linear and Embedding with, in every family here.
STANDARD_DEVIATION = 0.02

# Standard deviations of -8 … 7, all alike, and of fp8 bytes below 2, all alike.
_DEVIATIONS = {"int4": 4.61, "fp8": 0.6, "mxfp4": 2.95}
# Clears the top bit of the exponent in each byte of a unit: no value is 2 or more, and none is NaN.
_BELOW_TWO = 0xBFBFBFBF - 2**32

# These multiply by 1 + w, so that a neutral norm is stored as 0.
_NORMS_AROUND_ZERO = ("gemma2", "gemma3", "qwen3_next")


def random_tensor(
    tensor: TensorSpec,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    place: RankPlace = ONLY_RANK,
) -> torch.Tensor:
    """One tensor, made on the device. Linear weights lie around 0, norms and scales around what changes nothing."""
    generator = torch.Generator(device=device).manual_seed(_seed(tensor.name, seed))
    out = torch.empty(tensor.shape, dtype=held_dtype(tensor, dtype), device=device)
    if not out.is_floating_point():  # an order, each once
        return torch.arange(len(out), dtype=out.dtype, device=device)
    out.normal_(_mean(tensor, spec.family), STANDARD_DEVIATION, generator=generator)
    cut = tensor.cut(place)
    if cut is None:
        return out
    return torch.cat([out.narrow(cut.axis, some.start, len(some)) for some in cut.ranges], dim=cut.axis)


def random_packed(
    tensor: TensorSpec,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    place: RankPlace = ONLY_RANK,
) -> PackedWeight:
    """One quantized weight, made packed on the device: its values lie around 0 as those of `random_tensor` do."""
    assert isinstance(spec.quantization, Quantization)
    form = held_form(spec.quantization, tensor)
    generator = torch.Generator(device=device).manual_seed(_seed(tensor.name, seed))
    out = PackedWeight.empty(form, dtype, device)
    bits = torch.iinfo(out.units.dtype)
    out.units.random_(bits.min, bits.max, generator=generator)
    if form.kind == "fp8":
        out.units.bitwise_and_(_BELOW_TWO)
    scale = STANDARD_DEVIATION / _DEVIATIONS[form.kind]
    out.scales.fill_(round(math.log2(scale)) + MXFP4_ONE if form.kind == "mxfp4" else scale)
    if out.zeros is not None:
        out.zeros.fill_(MIDDLE_OF_INT4 * 0x11111111 - 2**32)
    if out.order is not None:
        out.order.copy_(torch.arange(form.inputs))
    cut = tensor.cut(place)
    if cut is None:
        return out
    each = len(out) // tensor.shape[0]  # outputs of an expert, where there are some
    parts = [
        out[some.start * each : some.stop * each] if cut.axis == 0 else out.some_inputs(some) for some in cut.ranges
    ]
    (kept,) = parts  # quantized weights are those of one projection
    return kept.copy()


def _mean(tensor: TensorSpec, family: str) -> float:
    if tensor.linear or len(tensor.shape) > 1 or tensor.name.endswith(("bias", "A_log")):
        return 0.0
    gated = ".linear_attn.norm." in tensor.name
    # Qwen's linear-attention layers norm with w itself, beside the 1 + w of its other norms.
    return 0.0 if family in _NORMS_AROUND_ZERO and not gated else 1.0


def _seed(name: str, seed: int) -> int:
    """Python's own hash differs from run to run."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
