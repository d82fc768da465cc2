"""Experts in compiled kernels give what the reference gives, and a row does not depend on the rows beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.native.compiled import compiled_library
from tests.native.test_kernels import assert_close
from tests.native.test_packed import packed
from tests.running.small_models import spec_of, weights_of
from windowpane.lowering.cpu import model
from windowpane.lowering.cpu.experts import CpuExperts, VisitedExperts
from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.linear import ExpertLinear, Parameters
from windowpane.lowering.reference.context import StepState
from windowpane.lowering.reference.mixers import ExpertsMixer
from windowpane.lowering.reference.model import ReferenceModel
from windowpane.lowering.reference.routing import Routing
from windowpane.native import build

# SiLU; limits and biases; shares that weigh inputs; GELU behind a norm of its own; no gate, groups of experts.
FAMILIES = ("qwen3 experts", "gpt-oss", "llama 4", "gemma4 experts", "nemotron-h")


def mixers_of(lowered: ReferenceModel, kind: type) -> list:
    """Those of a model, branches of sums included."""
    layers = [each for layer in lowered.layers for each in getattr(layer, "layers", [layer])]
    found, left = [], [block.mixer for layer in layers for block in layer.blocks]
    for mixer in left:
        left += [branch.mixer for branch in getattr(mixer, "_branches", ())]
        found += [mixer] * isinstance(mixer, kind)
    return found


def both(name: str, kind: type) -> list[tuple]:
    """Pairs of compiled and plain mixers of a small model."""
    decoder = spec_of(name).decoder
    compiled = model.lower(decoder, Parameters(decoder, dict(weights_of(name))), 256)
    plain = ReferenceModel(decoder, Parameters(decoder, dict(weights_of(name))), 256)
    return list(zip(mixers_of(compiled, kind), mixers_of(plain, kind), strict=True))


@pytest.fixture(autouse=True)
def kernels() -> None:
    torch.manual_seed(5)
    compiled_library()


def no_step() -> StepState:
    """What experts ask of a step: whether it stores which ones its rows visit."""
    return cast("StepState", SimpleNamespace(routed={}, pages=SimpleNamespace(routes=None)))


def called(mixer: ExpertsMixer, x: torch.Tensor) -> torch.Tensor:
    return mixer(x, no_step())


def check_experts(name: str) -> None:
    compiled, plain = both(name, ExpertsMixer)[0]
    assert isinstance(compiled, CpuExperts)
    x = torch.randn(300, plain.router.shape[1])
    together = called(compiled, x)
    assert_close(together, called(plain, x), 1e-5)
    routing = compiled.route(x, no_step())
    for rows in (1, 2, 5, 40, 299):
        some = Routing(routing.ids[-rows:], routing.shares[-rows:])
        inputs = x[-rows:] if plain.norm is None else compiled._ops.norm(x[-rows:], plain.norm, plain.described.norm)
        assert torch.equal(compiled.visited(inputs.contiguous(), some), together[-rows:]), f"of {rows} rows"


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_give_what_the_reference_gives_in_any_batch(name):
    check_experts(name)


def test_many_visits_are_taken_in_parts(monkeypatch):
    compiled, plain = both("qwen3 experts", ExpertsMixer)[0]
    x = torch.randn(50, plain.router.shape[1])
    at_once = called(compiled, x)
    monkeypatch.setattr("windowpane.lowering.cpu.experts.MOST_VISITS", 21)
    assert torch.equal(called(compiled, x), at_once)


@pytest.mark.parametrize("kind", [2, 12])
def test_experts_in_strips_are_read_as_they_are(kind):
    """Q4_0 and Q4_K: an expert gives what products of its own strips give, in any batch."""
    _, plain = both("qwen3 experts", ExpertsMixer)[0]
    library = build.library()
    assert library is not None
    ops, experts, width = CpuOps(library), 8, 256
    gate_up = ExpertLinear(packed(kind, experts * 2 * width, 512)[0], experts)
    down = ExpertLinear(packed(kind, experts * 512, width, seed=1)[0], experts)
    x, ids = torch.randn(70, 512) * 0.1, torch.stack([torch.randperm(experts)[:3] for _ in range(70)])
    routing = Routing(ids, torch.rand(70, 3))
    expected = torch.zeros(70, 512)
    for expert in range(experts):
        rows, at = (ids == expert).nonzero(as_tuple=True)
        made = ops.expert(x[rows], gate_up[expert], down[expert], plain.described)
        expected.index_add_(0, rows, made * routing.shares[rows, at, None])
    visited = VisitedExperts(ops, gate_up, down, plain.described, 0)
    together = visited(x, routing)
    assert_close(together, expected, 1e-5)
    for rows in (1, 3, 33):
        assert torch.equal(visited(x[-rows:], Routing(ids[-rows:], routing.shares[-rows:])), together[-rows:])
