"""Products with int4 weights on Hopper: how work is shared, what is launched, if it compiles, what its source gives.

`python3 -m bench.gpu_check quantized` checks the kernel on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import hopper_in_torch
from tests.kernels.gluon_in_torch import Interpreted
from tests.kernels.test_hopper_compiles import FEW_SPILLED_BYTES, SHARED_BYTES, Recorder, stack_bytes
from windowpane.lowering.gpu.kernels import hopper_tiled
from windowpane.lowering.gpu.kernels.hopper_tiled import STAGES, hopper_product, is_described, plan_shares
from windowpane.lowering.gpu.kernels.launch import flags_of
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import PackedForm

BF16 = torch.bfloat16
H200 = 132


def weight(outputs: int = 512, inputs: int = 1024, group: int | None = 32, zeros: bool = False) -> PackedWeight:
    return PackedWeight.empty(PackedForm("int4", outputs, inputs, group, has_zeros=zeros), BF16, torch.device("cpu"))


class TestShares:
    @given(st.integers(17, 256), st.integers(1, 60_000), st.integers(32, 30_000), st.integers(1, 200))
    def test_every_block_of_every_tile_is_in_one_piece(self, rows, outputs, inputs, processors):
        shares = plan_shares(rows, outputs, inputs, processors)
        pieces = [shares.piece(p) for p in range(shares.programs)]
        assert pieces[0].start == 0 and pieces[-1].stop == shares.work
        assert all(a.stop == b.start for a, b in pairwise(pieces))
        sizes = {len(piece) for piece in pieces}
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1, "even shares, and none empty"
        for p in (0, shares.programs // 2, shares.programs - 1):
            assert {shares.program_of(item) for item in (pieces[p][0], pieces[p][-1])} == {p}
        assert shares.programs <= processors, "programs wait for each other: all must run at once"

    @given(st.integers(17, 256), st.integers(1, 60_000), st.integers(32, 30_000), st.integers(1, 200))
    def test_no_tile_falls_into_more_pieces_than_a_kernel_adds(self, rows, outputs, inputs, processors):
        assert plan_shares(rows, outputs, inputs, processors).most_parts <= 8

    @given(st.integers(17, 256), st.integers(1, 20_000), st.integers(32, 30_000), st.integers(1, 200))
    def test_what_a_program_shares_has_a_slot_of_its_own_where_others_look_for_it(
        self, rows, outputs, inputs, processors
    ):
        shares = plan_shares(rows, outputs, inputs, processors)
        written: dict[int, tuple[int, int]] = {}
        for p in range(shares.programs):
            piece = shares.piece(p)
            for tile in range(piece.start // shares.blocks, (piece.stop - 1) // shares.blocks + 1):
                begin = max(piece.start, tile * shares.blocks)
                if min(piece.stop, (tile + 1) * shares.blocks) - begin < shares.blocks:
                    slot = 2 * p + (begin != piece.start)
                    assert slot not in written
                    written[slot] = (tile, p)
        # As `add_part` looks for them.
        for tile in {tile for tile, _ in written.values()}:
            first = shares.program_of(tile * shares.blocks)
            slots = [2 * first + (shares.piece(first).start < tile * shares.blocks)]
            slots += [2 * (first + i) for i in range(1, shares.parts(tile))]
            assert [written[slot] for slot in slots] == [(tile, first + i) for i in range(shares.parts(tile))]

    def test_products_of_a_large_model_keep_nearly_all_multiprocessors_busy(self):
        for inputs, outputs in ((5376, 43008), (21504, 5376), (5376, 16384), (8192, 5376), (16384, 5376)):
            for rows in (32, 64, 128, 256):
                shares = plan_shares(rows, outputs, inputs, H200)
                longest = max(len(shares.piece(p)) for p in range(shares.programs))
                assert shares.work / (H200 * longest) > 0.92

    def test_tiles_are_no_higher_than_rows_ask_for(self):
        heights = {rows: plan_shares(rows, 5376, 8192, H200).rows for rows in (17, 33, 70, 96, 97, 140, 192, 256, 300)}
        assert heights == {17: 32, 33: 48, 70: 80, 96: 96, 97: 128, 140: 80, 192: 96, 256: 128, 300: 128}

    def test_few_outputs_and_few_inputs_take_fewer_programs(self):
        assert plan_shares(20, 100, 1024, H200).programs == 6
        assert plan_shares(20, 100, 256, H200).programs == 2


class TestWhatItTakes:
    def test_symmetric_int4_in_groups_of_32(self):
        x, out = torch.zeros(20, 1024, dtype=BF16), torch.zeros(20, 512, dtype=BF16)
        assert is_described(x, weight(), out)
        assert not is_described(x, weight(group=128), out)
        assert not is_described(x, weight(group=None), out)
        assert not is_described(x, weight(zeros=True), out)
        assert not is_described(x, replace(weight(), scales=weight().scales.float()), out)
        assert not is_described(x.float(), weight(), out.float())

    def test_what_tma_cannot_copy_is_left_to_others(self):
        x, out = torch.zeros(20, 1025, dtype=BF16), torch.zeros(20, 516, dtype=BF16)
        assert not is_described(x[:, 1:], weight(), torch.zeros(20, 512, dtype=BF16)), "begins between 16 bytes"
        assert not is_described(x[:, :1024].contiguous(), weight(516), out), "rows of 1,032 bytes"
        assert not is_described(torch.zeros(20, 96, dtype=BF16), weight(inputs=96), out[:, :512]), "3 scales"

    def test_some_outputs_of_a_weight_are_a_weight(self):
        x = torch.zeros(20, 1024, dtype=BF16)
        assert is_described(x, weight()[100:300], torch.zeros(20, 200, dtype=BF16))


@pytest.mark.parametrize("rows", [17, 33, 64, 70, 96, 100])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_launch_compiles_for_hopper_and_keeps_a_product_in_flight(rows, dtype, monkeypatch, tmp_path):
    recorder = Recorder(hopper_tiled.int4_kernel)
    monkeypatch.setattr(hopper_tiled, "int4_kernel", recorder)
    form = PackedForm("int4", 5376, 1024, 32)
    packed = PackedWeight.empty(form, dtype, torch.device("cpu"))
    x, out, bias = (torch.zeros(shape, dtype=dtype) for shape in ((rows, 1024), (rows, 5376), (5376,)))
    hopper_product(x, packed, bias if rows == 64 else None, out, plan_shares(rows, 5376, 1024, H200), pdl=rows != 64)
    compiled = recorder.compile()
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= FEW_SPILLED_BYTES
    assert ("griddepcontrol.wait" in ptx) == (rows != 64)
    # Two products of 8 steps in each warp group's loop, and each waits for the one before it alone.
    launched = recorder.launched
    products = 4 if launched["EXTRA"] else 2
    assert ptx.count("wgmma.mma_async") == 2 * products * 8
    assert ptx.count(f"wgmma.wait_group.sync.aligned {products // 2}") == 2
    assert STAGES[launched["ROWS"] + launched["EXTRA"]] == launched["STAGES"]


@pytest.mark.parametrize(
    ("rows", "outputs", "programs", "dtype"), [(20, 296, 3, torch.float16), (40, 552, 2, BF16)],
    ids=["every tile is shared", "more rows than a power of two, and whole tiles"],
)  # fmt: skip
def test_a_product_is_that_of_the_dequantised_weight(rows, outputs, programs, dtype, monkeypatch):
    torch.manual_seed(4)
    monkeypatch.setattr(hopper_tiled, "int4_kernel", Interpreted(hopper_tiled.int4_kernel, hopper_in_torch.NAMES))
    packed = PackedWeight.empty(PackedForm("int4", outputs, 768, 32), dtype, torch.device("cpu"))
    packed.units.random_(-(2**15), 2**15)
    packed.scales.copy_(torch.rand(packed.scales.shape) + 0.5)
    x, bias = torch.randn(rows, 768).to(dtype), torch.randn(outputs).to(dtype)
    out = torch.full((rows, outputs), torch.nan, dtype=dtype)
    hopper_product(x, packed, bias, out, plan_shares(rows, outputs, 768, programs), pdl=True)
    want = x.double() @ packed.dequantize(dtype).double().t() + bias.double()
    # Half a step of the result, and what float32 sums may be off.
    assert ((out.double() - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2 + 2e-6 * want.abs().max()).all()
    assert not flags_of(x.device).any(), "flags are left as they were found"
