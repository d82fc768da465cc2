"""What launches have in common, and those of products with quantized weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.unpacking import KINDS
from windowpane.lowering.packed import PackedWeight

# Up to these, warps share the inputs.
SPLIT_ROWS = 16
# By which programs tell each other that sums are there.
FLAGS = 2**16
_FLAGS: dict[torch.device, torch.Tensor] = {}


class Launch(NamedTuple):
    """How a product is shared out.

    `outputs` and `rows` are a program's tile. The warps of a split launch take blocks of inputs in turn, and so many
    `programs` run on a multiprocessor; several `programs` of a tiled one share the inputs of a tile.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def is_split(self) -> bool:
        return self.rows <= SPLIT_ROWS


def flags_of(device: torch.device) -> torch.Tensor:
    """0 between launches: one set for all products of a device, which run one after the other."""
    found = _FLAGS.get(device)
    if found is None:
        found = torch.zeros(FLAGS, dtype=torch.int32, device=device)
        # What a graph zeroes is not 0 before it has run: others must not rely on it.
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _FLAGS[device] = found
    return found


class Operands(NamedTuple):
    """A packed weight as kernels take it: units, scales and zero points, their strides, and what compiles into them.

    GROUP 0: one scale for all inputs. WORDS: scales of a block are one word, or a pair of blocks has one.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    strides: tuple[int, int, int]
    fixed: dict[str, int | bool]

    @classmethod
    def of(cls, weight: PackedWeight, dtype: torch.dtype) -> Operands:
        """For a product in `dtype`."""
        scales, zeros, (_, groups) = weight.scales, weight.zeros, weight.scales.shape
        word = {32: torch.int64, 64: torch.int32, 128: torch.int32}.get(weight.group_inputs or 0)
        in_words = word is not None and scales.dtype == dtype and dtype.itemsize == 2 and not groups * 2 % word.itemsize
        if weight.kind == "mxfp4":
            word, in_words = torch.int32, True
        if word is not None and in_words:
            scales = scales.view(word)
        fixed = {
            "KIND": KINDS[weight.kind], "GROUP": 0 if groups == 1 else weight.group_inputs or 0,
            "SCALE_OUTPUTS": weight.scale_outputs, "IS_WHOLE": weight.inputs % 128 == 0, "WORDS": in_words,
            "USES_ASM": scales.device.type == "cuda" and dtype.itemsize == 2,
        }  # fmt: skip
        strides = weight.units.stride(0), scales.stride(0), 0 if zeros is None else zeros.stride(0)
        return cls((weight.units, scales, zeros), strides, fixed)


@triton.jit
def wait_if_overlapped(PDL: tl.constexpr):
    """Let the next launch begin, and wait for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
