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
from windowpane.lowering.gpu.kernels.adapters import (
    ALIGNMENT,
    NO_ADAPTER,
    NO_ROW,
    TILE_OUTPUTS,
    UNUSED,
    RowTiles,
    adapted_gated,
    empty_shrunk,
    expand,
    shrink,
)
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
    """Every adapter, and rows without one, have at most one tile that is not full."""
    return min(rows, rows // tile_rows(rows) + slots + 1)


def table_length(rows: int, slots: int) -> int:
    return rows + most_tiles(rows, slots) * (1 + tile_rows(rows))


def host_tables(indices: NDArray[np.int32], rows: int, slots: int) -> NDArray[np.int32]:
    """[indices of `rows` rows | places of tiles | their rows], as `DeviceRows` reads it; `indices` may be fewer."""
    table = np.empty(table_length(rows, slots), dtype=np.int32)
    tiles, at_once = most_tiles(rows, slots), tile_rows(rows)
    of_rows, places, of_tiles = np.split(table, [rows, rows + tiles])
    of_rows[: len(indices)], of_rows[len(indices) :] = indices, 0
    order, counts = np.argsort(of_rows, kind="stable"), np.bincount(of_rows)
    own_tiles = -(-counts // at_once)
    places.fill(UNUSED)
    made = np.repeat(np.arange(len(counts)) + NO_ADAPTER, own_tiles)
    places[: len(made)] = made
    of_tiles.fill(NO_ROW)
    # A row is as far behind the first of its adapter's tiles as it is behind the first of its adapter's rows.
    skipped = np.cumsum(own_tiles * at_once - counts) - (own_tiles * at_once - counts)
    of_tiles[np.arange(rows) + skipped[of_rows[order]]] = order
    return table


class DeviceRows:
    """`wanted` are those of the rows that go on, where fewer do."""

    def __init__(
        self, table: torch.Tensor, rows: int, slots: int, *, pdl: bool, wanted: DeviceRows | None = None
    ) -> None:
        """From what `host_tables` made."""
        tiles, at_once = most_tiles(rows, slots), tile_rows(rows)
        self.indices, places, of_tiles = torch.split(table, [rows, tiles, tiles * at_once])
        self.by_adapter = RowTiles(places, of_tiles.view(tiles, at_once))
        self._pdl, self._wanted = pdl, wanted

    def narrow(self, wanted: torch.Tensor) -> DeviceRows:
        assert self._wanted is not None and len(wanted) == len(self._wanted.indices)
        return self._wanted

    def add(self, adapter: LinearAdapter, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += B · A · x"""
        add_expanded(adapter, self._shrunk(adapter, x), self.by_adapter, out, pdl=self._pdl)

    def gate(
        self, adapter: LinearAdapter, x: torch.Tensor, made: torch.Tensor, out: torch.Tensor, activation: str
    ) -> None:
        """out = activation(gate) × up, both with what is added to them; they are halves of `made`'s columns."""
        sections = adapter.sections
        assert len(sections) <= 2 and sections[-1].start in (0, out.shape[1]), "gates lie in front of what they gate"
        adapted_gated(
            made, self._shrunk(adapter, x), adapter.b, (sections[0].part, sections[-1].part), self.by_adapter, out,
            activation, pdl=self._pdl,
        )  # fmt: skip

    def _shrunk(self, adapter: LinearAdapter, x: torch.Tensor) -> torch.Tensor:
        """A · x. Its launch overlaps the one before it, so it belongs behind the product that it adds to."""
        assert len(x) == len(self.indices), f"{len(x)} rows, of which {len(self.indices)} are known"
        shrunk = empty_shrunk(adapter.held.a, self.by_adapter)
        shrink(x, adapter.held.a, self.by_adapter, shrunk, pdl=self._pdl)
        return shrunk


def rows_with(adapter: LinearAdapter, x: torch.Tensor) -> DeviceRows | None:
    """The rows of a product that adapters add to; None where no row has any."""
    rows = adapter.adapters.rows
    if rows is None or not len(x):
        return None
    assert isinstance(rows, DeviceRows)
    return rows


class AdapterTables:
    """Brings the adapters of steps to the device: with a step's transfer, or to a fixed place that graphs read."""

    def __init__(self, slots: int, most_rows: int, device: torch.device, *, pdl: bool) -> None:
        self._slots, self._pdl = slots, pdl
        length = max(table_length(rows, slots) for rows in (most_rows, min(most_rows, FEW_ROWS)))
        self._fixed = torch.zeros(length, dtype=torch.int32, device=device)

    def decoding(self, rows: int) -> DeviceRows:
        """Those of steps of so many decoding rows, at the fixed place."""
        return DeviceRows(self._fixed[: table_length(rows, self._slots)], rows, self._slots, pdl=self._pdl)

    def clear(self, rows: int) -> None:
        """At the fixed place, so many rows without adapters."""
        table = host_tables(np.zeros(rows, dtype=np.int32), rows, self._slots)
        self._fixed[: len(table)].copy_(torch.from_numpy(table))

    def add_decoding(
        self, indices: NDArray[np.int32], rows: int, transfer: Transfer
    ) -> Callable[[list[torch.Tensor]], None]:
        """Puts the tables of a step padded to so many rows on the transfer; what is returned brings them there."""
        at = transfer.add(host_tables(indices, rows, self._slots))

        def bring(sent: list[torch.Tensor]) -> None:
            self._fixed[: len(sent[at])].copy_(sent[at])

        return bring

    def add(
        self, indices: NDArray[np.int32], wanted: NDArray[np.int64], transfer: Transfer
    ) -> Callable[[list[torch.Tensor]], DeviceRows]:
        """Puts a step's tables on the transfer; what is returned finds them in what was sent."""
        every, some = (transfer.add(host_tables(own, len(own), self._slots)) for own in (indices, indices[wanted]))

        def find(sent: list[torch.Tensor]) -> DeviceRows:
            narrowed = DeviceRows(sent[some], len(wanted), self._slots, pdl=self._pdl)
            return DeviceRows(sent[every], len(indices), self._slots, pdl=self._pdl, wanted=narrowed)

        return find


def add_expanded(
    adapter: LinearAdapter, shrunk: torch.Tensor, by_adapter: RowTiles, out: torch.Tensor, *, pdl: bool
) -> None:
    """out += B · shrunk: see `expand`."""
    aligned = all(end % ALIGNMENT == 0 for section in adapter.sections for end in (section.start, section.stop))
    tiles = section_tiles(adapter)
    expand(shrunk, adapter.b, tiles, by_adapter, out, aligned=aligned, pdl=pdl)


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
    # A tile for each pair: which expert it visits is known on the device alone.
    places = torch.where(here, (index - 1) * local + expert, UNUSED).to(torch.int32)
    every = torch.arange(pairs, device=x.device, dtype=torch.int32)[:, None]
    reads, writes = RowTiles(places, every // chosen), RowTiles(places, every)
    common = {"local": local, "activation": NO_ACTIVATION.value, "limit": 0.0, "alpha": 0.0, "weighted": False}

    def product(x: torch.Tensor, linear: ExpertLinear, read_x: torch.Tensor, reads: RowTiles) -> torch.Tensor:
        """[pairs, outputs] of `x` by pair; adapters read rows of `read_x`."""
        assert isinstance(linear.weight, torch.Tensor | PackedWeight)
        out = x.new_empty(pairs, linear.outputs)
        launch = plan_grouped(block, linear.weight, x.dtype)
        grouped_product(
            x[order], linear.weight, linear.bias, routing, by_expert, out, launch=launch, pdl=False, **common
        )
        if (adapter := linear.adapter) is not None:
            shrunk = empty_shrunk(adapter.held.a, reads)
            shrink(read_x, adapter.held.a, reads, shrunk, pdl=False)
            add_expanded(adapter, shrunk, writes, out, pdl=False)
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
