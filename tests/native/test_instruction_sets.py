"""Kernels over pages and packed weights give the same on every instruction set of this processor, plain C included."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from functools import partial

import pytest
import torch

from tests.native.instruction_sets import SETS, compiled_only, runnable, summary
from tests.native.test_experts import check_experts
from tests.native.test_kernels import PLAIN, Decoding, asked_of, assert_close, chunk_step, through_format_cases
from tests.native.test_packed import KINDS, packed
from tests.native.test_repacked import MADE
from tests.native.test_states import FAMILIES, check_states
from windowpane.attention.mask import CAUSAL
from windowpane.attention.scores import Scores
from windowpane.kv.retention import Full
from windowpane.lowering.cpu.attention import CAttention
from windowpane.lowering.cpu.pages import FORMATS, CPages
from windowpane.lowering.cpu.repacked import in_strips
from windowpane.lowering.strips import Packed
from windowpane.native import build

PACKED = next(source for source in build.SOURCES if source.name == "packed.c")


# Each set is compiled by one worker of pytest-xdist, and by -O1: -O2 takes up to three times as long.
@pytest.fixture(scope="module", params=[pytest.param(s, marks=pytest.mark.xdist_group(s)) for s in runnable()])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    target = tmp_path_factory.mktemp("kernels") / "kernels.so"
    sources = [str(source) for source in build.SOURCES if source.suffix == ".c"]
    openmp = str(build._openmp() or "-lgomp")
    subprocess.run(
        [compiler, *build.FLAGS, "-O1", request.param, "-shared", *sources, "-o", target, openmp, "-lm"], check=True
    )
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize(("compiler", "flag"), compiled_only())
def test_sets_that_this_processor_lacks_compile(compiler, flag, tmp_path):
    subprocess.run(
        [compiler, *build.FLAGS, "-O1", flag, "-Werror", "-c", PACKED, "-o", tmp_path / "packed.o"], check=True
    )


def test_every_set_is_run_compiled_or_named():
    assert all(flag in summary() for flags in SETS.values() for flag in flags)
    assert platform.machine() not in SETS or runnable()


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_rounded_and_coded_as_in_plain_torch(library, dtype):
    torch.manual_seed(3)
    pages = CPages(library)
    ours, plain = (Decoding(Full(), 2, 64, [700], dtype) for _ in range(2))
    plain.pages.arena.copy_(ours.pages.arena)
    rows = through_format_cases()
    if not ours.stored.is_coded:
        rows = torch.cat([rows, 1e5 * rows, 1e-5 * rows, 3e-8 * rows, torch.zeros(3, 2, 64)])
    assert torch.equal(pages.through_format(ours.stored, rows), PLAIN.through_format(plain.stored, rows, 0))
    step, written = chunk_step(0, 60, 600), [rows[:600], rows[-600:]]
    ours.stored.write(step, written, partial(pages.write, ours.stored))
    plain.stored.write(step, written)
    assert torch.equal(ours.pages.arena, plain.pages.arena)
    present = [torch.randn(9, 2, 64).transpose(0, 1) for _ in range(2)]
    read = pages.behind_past(ours.stored, 0, 30, 660, present)
    expected = PLAIN.behind_past(plain.stored, 0, 30, 660, present)
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))


@pytest.mark.parametrize("dtype", FORMATS)
def test_attention_over_pages(library, dtype):
    torch.manual_seed(3)
    asked = asked_of(Decoding(Full(), 2, 64, [40, 7, 700], dtype), 6, CAUSAL, Scores(0.2))
    assert_close(CAttention(library).decoding(*asked), PLAIN.attend_decoding(*asked), 5e-6)


def test_rows_into_the_basis_of_their_format(library):
    stored = Decoding(Full(), 2, 256, [1], "int8_per_token_head").stored
    rows = torch.randn(50, 2, 256)
    assert_close(CPages(library).transformed(rows), stored.transformed(rows))


def test_packed_weights_get_the_same_sums(library):
    torch.manual_seed(4)
    for weight in [*(packed(kind, 24, 512)[0] for kind in KINDS), *(in_strips(make()[0]) for make in MADE.values())]:
        outputs, inputs = weight.shape
        x, out = torch.randn(11, inputs), torch.empty(11, outputs)
        quantized = torch.empty(11 * weight.form.held_inputs * 2, dtype=torch.uint8)
        long, address = ctypes.c_long, lambda t: ctypes.c_void_p(t.data_ptr())
        parts = (Packed * 1)(weight.described)
        library.quantize_rows(address(x), long(inputs), address(quantized), long(11), parts, 1)
        library.packed_product(
            parts, long(1), address(quantized), address(x), long(inputs), None, address(out), long(outputs), long(11), 1
        )
        ours = weight.linear(x)
        assert (out - ours).abs().max() <= 1e-5 * ours.abs().max()


def test_experts_and_states(library, monkeypatch):
    """Their panels, tiles and lanes are others on each instruction set."""
    torch.manual_seed(3)
    monkeypatch.setattr(build, "library", lambda: library)
    check_experts("gpt-oss")
    for name, kind in FAMILIES[:3]:
        check_states(name, kind)
