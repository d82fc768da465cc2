"""Kernels of experts and routing, compiled for Hopper from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_formats_compile import POINTERS, SHARED_BYTES, Recorder
from tests.kernels.test_hopper_compiles import stack_bytes
from tests.kernels.test_packed_compiles import OnDevice
from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.kv.caches import RouteCache
from windowpane.kv.layout import plan_layout
from windowpane.lowering.gpu.kernels import experts_few, experts_grouped, experts_sorted, route_places, routing
from windowpane.lowering.gpu.kernels.experts import Grouped, run_experts
from windowpane.lowering.gpu.kernels.experts_sorted import RANKED_PAIRS
from windowpane.lowering.gpu.kernels.routing import RouteWrite, route
from windowpane.lowering.gpu.step import DeviceStep
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.routing import Routing
from windowpane.models.packing import PackedForm

CPU, BF16 = torch.device("cpu"), torch.bfloat16
# hidden, width, experts (fewer than there are: kernels do not know), chosen, scheme
LAYERS = {
    "Gemma 4 26B-A4B": (2816, 704, 4, 8, None),
    "Gemma 4 26B-A4B int4": (2816, 704, 4, 8, ("int4", 64)),
    "gpt-oss-20b": (2880, 2880, 2, 4, ("mxfp4", 32)),
}


def weight_of(outputs: int, inputs: int, scheme: tuple[str, int] | None) -> torch.Tensor | PackedWeight:
    if scheme is None:
        return torch.zeros(outputs, inputs, dtype=BF16)
    return PackedWeight.empty(PackedForm(scheme[0], outputs, inputs, scheme[1]), BF16, CPU)


class Both(OnDevice):
    """Keeps what both products of a layer compile to."""

    def __init__(self, kernel) -> None:
        super().__init__(kernel, 90)
        self.found: list = []

    def __getitem__(self, grid):
        launch = super().__getitem__(grid) if "USES_ASM" in self.kernel.arg_names else Recorder.__getitem__(self, grid)

        def keep(*args, **named):
            launch(*args, **named)
            self.found.append(self.compiled)

        return keep


def record(monkeypatch, module, name: str) -> Both:
    monkeypatch.setitem(POINTERS, torch.int64, "*i64")
    monkeypatch.setattr(module, name, Both(getattr(module, name)))
    return getattr(module, name)


def record_sort(monkeypatch, pairs: int) -> list[Both]:
    """The launches that sort so many pairs."""
    names = ["rank_kernel"] if pairs <= RANKED_PAIRS else ["count_kernel", "add_counts_kernel", "place_kernel"]
    return [record(monkeypatch, experts_sorted, name) for name in names]


@pytest.mark.parametrize("rows", [1, 256, 8192])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_experts(name, rows, monkeypatch, tmp_path):
    hidden, width, experts, chosen, scheme = LAYERS[name]
    module = experts_few if rows == 1 else experts_grouped
    product = ("few" if rows == 1 else "grouped") + ("_packed_kernel" if scheme else "_kernel")
    others = []
    if rows > 1:
        others = [record(monkeypatch, experts_grouped, "add_kernel"), *record_sort(monkeypatch, rows * chosen)]
    products = record(monkeypatch, module, product)
    x = torch.zeros(rows, hidden, dtype=BF16)
    routed = Routing(torch.zeros(rows, chosen, dtype=torch.int32), torch.zeros(rows, chosen))
    run_experts(
        x, routed, weight_of(experts * 2 * width, hidden, scheme), weight_of(experts * hidden, width, scheme),
        experts=128, local_experts=experts, activation="silu", limit=7.0 if "gpt" in name else None, pdl=True,
    )  # fmt: skip
    assert len(products.found) == 2 and all(len(other.found) == 1 for other in others)
    for compiled in products.found:
        ptx = compiled.asm["ptx"]
        assert "ld.global" in ptx and ".v4.b32" in ptx if rows == 1 and not scheme else "cp.async" in ptx
        assert rows == 1 or "wgmma" in ptx
        assert compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("launch", [Grouped(32, 128, 128, 4, 3, tma=True), Grouped(128, 256, 64, 8, 4, tma=True)])
def test_weights_that_are_copied_as_boxes(launch, monkeypatch, tmp_path):
    products, _ = [record(monkeypatch, experts_grouped, f"{name}_kernel") for name in ("boxes", "add")]
    record_sort(monkeypatch, 256 * 8)
    routed = Routing(torch.zeros(256, 8, dtype=torch.int32), torch.zeros(256, 8))
    run_experts(
        torch.zeros(256, 2816, dtype=BF16), routed, weight_of(2 * 1408, 2816, None), weight_of(2 * 2816, 704, None),
        experts=2, activation="silu", launches=(launch, launch),
    )  # fmt: skip
    for compiled in products.found:
        assert "wgmma" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("groups", [1, 8])
def test_routing(groups, monkeypatch, tmp_path):
    kernels = [record(monkeypatch, routing, name) for name in ("logits_kernel", "choose_kernel")]
    write = RouteWrite(torch.zeros(2048, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), 16)
    route(
        torch.zeros(4, 2816, dtype=BF16), torch.zeros(256, 2816, dtype=BF16), None, torch.zeros(256), None, chosen=8,
        scoring="sigmoid", renormalize=True, multiplier=2.5, groups=groups, chosen_groups=4, pdl=True,
        write=write if groups > 1 else None,
    )  # fmt: skip
    for kernel in kernels:
        assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) == 0


def test_where_rows_store_their_experts(monkeypatch, tmp_path):
    kernel = record(monkeypatch, route_places, "route_places_kernel")
    layout = plan_layout([RouteCache(tuple(range(36)), 4, 128)], {}, block_tokens=16)
    tables = DeviceTables([(64, 8192, 1)], CPU)
    routes = KVPages(layout, 1, 64, 64, CPU).routes
    assert routes is not None
    places = route_places.RoutePlaces(routes, tables)(DeviceStep.decoding(torch.zeros(3, 64, dtype=torch.int32)))
    assert (places.dtype, len(places)) == (torch.int64, 64)
    assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) == 0
