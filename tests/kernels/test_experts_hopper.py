"""The kernels of experts on Hopper: whether they compile, and what their source computes, run in torch.

`python3 -m bench.gpu_check experts` checks the same on a GPU, at real sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels import hopper_in_torch
from tests.kernels.gluon_in_torch import Interpreted
from tests.kernels.interpreted_experts import activated
from tests.kernels.interpreting import run_interpreted
from tests.kernels.test_hopper_compiles import FEW_SPILLED_BYTES, SHARED_BYTES, Recorder, stack_bytes
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels import experts_hopper
from windowpane.lowering.gpu.kernels.experts_activation import CLAMPED, GELU, NO_ACTIVATION, SILU, is_gated
from windowpane.lowering.gpu.kernels.experts_hopper import GROUPS, Boxed, boxed_product, has_large_scales
from windowpane.lowering.gpu.kernels.experts_sorted import Sorted
from windowpane.lowering.gpu.kernels.hopper_experts import LARGEST_SCALE
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import PackedForm

BF16, CPU = torch.bfloat16, torch.device("cpu")
KERNEL, PLAIN_KERNEL = experts_hopper.mxfp4_experts_kernel, experts_hopper.plain_experts_kernel


def weight_of(outputs: int, inputs: int) -> PackedWeight:
    """Outputs have scales of their own from 2^-20 to 2, and spans of inputs others near them."""
    made = PackedWeight.empty(PackedForm("mxfp4", outputs, inputs, 32), BF16, CPU)
    made.units.random_(-(2**15), 2**15)
    of_output = torch.randint(127 - 20 + 2, LARGEST_SCALE, (outputs, 1))
    return replace(made, scales=(of_output + torch.randint(-2, 2, made.scales.shape)).to(torch.uint8))


@pytest.mark.parametrize(
    ("rows", "activation", "tiles", "pdl"),
    [(16, CLAMPED, 15, True), (32, NO_ACTIVATION, 8, False), (64, NO_ACTIVATION, 12, False), (128, SILU, 23, True)],
)
def test_a_launch_compiles_for_hopper_and_keeps_a_product_in_flight(
    rows, activation, tiles, pdl, monkeypatch, tmp_path
):
    recorder = Recorder(KERNEL)
    monkeypatch.setattr(experts_hopper, "mxfp4_experts_kernel", recorder)
    outputs = 5760 if activation != NO_ACTIVATION else 2880
    weight = PackedWeight.empty(PackedForm("mxfp4", 2 * outputs, 2880, 32), BF16, CPU)
    by_expert = Sorted(*(torch.zeros(shape, dtype=torch.int32) for shape in (1000, (40, 3), 3, 1000)))
    boxed_product(
        torch.zeros(1000, 2880, dtype=BF16), weight, torch.zeros(2, outputs, dtype=BF16), by_expert,
        torch.zeros(1000, 2880, dtype=BF16), local=2, activation=activation.value, limit=7.0, alpha=1.702,
        launch=Boxed(rows), chosen=4, pdl=pdl,
    )  # fmt: skip
    compiled = recorder.compile()
    ptx = compiled.asm["ptx"]
    assert recorder.launched["tiles"] == tiles and recorder.launched["blocks"] == 23
    assert compiled.metadata.shared <= SHARED_BYTES
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= FEW_SPILLED_BYTES
    assert ("griddepcontrol.wait" in ptx) == pdl
    # Two products of 8 steps in each warp group's loop, and one is waited for while the other is in flight.
    assert ptx.count("wgmma.mma_async") == GROUPS[rows] * 2 * 8
    assert ptx.count("wgmma.wait_group.sync.aligned 1") == GROUPS[rows]


def test_plain_weights_compile_for_hopper(monkeypatch, tmp_path):
    recorder = Recorder(PLAIN_KERNEL)
    monkeypatch.setattr(experts_hopper, "plain_experts_kernel", recorder)
    by_expert = Sorted(*(torch.zeros(shape, dtype=torch.int32) for shape in (1000, (40, 3), 3, 1000)))
    boxed_product(
        torch.zeros(1000, 2816, dtype=BF16), torch.zeros(2 * 1408, 2816, dtype=BF16), None, by_expert,
        torch.zeros(1000, 704, dtype=BF16), local=2, activation=GELU.value, limit=0.0, alpha=0.0, launch=Boxed(128),
        chosen=8, pdl=True,
    )  # fmt: skip
    compiled = recorder.compile(aligned=("X",))
    assert recorder.launched["tiles"] == 6 and recorder.launched["blocks"] == 44
    assert compiled.metadata.shared <= SHARED_BYTES
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= FEW_SPILLED_BYTES
    # Whole and half tiles in each warp group, four steps of a product.
    assert compiled.asm["ptx"].count("wgmma.mma_async") == 2 * 2 * 4


def sort(experts: torch.Tensor, local: int, block_rows: int) -> Sorted:
    """As `sort_pairs` does it. `experts`: of each pair, those of other ranks from `local` on."""
    pairs = experts.sort(stable=True).indices.int()
    blocks, begin = [], 0
    for expert, count in enumerate(experts.bincount(minlength=local)[:local].tolist()):
        blocks += [[expert, at, begin + count] for at in range(begin, begin + count, block_rows)]
        begin += count
    room = [[9999, 9999, 9999]] * 2  # as there is where experts have more blocks than these
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (blocks + room, [len(blocks), 0, 0]))
    return Sorted(pairs, *numbers, torch.where(experts < local, pairs.argsort().int(), -1))


def test_larger_scales_than_the_kernel_takes_are_found():
    weight = weight_of(8, 256)
    assert weight.scales.max() <= LARGEST_SCALE and not has_large_scales(torch.ones(8, 256), weight)
    weight.scales[3, 5] = LARGEST_SCALE + 1
    assert has_large_scales(torch.ones(8, 256), weight)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_rank_whose_experts_nobody_chose_writes_nothing(is_plain, monkeypatch):
    monkeypatch.setattr(experts_hopper, "mxfp4_experts_kernel", Interpreted(KERNEL, hopper_in_torch.NAMES))
    monkeypatch.setattr(experts_hopper, "plain_experts_kernel", Interpreted(PLAIN_KERNEL, hopper_in_torch.NAMES))
    monkeypatch.setattr(experts_hopper, "processors_of", lambda device: 3)
    weight = torch.randn(4 * 256, 128).to(BF16) if is_plain else weight_of(4 * 256, 128)
    out = torch.full((7, 128), torch.nan, dtype=BF16)
    boxed_product(
        torch.randn(7, 128).to(BF16), weight, None, sort(torch.full((7,), 4), 4, 16), out, local=4,
        activation=SILU.value, limit=0.0, alpha=0.0, launch=Boxed(16), chosen=1, pdl=False,
    )  # fmt: skip
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("activation", "rows", "inputs", "outputs", "has_bias", "is_plain"),
    [
        (CLAMPED, 16, 328, 2 * 136, True, False),
        (SILU, 32, 136, 2 * 200, False, False),
        (GELU, 16, 128, 2 * 64, False, False),
        (NO_ACTIVATION, 16, 328, 428, True, False),
        (NO_ACTIVATION, 32, 136, 272, False, False),
        (CLAMPED, 64, 136, 2 * 136, True, False),
        (NO_ACTIVATION, 64, 136, 428, False, False),
        (GELU, 16, 328, 2 * 192, False, True),
        (NO_ACTIVATION, 16, 200, 428, True, True),
    ],
)  # fmt: skip
def test_a_product_is_that_of_the_weight_in_float64(activation, rows, inputs, outputs, has_bias, is_plain, monkeypatch):
    """Of five experts one has no pairs, one has many blocks, and one is of another rank. Tiles are more than programs,
    and blocks of inputs more than stages.
    """
    torch.manual_seed(3)
    monkeypatch.setattr(experts_hopper, "mxfp4_experts_kernel", Interpreted(KERNEL, hopper_in_torch.NAMES))
    monkeypatch.setattr(experts_hopper, "plain_experts_kernel", Interpreted(PLAIN_KERNEL, hopper_in_torch.NAMES))
    monkeypatch.setattr(experts_hopper, "PLAIN_STAGES", 3)
    monkeypatch.setattr(experts_hopper, "processors_of", lambda device: 3)
    monkeypatch.setitem(experts_hopper.STAGES, rows, 3)
    experts = torch.tensor([0] * 7 + [2] * (8 * rows + 1) + [3] * rows + [4] * 5)
    experts = experts[torch.randperm(len(experts))]
    by_expert = sort(experts, 4, rows)
    gated = is_gated(activation.value)
    # Two pairs may have a row in common; else rows lie by expert.
    by_rows = gated and is_plain
    x = torch.randn(ceil_div(len(experts), 2) if by_rows else len(experts), inputs).to(BF16)
    weight = torch.randn(4 * outputs, inputs).to(BF16) if is_plain else weight_of(4 * outputs, inputs)
    bias = torch.randn(4, outputs).to(BF16) if has_bias else None
    width = outputs // 2 if gated else outputs
    memory = torch.full((len(experts), width + 64), torch.nan, dtype=BF16)
    out = memory[:, :width]
    boxed_product(
        x, weight, bias, by_expert, out, local=4, activation=activation.value, limit=7.0, alpha=1.702,
        launch=Boxed(rows), chosen=2, pdl=True,
    )  # fmt: skip
    exact = weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float64)
    matrices = exact.view(4, outputs, inputs)
    mine = by_expert.pairs[: int((experts < 4).sum())].long()
    rows_of = (x[mine // 2] if by_rows else x[: len(mine)]).double()
    want = torch.stack([matrices[expert] @ row for expert, row in zip(experts[mine], rows_of, strict=True)])
    if bias is not None:
        want += bias[experts[mine]].double()
    if gated:
        name = "gelu_pytorch_tanh" if activation == GELU else "silu"
        want = activated(want.t(), name, 7.0 if activation == CLAMPED else None, 1.702).t()
    at = torch.arange(len(mine)) if gated else mine
    # Half a step of bfloat16, and what float32 sums may be off.
    allowed = want.abs() / 256 + want.abs().amax(0) * 2e-6
    off = (out[at].double() - want).abs() / allowed
    assert (off <= 1).all(), f"{float(off.max()):.2f} times what is allowed"
    assert (~memory.isnan()).sum() == len(mine) * width, "nothing else is written"


def test_a_layer_of_experts_goes_through_sorting_both_products_and_the_sum():
    run_interpreted("tests.kernels.interpreted_experts", "boxes")
