"""Adapters on a device: stacked A and B of every projection, and which of them each row of a step has.

A slot holds one adapter at a time; rows name slots from 1 on, and 0 is none. A projection's result is computed as ever,
and what its rows' adapters make is added to it. Where no row of a step has an adapter, nothing is done at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.models.adapters import Adaptable, AdapterRoom, AdapterShape, adaptable, adapter_name
from windowpane.models.blocks import Decoder


class Pair(NamedTuple):
    """A [rank, inputs] and B [outputs, rank] of one weight, the scale in B, in the checkpoint's order of both."""

    a: torch.Tensor
    b: torch.Tensor


# Of one projection: by expert and part, None where the adapter leaves that weight as it is.
PartPairs = Sequence[Sequence[Pair | None]]


class Section(NamedTuple):
    """Outputs [start, stop) come from one part."""

    start: int
    stop: int
    part: int


class AdapterRows(Protocol):
    """Which adapter each row of the step at hand has."""

    def add(self, adapter: LinearAdapter, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += B · A · x for every row by its own adapter."""

    def narrow(self, wanted: torch.Tensor) -> AdapterRows:
        """Those of the wanted rows."""


class HeldAdapters:
    """A and B of one projection for all slots: `a` is [slots × experts, parts, rank, inputs], `b` [slots × experts,
    outputs, rank].

    `order` and `columns` say which output and which input of the checkpoint lies where: those of the Linear that was
    made last of the projection.
    """

    def __init__(self, shape: AdapterShape, room: AdapterRoom, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        rows = room.slots * shape.experts
        self.a = torch.zeros(rows, len(shape.part_outputs), room.rank, shape.inputs, dtype=dtype, device=device)
        self.b = torch.zeros(rows, shape.outputs, room.rank, dtype=dtype, device=device)
        self.columns = torch.arange(shape.inputs)
        self.tables: dict[tuple[int, int], torch.Tensor] = {}  # a lowering's own, by first output and their number
        self._part_ends = torch.tensor(shape.part_outputs).cumsum(0)
        self._sections: dict[tuple[int, int], list[Section]] = {}
        self.order = torch.arange(shape.outputs)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def reorder(self, order: torch.Tensor) -> None:
        self.order, self._sections, self.tables = order, {}, {}

    def sections(self, first: int, stop: int) -> list[Section]:
        """Of outputs [first, stop), counted from the first of them."""
        if (first, stop) not in self._sections:
            parts = torch.bucketize(self.order[first:stop], self._part_ends, right=True)
            found, counts = torch.unique_consecutive(parts, return_counts=True)
            ends = counts.cumsum(0).tolist()
            starts = [0, *ends[:-1]]
            of_parts = zip(starts, ends, found.tolist(), strict=True)
            self._sections[first, stop] = [Section(*section) for section in of_parts]
        return self._sections[first, stop]

    def arranged(self, pairs: PartPairs) -> Pair:
        """One adapter as it lies in a slot, on the host."""
        shape = self.shape
        a = torch.zeros(shape.experts, *self.a.shape[1:], dtype=self.a.dtype)
        b = torch.zeros(shape.experts, *self.b.shape[1:], dtype=self.b.dtype)
        for expert, parts in enumerate(pairs):
            first = 0
            for part, (outputs, pair) in enumerate(zip(shape.part_outputs, parts, strict=True)):
                if pair is not None:
                    rank = len(pair.a)
                    a[expert, part, :rank] = pair.a[:, self.columns].to(a.dtype)
                    b[expert, first : first + outputs, :rank] = pair.b.to(b.dtype)
                first += outputs
        return Pair(a, b[:, self.order])

    def place(self, slot: int, pair: Pair | None) -> None:
        """Fill a slot, counted from 0."""
        rows = slice(slot * self.shape.experts, (slot + 1) * self.shape.experts)
        for held, given in ((self.a, pair and pair.a), (self.b, pair and pair.b)):
            if given is None:
                held[rows].zero_()
            else:
                held[rows].copy_(given, non_blocking=True)


class Adapters:
    """Those of a model on one rank. `rows` are set for each step; None where none of its rows has an adapter."""

    def __init__(self, decoder: Decoder, room: AdapterRoom, dtype: torch.dtype, device: torch.device) -> None:
        self.room = room
        self.rows: AdapterRows | None = None
        self.held: dict[str, HeldAdapters] = {}
        for projection in adaptable(decoder, room):
            self.held[adapter_name(projection)] = HeldAdapters(AdapterShape.of(projection), room, dtype, device)
        self.known: dict[int, dict[str, Pair]] = {}  # by number, on the host

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held.values())

    def of(self, projection: Adaptable) -> LinearAdapter | None:
        """What is added to a projection, None where there is no room for that."""
        held = self.held.get(adapter_name(projection))
        return None if held is None else LinearAdapter(self, held, held.order, held.columns)

    def narrow(self, wanted: torch.Tensor) -> None:
        """From here on only these rows of the step go on."""
        self.rows = None if self.rows is None else self.rows.narrow(wanted)

    def arranged(self, pairs: Mapping[str, PartPairs]) -> dict[str, Pair]:
        """An adapter as slots take it, on the host. Reads only what never changes: any thread may ask."""
        return {name: self.held[name].arranged(of_experts) for name, of_experts in pairs.items()}

    def know(self, number: int, arranged: dict[str, Pair]) -> None:
        """Keep an adapter on the host, from where slots are filled."""
        self.known[number] = arranged

    def forget(self, number: int) -> None:
        self.known.pop(number, None)

    def before_step(self, placed: Iterable[tuple[int, int]]) -> None:
        """Put known adapters into slots: (slot from 1 on, number) each."""
        for index, number in placed:
            known = self.known[number]
            for name, held in self.held.items():
                held.place(index - 1, known.get(name))


@dataclass(frozen=True, slots=True, eq=False)
class LinearAdapter:
    """What is added to the outputs of one Linear, which may be some of a projection's or have another order.

    `order` has the checkpoint's place of each output and `columns` of each input; `first` is where the outputs begin
    among those held. `expert` counts from 0; `rows` are those of some rows alone, in place of the step's.
    """

    adapters: Adapters
    held: HeldAdapters
    order: torch.Tensor
    columns: torch.Tensor
    first: int = 0
    expert: int = 0
    rows: AdapterRows | None = field(default=None, repr=False)

    @property
    def is_active(self) -> bool:
        return self.adapters.rows is not None

    @property
    def sections(self) -> list[Section]:
        return self.held.sections(self.first, self.first + len(self.order))

    @property
    def b(self) -> torch.Tensor:
        """[slots × experts, outputs, rank], those of this Linear."""
        return self.held.b[:, self.first : self.first + len(self.order)]

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += B · A · x, row by row, in place."""
        rows = self.rows or self.adapters.rows
        if rows is not None and len(x):
            rows.add(self, x, out)

    def __getitem__(self, outputs: slice) -> LinearAdapter:
        start, stop, _ = outputs.indices(len(self.order))
        return replace(self, order=self.order[start:stop], first=self.first + start)

    def of_expert(self, expert: int, rows: torch.Tensor) -> LinearAdapter:
        """One expert's, for some rows of the step."""
        step = self.adapters.rows
        return replace(self, expert=expert, rows=None if step is None else step.narrow(rows))

    def with_outputs_permuted(self, order: torch.Tensor) -> LinearAdapter:
        return self._reordered(self.order.view(-1, len(order))[:, order.cpu()].flatten())

    def with_inputs_permuted(self, order: torch.Tensor) -> LinearAdapter:
        self.held.columns = self.columns.view(-1, len(order))[:, order.cpu()].flatten()
        return replace(self, columns=self.held.columns)

    def joined(self, others: Sequence[LinearAdapter]) -> LinearAdapter:
        return replace(self._reordered(torch.cat([self.order, *(other.order for other in others)])), first=0)

    def _reordered(self, order: torch.Tensor) -> LinearAdapter:
        if len(order) == self.held.shape.outputs:
            self.held.reorder(order)
        return replace(self, order=order)


class PlainRows:
    """In plain torch, adapter by adapter: each multiplies the rows that have it."""

    def __init__(self, indices: torch.Tensor) -> None:
        self._indices = indices  # on the host
        self._groups: list[tuple[int, torch.Tensor]] = []
        for index in sorted(set(indices.tolist()) - {0}):
            self._groups.append((index - 1, (indices == index).nonzero().flatten()))

    @classmethod
    def of_step(cls, indices: NDArray[np.int32]) -> PlainRows | None:
        """None for a step without adapters."""
        return cls(torch.from_numpy(indices)) if indices.any() else None

    def narrow(self, wanted: torch.Tensor) -> PlainRows:
        return PlainRows(self._indices[wanted.cpu()])

    def add(self, adapter: LinearAdapter, x: torch.Tensor, out: torch.Tensor) -> None:
        held, b = adapter.held, adapter.b
        assert len(x) == len(self._indices), f"{len(x)} rows, of which {len(self._indices)} are known"
        for slot, rows in self._groups:
            rows = rows.to(x.device)
            at, some = slot * held.shape.experts + adapter.expert, x[rows]
            shrunk = {part: some @ held.a[at, part].T for part in {section.part for section in adapter.sections}}
            made = [shrunk[s.part] @ b[at, s.start : s.stop].T for s in adapter.sections]
            out.index_add_(0, rows, torch.cat(made, dim=1).to(out.dtype))
