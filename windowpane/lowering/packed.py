"""Quantized weights on any device: dequantised exactly, a tile at a time, and never as a whole.

`PackedWeight` holds what `windowpane.models.packing` describes. A decoder treats it as it treats a tensor [outputs,
inputs]: `len`, `shape`, slices of outputs, `stack` for projections of one input, and `product`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from windowpane.lowering.strips import MOST_PARTS, StripWeight
from windowpane.models.packing import (
    BLOCK_INPUTS,
    BLOCK_UNITS,
    MIDDLE_OF_INT4,
    MXFP4_BITS,
    MXFP4_GROUP_INPUTS,
    MXFP4_ONE,
    VALUES_PER_UNIT,
    PackedForm,
)

# What a product expands at once: 16 MiB in float32.
TILE_VALUES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The tensors of a `PackedForm`. `inputs` is what the weight takes, without the padding of its last block.

    `order`: column j of the units is input order[j]. None where columns are in order.
    """

    kind: str
    inputs: int
    group_inputs: int | None
    scale_outputs: int
    units: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def empty(cls, form: PackedForm, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Room for a weight that is computed with in `dtype`."""
        parts = {
            name: torch.empty(shape, dtype=getattr(torch, kind), device=device)
            for name, (shape, kind) in form.parts(str(dtype).removeprefix("torch.")).items()
        }
        return cls(form.kind, form.inputs, form.group_inputs, form.scale_outputs, **parts)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, outputs: slice) -> PackedWeight:
        """Some consecutive outputs, as views."""
        start, stop, step = outputs.indices(len(self))
        if step != 1:
            raise IndexError("quantized weights are cut into consecutive outputs")
        if start % self.scale_outputs or (stop % self.scale_outputs and stop != len(self)):
            return self._with_own_scales()[start:stop]
        of_scales = slice(start // self.scale_outputs, -(-stop // self.scale_outputs))
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(self, units=self.units[start:stop], scales=self.scales[of_scales], zeros=zeros)

    def some_inputs(self, inputs: range) -> PackedWeight:
        """Some consecutive inputs: whole groups."""
        if self.order is not None or any(edge % (self.group_inputs or 1) for edge in (inputs.start, inputs.stop)):
            raise IndexError(f"inputs {inputs.start} to {inputs.stop} cut through groups of {self.group_inputs}")
        groups = slice(None)
        if self.group_inputs is not None:
            groups = slice(inputs.start // self.group_inputs, inputs.stop // self.group_inputs)
        return self._with_columns(torch.arange(inputs.start, inputs.stop, device=self.device), groups)

    def copy(self) -> PackedWeight:
        """In memory of its own: a part no longer keeps the whole."""
        zeros, order = (None if t is None else t.clone() for t in (self.zeros, self.order))
        return replace(self, units=self.units.clone(), scales=self.scales.clone(), zeros=zeros, order=order)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.units), self.inputs

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.units, self.scales, self.zeros, self.order) if t is not None)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole matrix in `dtype`: for tests, and for weights that are small."""
        return self.restore_order(torch.cat([tile for _, tile in self.tiles(dtype)]))

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """A few outputs at a time [outputs, inputs], their columns in the order of the units."""
        for outputs in self._tiles():
            yield outputs, self[outputs]._values().to(dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, inputs] · weightᵀ + bias."""
        x = self.in_order(x)
        out = x.new_empty(len(x), len(self))
        for outputs, tile in self.tiles(x.dtype):
            torch.mm(x, tile.t(), out=out[:, outputs])
        return out if bias is None else out + bias

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs as the units take them."""
        return x if self.order is None else x.index_select(-1, self.order)

    def restore_order(self, columns: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return columns
        out = torch.empty_like(columns)
        out[:, self.order.long()] = columns
        return out

    def permute_outputs(self, order: torch.Tensor) -> PackedWeight:
        """Output j of the result is output order[j] of this."""
        own = self._with_own_scales()
        zeros = None if own.zeros is None else own.zeros[order]
        return replace(own, units=own.units[order], scales=own.scales[order], zeros=zeros)

    def permute_inputs(self, order: torch.Tensor) -> PackedWeight:
        """A weight for inputs that come in another order: its input j is input order[j] of this one.

        Where groups move whole, they are moved. Otherwise inputs are put back in order before every product.
        """
        if self.order is None and (groups := self._moved_groups(order)) is not None:
            return self._with_columns(order, groups)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return replace(self, order=(back if self.order is None else back[self.order.long()]).to(torch.int32))

    def _with_columns(self, columns: torch.Tensor, groups: torch.Tensor | slice) -> PackedWeight:
        """These columns of the units, whose groups are these."""
        units = self.units.new_empty(len(self), -(-len(columns) // BLOCK_INPUTS) * BLOCK_UNITS)
        for tile in self._tiles():
            units[tile] = pack_units(unpack_units(self.units[tile], self.kind)[:, columns], self.kind)
        zeros = self.zeros
        if zeros is not None:
            zeros = pack_zeros(unpack_zeros(zeros, self.scales.shape[1])[:, groups])
        scales = self.scales[:, groups]
        if self.kind == "mxfp4":
            scales = _whole_words(scales)
        return replace(self, inputs=len(columns), units=units, scales=scales, zeros=zeros)

    def _moved_groups(self, order: torch.Tensor) -> torch.Tensor | None:
        """The order of groups that `order` comes to, or None where it takes one apart."""
        if self.group_inputs is None:
            return torch.zeros(1, dtype=torch.int64, device=order.device)
        if self.inputs % self.group_inputs:
            return None
        runs = order.view(-1, self.group_inputs)
        group = runs[:, :1] // self.group_inputs
        whole = group * self.group_inputs + torch.arange(self.group_inputs, device=order.device)
        return group[:, 0] if torch.equal(runs, whole) else None

    def _with_own_scales(self) -> PackedWeight:
        """Every output with scales of its own."""
        if self.scale_outputs == 1:
            return self
        scales = self.scales.repeat_interleave(self.scale_outputs, 0)[: len(self)]
        return replace(self, scales=scales.contiguous(), scale_outputs=1)

    def _tiles(self) -> list[slice]:
        at_once = max(1, TILE_VALUES // self.inputs)
        return [slice(start, min(start + at_once, len(self))) for start in range(0, len(self), at_once)]

    def _values(self) -> torch.Tensor:
        """float32 [outputs, inputs] in the order of the units."""
        part = self._with_own_scales()
        groups = part.scales.shape[1]
        # Every 32 columns are of one group.
        group_of = torch.arange(part.units.shape[1] // BLOCK_UNITS * VALUES_PER_UNIT, device=part.device)
        group_of = (group_of * BLOCK_UNITS // (part.group_inputs or max(1, part.inputs))).clamp(max=groups - 1)
        spans = unpack_units(part.units, part.kind).view(len(part), -1, BLOCK_UNITS)
        scales = part.scales.float()[:, group_of, None]
        if part.kind == "fp8":
            values: torch.Tensor = spans.view(torch.float8_e4m3fn).float() * scales
        elif part.kind == "mxfp4":
            values = e2m1_values(spans) * torch.exp2(scales - MXFP4_ONE)
        elif part.zeros is None:
            values = (spans.float() - MIDDLE_OF_INT4) * scales
        else:
            zeros = unpack_zeros(part.zeros, groups)[:, group_of, None]
            values = (spans.float() - zeros.float()) * scales
        return values.reshape(len(part), -1)[:, : part.inputs]


_Single = torch.Tensor | PackedWeight | StripWeight


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Projections of one input that are not held alike (some left unquantized, say), one after another."""

    parts: tuple[_Single, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, outputs: slice) -> Weight:
        start, stop, _ = outputs.indices(len(self))
        found: list[_Single] = []
        first = 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                found.append(part[low:high])
            first += len(part)
        return found[0] if len(found) == 1 else JoinedWeight(tuple(found))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Weight = torch.Tensor | PackedWeight | StripWeight | JoinedWeight


def strips_of(weight: Weight) -> tuple[StripWeight, ...]:
    """The parts of a weight that is all strips of inputs in order, few enough for one product; else nothing."""
    parts = weight.parts if isinstance(weight, JoinedWeight) else (weight,)
    found = tuple(part for part in parts if isinstance(part, StripWeight) and part.order is None)
    return found if len(found) == len(parts) <= MOST_PARTS else ()


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias, however the weight is held."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, PackedWeight | StripWeight):
        return weight.linear(x, bias)
    out = torch.cat([product(x, part) for part in weight.parts], dim=-1)
    return out if bias is None else out + bias


def stack(weights: Sequence[_Single]) -> Weight:
    """One weight for projections of one input, one above the other."""
    if len(weights) == 1:
        return weights[0]
    plain = [w for w in weights if isinstance(w, torch.Tensor)]
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    if len(plain) == len(weights):
        return torch.cat(plain)
    if len(packed) < len(weights) or not _alike(packed):
        return JoinedWeight(tuple(weights))
    if len({w.scale_outputs for w in packed}) > 1 or any(len(w) % w.scale_outputs for w in packed[:-1]):
        packed = [w._with_own_scales() for w in packed]
    first = packed[0]
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in packed if w.zeros is not None])
    return replace(
        first, units=torch.cat([w.units for w in packed]), scales=torch.cat([w.scales for w in packed]), zeros=zeros
    )


def stack_in_experts(weights: Sequence[_Single], experts: int) -> Weight:
    """As `stack`, for weights [experts × outputs, inputs]: one above the other within each expert. Strips stay where
    they are, joined, beside each other or what a file has in float32.
    """
    if len(weights) == 1:
        return weights[0]
    if any(isinstance(weight, StripWeight) for weight in weights):
        return JoinedWeight(tuple(weights))

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.view(experts, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)

    plain = [w for w in weights if isinstance(w, torch.Tensor)]
    if len(plain) == len(weights):
        return join(plain)
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    assert len(packed) == len(weights) and _alike(packed), "gate and up of experts are stored in one way"
    if len({w.scale_outputs for w in packed}) > 1:
        packed = [w._with_own_scales() for w in packed]
    zeros = [w.zeros for w in packed if w.zeros is not None]
    return replace(
        packed[0],
        units=join([w.units for w in packed]),
        scales=join([w.scales for w in packed]),
        zeros=join(zeros) if zeros else None,
    )


def permute_outputs(weight: Weight, order: torch.Tensor) -> Weight:
    """Every `len(order)` outputs in this order: heads, each of whose dims move alike."""
    if isinstance(weight, JoinedWeight):
        # Heads are not cut between parts, so that each part permutes by itself. Parts are single weights.
        return JoinedWeight(tuple(permute_outputs(part, order) for part in weight.parts))  # type: ignore[misc]
    index = _in_every_head(order, len(weight))
    return weight[index] if isinstance(weight, torch.Tensor) else weight.permute_outputs(index)


def permute_inputs(weight: Weight, order: torch.Tensor) -> Weight:
    """As `permute_outputs`, for every `len(order)` inputs."""
    if isinstance(weight, JoinedWeight):
        return JoinedWeight(tuple(permute_inputs(part, order) for part in weight.parts))  # type: ignore[misc]
    index = _in_every_head(order, weight.shape[1])
    return weight[:, index] if isinstance(weight, torch.Tensor) else weight.permute_inputs(index)


def _in_every_head(order: torch.Tensor, length: int) -> torch.Tensor:
    return (torch.arange(0, length, len(order), device=order.device)[:, None] + order).flatten()


def _alike(packed: list[PackedWeight]) -> bool:
    """Whether these differ in nothing but outputs, and how many of them share a scale."""
    first = packed[0]
    described = {(w.kind, w.inputs, w.group_inputs, w.zeros is None, w.order is None) for w in packed}
    if len(described) > 1:
        return False
    return first.order is None or all(torch.equal(w.order, first.order) for w in packed if w.order is not None)


# -- units and zero points -----------------------------------------------------------------------------------------


def pack_units(values: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [outputs, inputs] (0 to 15, codes of E2M1, or the bytes of fp8) as units; inputs are padded with zeros."""
    padding = -values.shape[1] % BLOCK_INPUTS
    spans = F.pad(values, (0, padding)).reshape(len(values), -1, VALUES_PER_UNIT, BLOCK_UNITS)
    if kind == "mxfp4":
        return _units_of_codes(spans).reshape(len(values), -1)
    if kind != "fp8":
        spans = spans[:, :, 0::2] | spans[:, :, 1::2] << 4  # two values to a byte
    unit = torch.int32 if kind == "fp8" else torch.int16
    return spans.transpose(2, 3).contiguous().view(unit).reshape(len(values), -1)


def unpack_units(units: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [outputs, inputs and padding]."""
    blocks = units.shape[1] // BLOCK_UNITS
    if kind == "mxfp4":
        return _codes_of_units(units.view(len(units), blocks, BLOCK_UNITS)).reshape(len(units), -1)
    found: torch.Tensor = units.contiguous().view(torch.uint8).view(len(units), blocks, BLOCK_UNITS, -1).transpose(2, 3)
    if units.dtype == torch.int16:
        found = torch.stack([found & 15, found >> 4], dim=3)
    return found.reshape(len(units), -1)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, groups], 0 to 15, as words of eight."""
    padded = F.pad(zeros, (0, -zeros.shape[1] % 8)).contiguous()  # some schemes store them the other way around
    return (padded[:, 0::2] | padded[:, 1::2] << 4).view(torch.int32)


def unpack_zeros(packed: torch.Tensor, groups: int) -> torch.Tensor:
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, :groups]


# -- MXFP4 ---------------------------------------------------------------------------------------------------------


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """One weight of what checkpoints store: uint8 `blocks` [..., outputs, groups, 16], `scales` [..., outputs, groups].

    Byte j of a block holds inputs 2j (its low half) and 2j + 1 of 32. Leading axes (experts) become further outputs.
    """
    groups = scales.shape[-1]
    if blocks.shape != (*scales.shape, MXFP4_GROUP_INPUTS // 2):
        raise ValueError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not of one mxfp4 weight")
    blocks, scales = blocks.reshape(-1, groups, MXFP4_GROUP_INPUTS // 2), scales.reshape(-1, groups)
    inputs = groups * MXFP4_GROUP_INPUTS
    units = torch.empty(len(blocks), -(-inputs // BLOCK_INPUTS) * BLOCK_UNITS, dtype=torch.int16, device=blocks.device)
    at_once = max(1, TILE_VALUES // inputs)
    for start in range(0, len(blocks), at_once):
        tile = blocks[start : start + at_once]
        codes = torch.stack([tile & 15, tile >> 4], dim=-1).view(len(tile), inputs)
        units[start : start + at_once] = pack_units(codes, "mxfp4")
    return PackedWeight("mxfp4", inputs, MXFP4_GROUP_INPUTS, 1, units, _whole_words(scales))


def _units_of_codes(spans: torch.Tensor) -> torch.Tensor:
    """int16 [outputs, blocks, 32] of uint8 codes [outputs, blocks, 4, 32]."""
    units = torch.zeros(len(spans), spans.shape[1], BLOCK_UNITS, dtype=torch.int32, device=spans.device)
    for span, (sign, magnitude) in enumerate(MXFP4_BITS):
        code = spans[:, :, span].int()
        for bit, place in zip((3, 2, 1, 0), (sign, *magnitude), strict=True):
            units |= (code >> bit & 1) << place
    return units.to(torch.int16)


def _codes_of_units(units: torch.Tensor) -> torch.Tensor:
    """What `_units_of_codes` was given."""
    spans = []
    for sign, magnitude in MXFP4_BITS:
        code = torch.zeros_like(units, dtype=torch.uint8)
        for bit, place in zip((3, 2, 1, 0), (sign, *magnitude), strict=True):
            code |= (units >> place & 1).to(torch.uint8) << bit
        spans.append(code)
    return torch.stack(spans, dim=2)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """What uint8 codes 0 to 15 mean, in float32."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat([magnitudes, -magnitudes])[codes.int()]


def _whole_words(scales: torch.Tensor) -> torch.Tensor:
    """Scales of whole blocks, so that those of a block are one aligned word; what is added scales padding."""
    padding = -scales.shape[1] % (BLOCK_INPUTS // MXFP4_GROUP_INPUTS)
    return F.pad(scales, (0, padding), value=MXFP4_ONE).contiguous()
