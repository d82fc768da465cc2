"""Which adapters rows have, as kernels read it: tables on the device, made on the host with the rest of a step; and
experts with adapters, whose products are taken apart for them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from windowpane.device.transfer import Transfer
from windowpane.kv.retention import ceil_div
from windowpane.lowering.adapters import LinearAdapter
from windowpane.lowering.gpu.kernels.adapters import TILE_OUTPUTS, RowTiles, expand, shrink
from windowpane.lowering.gpu.kernels.experts import plan_grouped
from windowpane.lowering.gpu.kernels.experts_activation import NO_ACTIVATION
from windowpane.lowering.gpu.kernels.experts_grouped import add_pairs, grouped_product
from windowpane.lowering.gpu.kernels.experts_sorted import sort_pairs
from windowpane.lowering.linear import ExpertLinear
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.ops import ACTIVATIONS, UNGATED
from windowpane.lowering.reference.routing import Routing
from windowpane.models.blocks import Experts

FEW_ROWS, TILE_ROWS, MANY_TILE_ROWS = 1024, 16, 64  # up to so many rows, smaller tiles


def tile_rows(rows: int) -> int:
    return TILE_ROWS if rows <= FEW_ROWS else MANY_TILE_ROWS


def most_tiles(rows: int, slots: int) -> int:
    """Every adapter has at most one tile that is not full."""
    return min(rows, rows // tile_rows(rows) + slots)


def host_tables(indices: NDArray[np.int32], rows: int, tiles: int) -> NDArray[np.int32]:
    """[indices of `rows` rows | rows by adapter | tiles], as `DeviceRows.of` reads it; `indices` may be fewer."""
    table = np.zeros(2 * rows + 3 * tiles, dtype=np.int32)
    table[: len(indices)] = indices
    order = np.argsort(indices, kind="stable")[np.count_nonzero(indices == 0) :]
    table[rows : rows + len(order)] = order
    by_adapter, at_once, made = indices[order], tile_rows(rows), []
    starts = np.flatnonzero(np.diff(by_adapter, prepend=0)) if len(order) else np.zeros(0, dtype=np.int64)
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        for first in range(start, stop, at_once):
            made.append((int(by_adapter[start]) - 1, first, min(at_once, stop - first)))
    table[2 * rows : 2 * rows + 3 * len(made)] = np.array(made, dtype=np.int32).reshape(-1)
    return table


class DeviceRows:
    """`wanted` are those of the rows that go on, where fewer do."""

    def __init__(
        self, indices: torch.Tensor, by_adapter: RowTiles, *, pdl: bool, wanted: DeviceRows | None = None
    ) -> None:
        self.indices, self.by_adapter, self.pdl, self._wanted = indices, by_adapter, pdl, wanted

    @classmethod
    def of(
        cls, table: torch.Tensor, rows: int, tiles: int, *, pdl: bool, wanted: DeviceRows | None = None
    ) -> DeviceRows:
        """From what `host_tables` made."""
        indices, order, of_tiles = torch.split(table, [rows, rows, 3 * tiles])
        return cls(indices, RowTiles(order, of_tiles.view(-1, 3), tile_rows(rows)), pdl=pdl, wanted=wanted)

    def narrow(self, wanted: torch.Tensor) -> DeviceRows:
        assert self._wanted is not None and len(wanted) == len(self._wanted.indices)
        return self._wanted

    def add(self, adapter: LinearAdapter, x: torch.Tensor, out: torch.Tensor) -> None:
        assert len(x) == len(self.indices), f"{len(x)} rows, of which {len(self.indices)} are known"
        add_by(adapter, self.by_adapter, self.by_adapter, x, out, pdl=self.pdl)


class AdapterTables:
    """Brings the adapters of steps to the device: with a step's transfer, or to a fixed place that graphs read."""

    def __init__(self, slots: int, most_rows: int, device: torch.device, *, pdl: bool) -> None:
        self._slots, self._pdl = slots, pdl
        self._fixed = torch.zeros(
            2 * most_rows + 3 * (most_rows // TILE_ROWS + slots), dtype=torch.int32, device=device
        )

    def decoding(self, rows: int) -> DeviceRows:
        """Those of steps of so many decoding rows, at the fixed place."""
        tiles = most_tiles(rows, self._slots)
        return DeviceRows.of(self._fixed[: 2 * rows + 3 * tiles], rows, tiles, pdl=self._pdl)

    def add_decoding(
        self, indices: NDArray[np.int32], rows: int, transfer: Transfer
    ) -> Callable[[list[torch.Tensor]], None]:
        """Puts the tables of a step padded to so many rows on the transfer; what is returned brings them there."""
        at = transfer.add(host_tables(indices, rows, most_tiles(rows, self._slots)))

        def bring(sent: list[torch.Tensor]) -> None:
            self._fixed[: len(sent[at])].copy_(sent[at])

        return bring

    def add(
        self, indices: NDArray[np.int32], wanted: NDArray[np.int64], transfer: Transfer
    ) -> Callable[[list[torch.Tensor]], DeviceRows]:
        """Puts a step's tables on the transfer; what is returned finds them in what was sent."""
        sizes = [(len(some), most_tiles(len(some), self._slots)) for some in (indices, wanted)]
        every, some = (
            transfer.add(host_tables(own, *size)) for own, size in zip((indices, indices[wanted]), sizes, strict=True)
        )

        def find(sent: list[torch.Tensor]) -> DeviceRows:
            narrowed = DeviceRows.of(sent[some], *sizes[1], pdl=self._pdl)
            return DeviceRows.of(sent[every], *sizes[0], pdl=self._pdl, wanted=narrowed)

        return find


def add_by(
    adapter: LinearAdapter, reads: RowTiles, writes: RowTiles, x: torch.Tensor, out: torch.Tensor, *, pdl: bool
) -> None:
    """out += B · A · x; the rows that are read may be others than those that are written."""
    shrunk = shrink(x, adapter.held.a, reads, pdl=pdl)
    expand(shrunk, adapter.b, section_tiles(adapter), writes, out, pdl=pdl)


def section_tiles(adapter: LinearAdapter) -> torch.Tensor:
    """See `expand`. Made once: graphs go on reading it."""
    held, key = adapter.held, (adapter.first, len(adapter.order))
    if key not in held.tables:
        tiles = [
            (start, min(start + TILE_OUTPUTS, section.stop), section.part)
            for section in adapter.sections
            for start in range(section.start, section.stop, TILE_OUTPUTS)
        ]
        held.tables[key] = torch.tensor(tiles, dtype=torch.int32).to(held.a.device)
    return held.tables[key]


def run_adapted_experts(
    x: torch.Tensor, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, described: Experts, first: int,
    rows: DeviceRows,
) -> torch.Tensor:  # fmt: skip
    """As `run_experts`, with what adapters add to each product: pairs of a row and an expert are rows of their own."""
    (count, chosen), local = routing.ids.shape, gate_up.experts
    pairs = count * chosen
    block = min(128, max(16, 1 << (ceil_div(pairs, local) - 1).bit_length()))
    by_expert = sort_pairs(routing, first, local, block, pdl=False)
    # Beyond this rank's own pairs nothing was written.
    order = by_expert.pairs.long().clamp(0, pairs - 1)
    expert = routing.ids.flatten().long() - first
    index = rows.indices[:, None].expand(-1, chosen).flatten().long()
    here = (expert >= 0) & (expert < local) & (index > 0)
    place = (index - 1) * local + expert
    every = torch.arange(pairs, device=x.device, dtype=torch.int32)
    # A tile for each pair: which expert it visits is known on the device alone.
    tiles = torch.stack([place * here, every, here], dim=1).to(torch.int32)
    reads, writes = RowTiles(every // chosen, tiles, TILE_ROWS), RowTiles(every, tiles, TILE_ROWS)
    common = {"local": local, "activation": NO_ACTIVATION.value, "limit": 0.0, "alpha": 0.0, "weighted": False}

    def product(x: torch.Tensor, linear: ExpertLinear, read_x: torch.Tensor, reads: RowTiles) -> torch.Tensor:
        """[pairs, outputs] of `x` by pair; adapters read rows of `read_x`."""
        assert isinstance(linear.weight, torch.Tensor | PackedWeight)
        out = x.new_empty(pairs, linear.outputs)
        launch = plan_grouped(block, linear.weight, x.dtype)
        grouped_product(
            x[order], linear.weight, linear.bias, routing, by_expert, out, launch=launch, pdl=False, **common
        )
        if linear.adapter is not None:
            add_by(linear.adapter, reads, writes, read_x, out, pdl=False)
        return out

    of_pairs = x[:, None].expand(-1, chosen, -1).flatten(0, 1)
    if described.weighs_inputs:
        of_pairs = (of_pairs * routing.shares.flatten()[:, None]).to(x.dtype)
        made = product(of_pairs, gate_up, of_pairs, writes)
    else:
        made = product(of_pairs, gate_up, x, reads)
    inner = _activated(made, described)
    results = product(inner, down, inner, writes)
    out = x.new_empty(count, down.outputs)
    add_pairs(results, routing, out, first=first, local=local, weighted=not described.weighs_inputs, pdl=False)
    return out


def _activated(made: torch.Tensor, described: Experts) -> torch.Tensor:
    if described.limit is None and described.activation in UNGATED:
        return UNGATED[described.activation](made)
    gate, up = made.chunk(2, dim=-1)
    if described.limit is None:
        return ACTIVATIONS[described.activation](gate) * up
    gate, up = gate.clamp(max=described.limit), up.clamp(-described.limit, described.limit)
    return gate * F.sigmoid(gate * described.alpha) * (up + 1)
