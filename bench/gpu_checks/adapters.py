"""What adapters add to products, on a GPU: against plain torch, in graphs too, and the same bits in any company.

Values are compared with float64 arithmetic on the same inputs: the error may be 1.5 times that of plain torch. In
float32 everything runs in Triton's interpreter too, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import torch

from bench.timing import microseconds
from windowpane.device.transfer import Transfer
from windowpane.lowering.adapters import Adapters, HeldAdapters, LinearAdapter, PlainRows
from windowpane.lowering.gpu.adapters import AdapterTables, DeviceRows, tile_rows
from windowpane.lowering.gpu.kernels.gated import gated
from windowpane.lowering.reference.ops import ACTIVATIONS
from windowpane.models.adapters import AdapterRoom, AdapterShape

Checks = list[tuple[str, Callable[[], str]]]

ALLOWED = 1.5
GELU = "gelu_pytorch_tanh"
# Gemma 4 E4B's projections: outputs of the joined weights, and inputs.
E4B = {
    "q, k and v": AdapterShape(1, (2048, 512, 512), 2560),
    "output": AdapterShape(1, (2560,), 2048),
    "gate and up": AdapterShape(1, (10240, 10240), 2560),
    "down": AdapterShape(1, (2560,), 10240),
}


def checks() -> Checks:
    return [
        *(
            (f"adapters {name}, {rows} rows, rank {rank}", partial(added, shape, rows, rank))
            for name, shape in E4B.items()
            for rows, rank in ((1, 16), (37, 5), (256, 16), (2000, 64))
        ),
        ("adapters in graphs", in_graphs),
    ]


class Case:
    """A projection of random adapters in every slot, and rows of which some have one."""

    def __init__(
        self, shape: AdapterShape, rank: int, device: torch.device, dtype: torch.dtype, slots: int = 16
    ) -> None:
        self.slots, self.device, self.dtype = slots, device, dtype
        held = HeldAdapters(shape, AdapterRoom(slots, rank), dtype, device)
        held.a.copy_(torch.randn_like(held.a) / shape.inputs**0.5)
        held.b.copy_(torch.randn_like(held.b))
        # Nothing asks the adapters which rows a step has: every call here says so.
        self.adapter = LinearAdapter(cast(Adapters, None), held, held.order, held.columns)

    def values(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the projection, and what its weights have made of them."""
        shape = self.adapter.held.shape
        x, made = (torch.randn(rows, n, device=self.device, dtype=self.dtype) for n in (shape.inputs, shape.outputs))
        return x, made

    def indices(self, rows: int) -> np.ndarray:
        return np.random.default_rng().integers(0, self.slots + 1, rows).astype(np.int32)

    def rows(self, indices: np.ndarray) -> DeviceRows:
        tables, transfer = AdapterTables(self.slots, len(indices), self.device, pdl=False), Transfer(self.device)
        find = tables.add(indices, np.zeros(0, dtype=np.int64), transfer)
        return find(transfer.send())

    def plainly(self, indices: np.ndarray, x: torch.Tensor, made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        held, out = self.adapter.held, made.to(dtype, copy=True)
        wide = HeldAdapters(held.shape, AdapterRoom(self.slots, held.a.shape[2]), dtype, self.device)
        wide.a.copy_(held.a)
        wide.b.copy_(held.b)
        PlainRows(torch.from_numpy(indices)).add(
            LinearAdapter(cast(Adapters, None), wide, wide.order, wide.columns), x.to(dtype), out
        )
        return out


def added(
    shape: AdapterShape, rows: int, rank: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> str:  # fmt: skip
    case = Case(shape, rank, torch.device(device), dtype, slots=16 if rows >= 256 else 3)
    indices, (x, made) = case.indices(rows), case.values(rows)
    indices[rows // 2] = 1 + rows % 3  # one that has an adapter
    on_rows, out = case.rows(indices), made.clone()
    on_rows.add(case.adapter, x, out)
    plain, want = (case.plainly(indices, x, made, one) for one in (dtype, torch.float64))
    told = _no_worse(out, plain, want)
    # In other company, of as large tiles; the first rows of which are gone.
    later = slice(rows // 2 if tile_rows(rows) == tile_rows(1) else rows // 4, None)
    others = made[later].clone()
    case.rows(indices[later]).add(case.adapter, x[later], others)
    assert torch.equal(others, out[later]), "other rows change a row's result"
    if len(shape.part_outputs) == 2:
        inner, together = (out.new_full((rows, shape.outputs // 2), torch.nan) for _ in range(2))
        gated(out, inner, GELU)
        on_rows.gate(case.adapter, x, made, together, GELU)
        assert torch.equal(inner, together), "gates have other bits than those of two launches"
        gate, up = want.chunk(2, -1)
        told += ", gated " + _no_worse(inner, _activated(plain), ACTIVATIONS[GELU](gate) * up)
    return told


def in_graphs() -> str:
    """A graph of a whole MLP whose rows' adapters change between replays."""
    rows, slots = 48, 4
    up, down = (Case(E4B[name], 16, torch.device("cuda"), torch.bfloat16, slots) for name in ("gate and up", "down"))
    weights = [torch.randn(case.adapter.held.shape.outputs, case.adapter.held.shape.inputs) for case in (up, down)]
    to_made, to_out = ((0.02 * weight).cuda().bfloat16() for weight in weights)
    tables = AdapterTables(slots, rows, torch.device("cuda"), pdl=True)
    x, _ = up.values(rows)

    def run(on_rows: DeviceRows) -> torch.Tensor:
        made = x @ to_made.T
        inner = made.new_empty(rows, made.shape[1] // 2)
        on_rows.gate(up.adapter, x, made, inner, GELU)
        out = inner @ to_out.T
        on_rows.add(down.adapter, inner, out)
        return out

    def bring(indices: np.ndarray) -> None:
        transfer = Transfer(up.device)
        tables.add_decoding(indices, rows, transfer)(transfer.send())

    bring(up.indices(rows))
    run(tables.decoding(rows))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(tables.decoding(rows))
    for count in (rows, rows - 5, 1, rows):
        bring(up.indices(count))
        out.fill_(torch.nan)
        graph.replay()
        replayed, eager = out.clone(), run(tables.decoding(rows))
        assert torch.equal(replayed, eager), f"{count} rows differ in a graph"
    return "4 replays"


def timings() -> None:
    """At 256 rows over 16 adapters of rank 16: what an adapter adds to a product."""
    for name, shape in E4B.items():
        case = Case(shape, 16, torch.device("cuda"), torch.bfloat16)
        (x, made), indices = case.values(256), np.arange(256, dtype=np.int32) % 16 + 1
        weight = torch.randn(shape.outputs, shape.inputs, device="cuda", dtype=torch.bfloat16)
        tables, transfer = AdapterTables(16, 256, case.device, pdl=True), Transfer(case.device)
        tables.add_decoding(indices, 256, transfer)(transfer.send())

        def step(
            adapted: bool, case: Case = case, x: torch.Tensor = x, weight: torch.Tensor = weight,
            made: torch.Tensor = made, tables: AdapterTables = tables,
        ) -> None:  # fmt: skip
            torch.mm(x, weight.T, out=made)
            if adapted:
                tables.decoding(256).add(case.adapter, x, made)

        alone, adapted = (microseconds(partial(step, way)) for way in (False, True))
        print(f"adapters {name}: product {alone:.1f} µs, with adapters {adapted:.1f}")


def _activated(made: torch.Tensor) -> torch.Tensor:
    gate, up = made.chunk(2, -1)
    return ACTIVATIONS[GELU](gate) * up


def _no_worse(out: torch.Tensor, plain: torch.Tensor, want: torch.Tensor) -> str:
    errors = [((one.double() - want).norm() / want.norm()).item() for one in (out, plain)]
    assert errors[0] <= ALLOWED * errors[1] + 1e-7, f"off by {errors[0]:.1e}, plain torch by {errors[1]:.1e}"
    return f"{errors[0]:.1e} (plain torch {errors[1]:.1e})"
