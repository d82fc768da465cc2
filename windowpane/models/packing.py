"""How quantized weights lie in memory, whatever scheme their checkpoint has. Torch-free: the plan reads this.

A weight [outputs, inputs] is cut along its inputs into blocks of 128, the last one padded. A block of one output is 32
units, and unit j holds the values of inputs j, 32 + j, 64 + j and 96 + j, the first in its lowest bits:

    int4   unit: 16 bits    0-3: j    4-7: 32 + j     8-11: 64 + j     12-15: 96 + j
    mxfp4  unit: 16 bits, of E2M1 codes, whose bits lie as MXFP4_BITS says: a sign and the magnitude 0, 0.5, 1, 1.5, 2,
           3, 4 or 6. After at most one shift the first three lie where bfloat16 has its sign and the end of its
           exponent, so that one mask and one product with a power of two make them numbers.
    fp8    unit: 32 bits    0-7: j    8-15: 32 + j    16-23: 64 + j    24-31: 96 + j

So a shift and a mask turn a row of units into 32 consecutive inputs, which are of one group: a kernel needs one
scale for them, and reads the inputs themselves in order. Scales of mxfp4 are bytes e that mean 2^(e - 127), one for 32
inputs; those of a block are a 32-bit word.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from windowpane.kv.formats import DTYPE_BYTES
from windowpane.kv.retention import ceil_div

BLOCK_INPUTS = 128
BLOCK_UNITS = 32
VALUES_PER_UNIT = BLOCK_INPUTS // BLOCK_UNITS

HELD_BYTES: dict[str, int] = {**DTYPE_BYTES, "uint8": 1, "int16": 2, "int32": 4}

# What a product of many rows expands at once: slices of a weight, one after another, in the same memory.
DEQUANTIZED_BYTES = 64 * 1024**2

# A zero point of int4 is one of 0 to 15; a symmetric weight stores none and means this one.
MIDDLE_OF_INT4 = 8

# Inputs that share a scale of mxfp4, and what scale byte means 1.
MXFP4_GROUP_INPUTS = 32
MXFP4_ONE = 127
# Where a unit of mxfp4 has the sign and the magnitude, its highest bit first, of each of its values.
MXFP4_BITS = ((15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (10, (14, 13, 11)))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """One weight in memory. `group_inputs` None: one scale for all inputs.

    `scale_outputs` outputs share a scale. `scale_dtype` None is the dtype that is computed in. With `has_order` inputs
    are sorted by group, and the order in which to take them is held too.
    """

    kind: Literal["int4", "mxfp4", "fp8"]
    outputs: int
    inputs: int
    group_inputs: int | None = None
    scale_outputs: int = 1
    has_zeros: bool = False
    has_order: bool = False
    scale_dtype: str | None = None

    @property
    def groups(self) -> int:
        if self.kind == "mxfp4":
            # Whole words, also of the last block.
            return ceil_div(self.inputs, BLOCK_INPUTS) * (BLOCK_INPUTS // MXFP4_GROUP_INPUTS)
        return 1 if self.group_inputs is None else ceil_div(self.inputs, self.group_inputs)

    @property
    def problem(self) -> str | None:
        """Why this weight cannot be held so."""
        if self.kind == "mxfp4" and (self.group_inputs != MXFP4_GROUP_INPUTS or self.has_zeros):
            return f"mxfp4 with a scale for {self.group_inputs} inputs; its scales are for {MXFP4_GROUP_INPUTS}"
        if self.group_inputs is not None and self.group_inputs % BLOCK_UNITS:
            return f"a scale for {self.group_inputs} inputs; group sizes that run are multiples of {BLOCK_UNITS}"
        return None

    def parts(self, compute_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor that is held."""
        units = ceil_div(self.inputs, BLOCK_INPUTS) * BLOCK_UNITS
        parts: dict[str, tuple[tuple[int, ...], str]] = {
            "units": ((self.outputs, units), "int32" if self.kind == "fp8" else "int16"),
            "scales": (
                (ceil_div(self.outputs, self.scale_outputs), self.groups),
                "uint8" if self.kind == "mxfp4" else self.scale_dtype or compute_dtype,
            ),
        }
        if self.has_zeros:
            # Eight to a word, the first group in its lowest bits.
            parts["zeros"] = ((self.outputs, ceil_div(self.groups, 8)), "int32")
        if self.has_order:
            parts["order"] = ((self.inputs,), "int32")
        return parts

    def held_bytes(self, compute_dtype: str) -> int:
        return sum(prod(shape) * HELD_BYTES[dtype] for shape, dtype in self.parts(compute_dtype).values())
