"""What the layer chain computes: its source run in torch, program beside program, against the same layer in torch."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_checks.chain import in_torch
from tests.kernels.gluon_in_torch import Interpreted
from windowpane.lowering.gpu.kernels import chain
from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links, is_chain, run_chain
from windowpane.lowering.gpu.kernels.chain_forms import LONG, TALL
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import PackedForm

BF16, CPU = torch.bfloat16, torch.device("cpu")
PROGRAMS = 8
ALLOWED = 1.5  # times the error of plain torch in bf16, as on a GPU
KERNEL = chain.chain_kernel

# What is attended, the width, what is inside, and the next layer's projections: in which form and parts.
SHAPES = {
    "long projections": (2048, 512, 2048, 512, (LONG, 6)),
    "tall projections that programs do not share evenly, inputs that end within a turn": (
        4352, 512, 2560, 1001, (TALL, 3),
    ),
    "one tall part": (2048, 1536, 2048, 1001, (TALL, 1)),
    "last layer": (2048, 512, 2048, 0, None),
}  # fmt: skip


def random_links(attended: int, width: int, inner: int, following: int, *, plain: bool) -> Links:
    def weight(outputs: int, inputs: int) -> PackedWeight:
        made = PackedWeight.empty(PackedForm("int4", outputs, inputs, 32), BF16, CPU)
        made.units.random_(-(2**15), 2**15)
        made.scales.copy_((torch.rand(made.scales.shape) + 0.5) * 0.2 / inputs**0.5)
        return made

    def norm() -> torch.Tensor:
        return torch.rand(width) + 0.5

    return Links(
        out=weight(width, attended),
        gate_up=weight(2 * inner, width),
        down=weight(width, inner),
        following=weight(following, width) if following else None,
        post_attention_norm=None if plain else norm(),
        pre_mlp_norm=norm(),
        post_mlp_norm=None if plain else norm(),
        next_norm=norm(),
        scalar=None if plain else torch.full((1,), 0.7, dtype=BF16),
        eps=1e-6,
        gelu=not plain,
    )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "chain_kernel", Interpreted(KERNEL))
    monkeypatch.setattr(chain, "processors_of", lambda device: PROGRAMS)
    torch.manual_seed(5)


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("name", "plain"), [*((name, False) for name in SHAPES), ("long projections", True)])
def test_a_launch_computes_the_layer(name: str, plain: bool) -> None:
    *shape, cut = SHAPES[name]
    links = random_links(*shape, plain=plain)
    assert is_chain(links, BF16, PROGRAMS)
    assert cut is None or chain._cuts(links, PROGRAMS)[-1][:2] == cut
    attended, start = torch.randn(1, shape[0]).to(BF16), torch.randn(1, shape[1]).to(BF16)
    exact = in_torch(attended, start, links, torch.float64)
    allowed = [error(x, e) for x, e in zip(in_torch(attended, start, links, BF16), exact, strict=True)]
    before = start.clone()
    scratch = ChainScratch(shape[1], shape[2], CPU)
    found = run_chain(attended, start, links, scratch, pdl=False)
    errors = [error(x, e) for x, e in zip(found, exact, strict=True)]
    assert all(e <= ALLOWED * a for e, a in zip(errors, allowed, strict=True)), (errors, allowed)
    assert torch.equal(start, before), "what other programs may still read is not written"


@pytest.mark.usefixtures("programs")
def test_launches_clear_the_slots_for_those_after_them() -> None:
    links = random_links(2048, 512, 2048, 0, plain=True)
    scratch = ChainScratch(512, 2048, CPU)
    hidden = torch.randn(3, 1, 512).to(BF16)
    attended = torch.randn(1, 2048).to(BF16)
    alone = [run_chain(attended, row, links, ChainScratch(512, 2048, CPU), pdl=False)[0] for row in hidden]
    for row, expected in zip(hidden, alone, strict=True):
        assert torch.equal(run_chain(attended, row, links, scratch, pdl=False)[0], expected)
    assert scratch.side.tolist() == [1] * PROGRAMS


@pytest.mark.usefixtures("programs")
def test_what_is_not_a_number_comes_out_as_such_and_is_waited_for_once() -> None:
    """Were a product to leave the bits that stand for "not written", its readers would wait for ever."""
    links = random_links(2048, 512, 2048, 512, plain=False)
    attended, hidden = torch.randn(1, 2048).to(BF16), torch.randn(1, 512).to(BF16)
    attended.view(torch.int16)[0, 7] = -1
    made, updated = run_chain(attended, hidden, links, ChainScratch(512, 2048, CPU), pdl=False)
    assert made.isnan().all() and updated.isnan().all()
