"""Quantized weights of safetensors in strips: the same values and bytes, products as a plain reference says, the same
bits in any batch; experts and whole models too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.native.compiled import compiled_library
from tests.native.test_experts import mixers_of
from tests.native.test_kernels import assert_close
from tests.native.test_packed import in_8_bits
from tests.quantized.test_packed_weights import fp8, int4, mxfp4
from tests.running.harness import Knobs, Run, generate_with
from tests.running.small_models import QUANTIZED
from windowpane.engine.devices import on_cpu
from windowpane.lowering.cpu.experts import CpuExperts, VisitedExperts
from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.cpu.repacked import in_strips
from windowpane.lowering.linear import ExpertLinear
from windowpane.lowering.packed import JoinedWeight, PackedWeight
from windowpane.lowering.reference.mixers import ExpertsMixer
from windowpane.lowering.reference.routing import Routing
from windowpane.lowering.strips import StripWeight
from windowpane.models import ModelSpec, from_config
from windowpane.models.weights import weight_bytes
from windowpane.weights import load_weights

# By what a checkpoint may have: groups, zero points, one scale for an output, padded inputs, scales that outputs share.
MADE = {
    "int4, groups of 32": partial(int4, 48, 256, 32, zeros=False),
    "int4, groups of 128, zero points": partial(int4, 48, 384, 128, zeros=True),
    "int4, padded, zero points": partial(int4, 32, 192, 64, zeros=True),
    "int4, a scale for an output": partial(int4, 32, 320, None, zeros=True),
    "mxfp4, padded": partial(mxfp4, 48, 320),
    "fp8, blocks": partial(fp8, 48, 320, (16, 128)),
    "fp8, blocks of two strips": partial(fp8, 64, 96, (32, 32)),
    "fp8, a scale for an output": partial(fp8, 48, 320, (1, 320)),
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    torch.manual_seed(5)
    compiled_library()


def strips_and_values(name: str) -> tuple[StripWeight, torch.Tensor]:
    packed, values = MADE[name]()
    strips = in_strips(packed)
    assert isinstance(strips, StripWeight) and strips.nbytes == packed.nbytes
    return strips, values


@pytest.mark.parametrize("name", MADE)
def test_values_keep_their_bits_and_weights_their_bytes(name):
    strips, values = strips_and_values(name)
    assert torch.equal(strips.dequantize(torch.float32), values)
    assert torch.equal(strips[16:32].dequantize(torch.float32), values[16:32])


@pytest.mark.parametrize("name", MADE)
def test_products_are_those_of_a_plain_reference_in_any_batch(name):
    strips, values = strips_and_values(name)
    x, bias = torch.randn(77, values.shape[1]), torch.randn(len(values))
    taken = in_8_bits(x) if strips.form.rounds_inputs else x.double()
    expected, scale = taken @ values.double().t(), (taken.abs() @ values.double().abs().t()).amax()
    together = strips.linear(x, bias)
    assert (together - expected - bias).abs().max() <= 2e-6 * scale
    for rows in (1, 2, 3, 5, 8, 13, 64):
        assert torch.equal(strips.linear(x[-rows:], bias), together[-rows:])


@pytest.mark.parametrize("zeros", [False, True])
def test_whole_numbers_are_exact(zeros):
    """Inputs of ±127 and values at the ends of their range: nothing saturates, nothing is rounded."""
    packed, _ = int4(16, 256, 64, zeros=zeros)
    packed = replace(packed, scales=torch.ones_like(packed.scales))
    values = packed.dequantize(torch.float64)
    signs = torch.randint(0, 2, (9, 256)) * 2 - 1
    for x in (torch.full((9, 256), 127.0), signs * 127.0):
        assert torch.equal(in_strips(packed).linear(x).double(), x.double() @ values.t())


def test_inputs_in_another_order_are_taken_in_it():
    packed, _ = int4(32, 256, 64, zeros=True)
    order = torch.randperm(256)
    sorted_by_group = in_strips(replace(packed, order=order.to(torch.int32)))
    x = torch.randn(5, 256)
    assert torch.equal(sorted_by_group.linear(x), in_strips(packed).linear(x[:, order]))
    both = JoinedWeight((sorted_by_group, in_strips(packed)))
    ours = CpuOps(compiled_library()).linear(x, ExpertLinear(both, 1)[0])
    assert torch.equal(ours[:, :32], sorted_by_group.linear(x))


def test_what_kernels_do_not_take_stays_as_it_is():
    for packed, _ in (int4(24, 256, 32, zeros=False), int4(32, 200, None, zeros=False), fp8(32, 128, (8, 128))):
        assert in_strips(packed) is packed
    whole = JoinedWeight((int4(16, 64, 32, zeros=False)[0], torch.randn(5, 64)))
    assert in_strips(whole) is whole


SCHEMES = {
    "int4": partial(int4, group=64, zeros=True),
    "mxfp4": mxfp4,
    "fp8": partial(fp8, block=(32, 64)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_experts_are_read_as_they_are_packed(scheme, weighs_inputs):
    """An expert gives what products of its own strips give, in any batch."""
    run = run_of("qwen3 experts int4", Knobs(), rounds=False)
    described = replace(mixers_of(run.runner.model, ExpertsMixer)[0].described, weighs_inputs=weighs_inputs)
    ops, experts, make = CpuOps(compiled_library()), 4, SCHEMES[scheme]
    gate_up = ExpertLinear(in_strips(make(experts * 2 * 96, 192)[0]), experts, torch.randn(experts, 192))
    down = ExpertLinear(in_strips(make(experts * 192, 96 if scheme != "int4" else 128)[0]), experts)
    if scheme == "int4":
        gate_up = ExpertLinear(in_strips(make(experts * 2 * 128, 192)[0]), experts, torch.randn(experts, 256))
    x, ids = torch.randn(70, 192) * 0.01, torch.stack([torch.randperm(experts)[:3] for _ in range(70)])
    routing, expected = Routing(ids, torch.rand(70, 3)), torch.zeros(70, 192)
    for expert in range(experts):
        rows, at = (ids == expert).nonzero(as_tuple=True)
        shares = routing.shares[rows, at, None]
        taken = x[rows] * shares if weighs_inputs else x[rows]
        made = ops.expert(taken, gate_up[expert], down[expert], described)
        expected.index_add_(0, rows, made if weighs_inputs else made * shares)
    visited = VisitedExperts(ops, gate_up, down, described, 0)
    together = visited(x, routing)
    assert_close(together, expected, 1e-5)
    for rows in (1, 3, 33):
        assert torch.equal(visited(x[-rows:], Routing(ids[-rows:], routing.shares[-rows:])), together[-rows:])


PROMPTS = [list(range(3, 60)), list(range(40, 97)), list(range(70, 90))]
WIDER = {"qwen3 experts int4": 96, "qwen3 experts fp8": 64}


def spec_of(name: str, *, rounds: bool = True) -> ModelSpec:
    fields = QUANTIZED[name]
    if name in WIDER:
        fields = {**fields, "moe_intermediate_size": WIDER[name]}
    return on_cpu(from_config(fields, name), "auto" if rounds else "float32")


def run_of(name: str, knobs: Knobs, *, rounds: bool = True) -> Run:
    spec = spec_of(name, rounds=rounds)
    made = load_weights(None, spec, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=7)
    return generate_with(spec, made, PROMPTS, 4, knobs)


def weights_in(run: Run) -> list:
    layers = [each for layer in run.runner.model.layers for each in getattr(layer, "layers", [layer])]
    held = [value for layer in layers for block in layer.blocks for value in vars(block.mixer).values()]
    return [part for linear in held if (w := getattr(linear, "weight", None)) is not None for part in parts_of(w)]


def parts_of(weight) -> tuple:
    return weight.parts if isinstance(weight, JoinedWeight) else (weight,)


@pytest.mark.parametrize("name", QUANTIZED)
def test_models_run_in_strips(name, monkeypatch):
    """As with plain products of inputs in 8 bits, in chunks of any size; as many bytes as the plan counts."""
    run, in_chunks = run_of(name, Knobs()), run_of(name, Knobs(chunk_tokens=16))
    experts = mixers_of(run.runner.model, ExpertsMixer)
    kinds = {type(weight) for weight in weights_in(run)}
    assert PackedWeight not in kinds and (StripWeight in kinds or experts)
    assert all(isinstance(mixer, CpuExperts) for mixer in experts)
    assert run.runner.weights_bytes == weight_bytes(replace(spec_of(name), dtype="float32"))
    plain = PackedWeight.linear

    def of_rounded_inputs(self: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return plain(self, x if self.kind == "fp8" else in_8_bits(x).float(), bias)

    monkeypatch.setattr(PackedWeight, "linear", of_rounded_inputs)
    expected = run_of(name, Knobs(), rounds=False)
    for ours, chunked, theirs in zip(run.logits, in_chunks.logits, expected.logits, strict=True):
        # A sum that differs in its last bit may be rounded to the next of 8 bits.
        assert (ours[0] - theirs[0]).abs().max() <= 0.03 * theirs[0].abs().max()
        assert (ours[0] - chunked[0]).abs().max() <= 0.03 * theirs[0].abs().max()
