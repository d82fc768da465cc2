"""Where a step's rows store the experts they visit: worked out once a step, for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.device.pages import RoutePages
from windowpane.device.tables import DeviceTables
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.step import DeviceStep

BLOCK = 128


class RoutePlaces:
    """The first id of each row, counted in ids from the arena's beginning; -1 for a padding row."""

    def __init__(self, routes: RoutePages, tables: DeviceTables) -> None:
        self._routes, self._table = routes, tables.writing[routes.group]
        self._unit_ids = OFFSET_UNIT_BYTES // routes.arena.element_size()

    def __call__(self, step: DeviceStep) -> torch.Tensor:
        routes = self._routes
        if step.writes is not None:
            writes = step.writes[routes.group]  # all rows, in order
            return writes.offsets[0].long() * self._unit_ids + writes.within * routes.row_ids
        rows = len(step.positions)
        places = torch.empty(rows, dtype=torch.int64, device=step.positions.device)
        route_places_kernel[(ceil_div(rows, BLOCK),)](
            self._table, step.slots, step.positions, places, rows, self._table.stride(0), routes.block_tokens,
            self._unit_ids, routes.row_ids, BLOCK=BLOCK,
        )  # fmt: skip
        return places


@triton.jit
def route_places_kernel(
    TABLE, SLOTS, POSITIONS, PLACES, rows, table_stride, block_tokens, unit_ids, row_ids, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(SLOTS + row, mask=row < rows, other=0).to(tl.int64)
    position = tl.load(POSITIONS + row, mask=row < rows, other=-1)
    is_token = position >= 0
    offset = tl.load(TABLE + slot * table_stride + position // block_tokens, mask=is_token, other=0).to(tl.int64)
    place = offset * unit_ids + position % block_tokens * row_ids
    tl.store(PLACES + row, tl.where(is_token, place, -1), mask=row < rows)
