"""What the launches of products with quantized weights have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch

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


def processors_of(device: torch.device) -> int:
    """Multiprocessors; a number that shares work out where there are none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def flags_of(device: torch.device) -> torch.Tensor:
    """0 between launches: one set for all products of a device, which run one after the other."""
    found = _FLAGS.get(device)
    if found is None:
        found = torch.zeros(FLAGS, dtype=torch.int32, device=device)
        # What a graph zeroes is not 0 before it has run: others must not rely on it.
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _FLAGS[device] = found
    return found


def as_words(weight: PackedWeight, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Scales, as words where those of a block are one, or a pair of blocks has one."""
    scales, groups = weight.scales, weight.scales.shape[1]
    word = {32: torch.int64, 64: torch.int32, 128: torch.int32}.get(weight.group_inputs or 0)
    if word is None or scales.dtype != dtype or dtype.itemsize != 2 or groups * 2 % word.itemsize:
        return scales, False
    return scales.view(word), True


def stride_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def fixed_by(weight: PackedWeight) -> dict[str, int | bool]:
    """What a weight fixes for a compiled kernel. GROUP 0: one scale for all inputs."""
    group = 0 if weight.scales.shape[1] == 1 else weight.group_inputs or 0
    return {"IS_INT4": weight.kind == "int4", "GROUP": group, "SCALE_OUTPUTS": weight.scale_outputs}
