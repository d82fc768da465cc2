"""Layers of experts on a GPU: checked against float64, timed against the bytes they must read.

Errors may be 1.5 times those of plain torch in bf16 over the dequantised experts. Routing is random and even; outputs
hold NaN before.

    python3 -m bench.gpu_checks.experts               checks, a table of times, and a sweep of launches
    python3 -m bench.gpu_checks.experts table         times as planned
    python3 -m bench.gpu_checks.experts sweep [ROWS]  every launch of each product
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from bench.gpu_checks.fused import ALLOWED, CUDA, Checks, nans, values
from bench.timing import microseconds
from windowpane.lowering.gpu.kernels.experts import Boxed, Few, Grouped, Launches, plan_experts, run_experts
from windowpane.lowering.gpu.kernels.experts_activation import NO_ACTIVATION, code_of
from windowpane.lowering.gpu.kernels.experts_few import few_product
from windowpane.lowering.gpu.kernels.experts_grouped import grouped_product
from windowpane.lowering.gpu.kernels.experts_hopper import (
    PLAIN_ROWS,
    STAGES,
    boxed_product,
    gather_rows,
    takes_boxes,
    takes_rows,
)
from windowpane.lowering.gpu.kernels.experts_sorted import sort_pairs
from windowpane.lowering.gpu.kernels.routing import route
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.routing import Routing
from windowpane.models.packing import PackedForm

BF16 = torch.bfloat16
ROOF_TB = 4.3
ROWS = (1, 4, 8, 16, 64, 256, 1024, 8192)
# Random routings taken in turn: together they read more than the L2 cache holds.
ROUTINGS = 8
# Processes that compile a sweep's launches before it is timed.
COMPILERS = 8


@dataclass(frozen=True)
class Layer:
    hidden: int
    width: int
    experts: int
    chosen: int
    kind: str = "plain"
    group: int | None = None
    zeros: bool = False
    limit: float | None = None
    activation: str = "silu"


LAYERS = {
    "Gemma 4 26B-A4B bf16": Layer(2816, 704, 128, 8, activation="gelu_pytorch_tanh"),
    "Gemma 4 26B-A4B int4 g128": Layer(2816, 704, 128, 8, "int4", 128, activation="gelu_pytorch_tanh"),
    "gpt-oss-20b mxfp4": Layer(2880, 2880, 32, 4, "mxfp4", 32, limit=7.0),
}
SMALL = {
    "bf16": Layer(704, 192, 12, 3),
    "bf16 relu2": Layer(512, 200, 9, 4, activation="relu2"),
    "bf16 clamped": Layer(2880, 360, 8, 4, limit=7.0),
    "int4 g32": Layer(704, 192, 12, 3, "int4", 32),
    "int4 g64 zeros": Layer(704, 192, 12, 3, "int4", 64, zeros=True),
    "int4 g128": Layer(768, 704, 12, 3, "int4", 128),
    "int4 channel zeros": Layer(704, 192, 12, 3, "int4", None, zeros=True),
    "mxfp4": Layer(2880, 288, 8, 4, "mxfp4", 32, limit=7.0),
    "fp8 channel": Layer(704, 192, 12, 3, "fp8"),
    "fp8 block": Layer(768, 256, 12, 3, "fp8", 128),
}

FEW_PLAIN = [Few(outputs, warps) for outputs in (2, 4, 8) for warps in (1, 2, 4)]
FEW_PACKED = [
    Few(outputs, warps, stages) for outputs in (16, 32, 64) for warps, stages in ((1, 4), (2, 3), (2, 4), (4, 3))
]
GROUPED_PLAIN = [
    *(Grouped(rows, outputs, step, 4, stages) for rows in (16, 32) for outputs, step, stages in (
        (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 6), (128, 128, 3), (128, 128, 4), (64, 256, 3))),
    *(Grouped(64, outputs, 64, warps, stages) for outputs, warps, stages in ((128, 4, 4), (128, 8, 4), (256, 8, 4))),
    *(Grouped(128, outputs, 64, warps, stages) for outputs, warps, stages in (
        (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (256, 8, 3), (256, 8, 4))),
    *(Grouped(rows, outputs, step, 4, stages, tma=True) for rows in (16, 32)
      for outputs, step, stages in ((128, 64, 4), (128, 64, 6), (128, 128, 3), (128, 128, 4))),
    Grouped(64, 128, 64, 4, 4, tma=True), Grouped(64, 256, 64, 8, 4, tma=True),
    *(Grouped(128, outputs, 64, warps, stages, tma=True)
      for outputs, warps, stages in ((128, 4, 4), (128, 8, 4), (256, 8, 3), (256, 8, 4))),
]  # fmt: skip
GROUPED_PACKED = [
    *(Grouped(rows, outputs, 128, warps, stages) for rows in (16, 32)
      for outputs, warps, stages in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3))),
    *(Grouped(64, 128, 128, warps, stages) for warps, stages in ((4, 2), (8, 2), (8, 3))),
    *(Grouped(128, outputs, 128, 8, stages) for outputs, stages in ((128, 2), (128, 3), (256, 2))),
]  # fmt: skip


def checks() -> Checks:
    return [
        *((f"experts {name}", partial(agrees, layer)) for name, layer in SMALL.items()),
        ("experts of several ranks", ranks),
        ("experts in a graph of dependent launches", in_a_graph),
        ("experts of a row alone", alone),
        *((f"routing by {scoring}", partial(routes, scoring)) for scoring in ("softmax", "chosen_softmax", "sigmoid")),
    ]


# -- checks --------------------------------------------------------------------------------------------------------


def agrees(layer: Layer) -> str:
    case, worst = Case(layer), (0.0, 0.0)
    forms: list[tuple[int, Launches | None]]
    forms = [(rows, None) for rows in (1, 3, 8, 9, 40, 300, 2000)]
    forms += [(33, (Grouped(size, 128, 128, 4, 2),) * 2) for size in (16, 32, 64, 128)]
    if layer.kind == "plain":
        forms += [(33, (Grouped(size, 128, 64, 4, 3, tma=True),) * 2) for size in (16, 128)]
    has_boxes = layer.activation != "relu2"
    sizes = [
        size
        for size in STAGES
        if has_boxes and takes_boxes(case.gate_up, BF16, size) and takes_boxes(case.down, BF16, size)
    ]
    forms += [(rows, (Boxed(size),) * 2) for rows in (5, 33, 400) for size in sizes]
    for rows, launches in forms:
        worst = max(worst, compare(case, rows, launches))
    return f"{worst[0]:.1e} (torch {worst[1]:.1e})"


def compare(case: Case, rows: int, launches: Launches | None) -> tuple[float, float]:
    layer, x, routing = case.layer, values(rows, case.layer.hidden), case.routing(rows)
    out = nans(rows, layer.hidden)
    run_experts(x, routing, case.gate_up, case.down, **case.options, out=out, launches=launches)
    exact = in_torch(case, x.double(), routing)
    errors = relative(out, exact), relative(in_torch(case, x, routing), exact)
    about = f"{rows} rows, {launches or 'planned'}: error {errors[0]:.1e} (torch {errors[1]:.1e})"
    assert errors[0] <= ALLOWED * errors[1], about
    again = run_experts(x, routing, case.gate_up, case.down, **case.options, launches=launches)
    assert torch.equal(out, again), f"{about}: two runs differ"
    return errors


def ranks() -> str:
    """What two ranks find adds up to the whole."""
    case = Case(SMALL["bf16"])
    layer, half = case.layer, case.layer.experts // 2
    for rows in (2, 50):
        x, routing = values(rows, layer.hidden), case.routing(rows)
        total = torch.zeros(rows, layer.hidden, device=CUDA, dtype=torch.float64)
        for first in (0, half):
            part = case.gate_up.view(layer.experts, -1)[first : first + half].reshape(-1, layer.hidden)
            back = case.down.view(layer.experts, -1)[first : first + half].reshape(-1, layer.width)
            biases = {name: bias[first : first + half] for name, bias in case.biases.items()}
            total += run_experts(
                x, routing, part, back, **(case.options | biases), first_expert=first, local_experts=half
            ).double()
        error = relative(total, in_torch(case, x.double(), routing))
        assert error < 8e-3, f"{rows} rows: error {error:.1e}"
    return f"{error:.1e}"


def in_a_graph() -> str:
    """Layers one after another by PDL, replayed with other rows, against the same launches in order."""
    case = Case(SMALL["bf16"])
    router = values(case.layer.experts, case.layer.hidden)
    for rows in (2, 40):
        start = values(rows, case.layer.hidden)
        x = start.clone()

        def chain(wait: bool, x: torch.Tensor = x) -> None:
            for _ in range(6):
                found = route(x, router, None, None, None, chosen=case.layer.chosen, scoring="softmax",
                              renormalize=True, pdl=not wait)  # fmt: skip
                y = run_experts(x, found, case.gate_up, case.down, **case.options, pdl=not wait)
                if wait:
                    torch.cuda.synchronize()
                x.copy_(F.rms_norm(x + y, x.shape[-1:]))

        chain(wait=True)
        want = x.clone()
        x.copy_(start)
        chain(wait=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(wait=False)
        for turn in range(20):
            x.copy_(start)
            graph.replay()
            assert torch.equal(x, want), f"{rows} rows, turn {turn}: differs from launches in order"
    return ""


def alone() -> str:
    """A row's bits are those it has in a batch that is multiplied in the same form."""
    for name in ("bf16", "int4 g128", "mxfp4"):
        case = Case(SMALL[name])
        x, routing = values(300, case.layer.hidden), case.routing(300)
        launches = plan_experts(300, case.layer.chosen, case.layer.experts, BF16, case.gate_up, case.down)
        together = run_experts(x, routing, case.gate_up, case.down, **case.options)
        for row in (0, 77, 299):
            one = slice(row, row + 1)
            found = run_experts(x[one], Routing(routing.ids[one], routing.shares[one]), case.gate_up, case.down,
                                **case.options, launches=launches)  # fmt: skip
            assert torch.equal(found, together[one]), f"{name}, row {row}"
    return ""


def routes(scoring: str) -> str:
    """Chosen experts have the best float64 logits, up to what float32 can tell apart; rows do not depend on others."""
    worst = 0.0
    for rows, hidden, experts, chosen, dtype in ((1, 2816, 128, 8, BF16), (70, 2880, 32, 4, BF16),
                                                 (300, 7168, 512, 22, torch.float32)):  # fmt: skip
        x, weight = values(rows, hidden), (values(experts, hidden) / hidden**0.5).to(dtype)
        found = route(x, weight, None, None, None, chosen=chosen, scoring=scoring, renormalize=True)
        logits = x.double() @ weight.double().t()
        best = logits.topk(chosen).values
        mine = logits.gather(1, found.ids.long())
        worst = max(worst, float((best - mine).abs().max()))
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(scoring, logits).gather(
            1, found.ids.long()
        )
        shares = scores.softmax(-1) if scoring == "chosen_softmax" else scores / scores.sum(-1, keepdim=True)
        assert float((found.shares - shares).abs().max()) < 1e-4
        one = route(x[-1:], weight, None, None, None, chosen=chosen, scoring=scoring, renormalize=True)
        assert torch.equal(one.ids[0], found.ids[-1]) and torch.equal(one.shares[0], found.shares[-1])
    assert worst < 1e-4, f"a logit {worst:.1e} below the best was chosen"
    return f"{worst:.1e}"


def in_torch(case: Case, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """In the dtype of `x`, expert by expert; results of bf16 are added in float32."""
    layer, out = case.layer, torch.zeros(len(x), case.layer.hidden, device=CUDA, dtype=torch.float64)
    for expert in range(layer.experts):
        row, place = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up, down = (dense(w, expert, layer.experts, x.dtype) for w in (case.gate_up, case.down))
        biases = [bias[expert].to(x.dtype) for bias in case.biases.values()] or [None, None]
        y = F.linear(activated(F.linear(x[row], gate_up, biases[0]), layer), down, biases[1])
        out.index_add_(0, row, y.double() * routing.shares[row, place, None].double())
    return out if x.dtype == torch.float64 else out.to(x.dtype)


def activated(y: torch.Tensor, layer: Layer) -> torch.Tensor:
    if layer.activation == "relu2":
        return y.relu().square()
    gate, up = y.chunk(2, -1)
    if layer.limit is not None:
        gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
        return gate * (1.702 * gate).sigmoid() * (up + 1)
    return (F.silu(gate) if layer.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def dense(weight: torch.Tensor | PackedWeight, expert: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    outputs = len(weight) // experts
    part = weight[expert * outputs : (expert + 1) * outputs]
    return part.dequantize(dtype) if isinstance(part, PackedWeight) else part.to(dtype)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# -- timings -------------------------------------------------------------------------------------------------------


def timings() -> None:
    print(
        f"\n{'experts':26} {'rows':>5} {'µs':>8} {'of roof':>7} {'TFLOP/s':>7} {'routing':>7} {'torch µs':>8}  launches"
    )
    for name, layer in LAYERS.items():
        case = Case(layer)
        for rows in ROWS:
            x, out = values(rows, layer.hidden), nans(rows, layer.hidden)
            routings = [case.routing(rows) for _ in range(ROUTINGS)]
            turns = cycle(routings)

            def step(x: torch.Tensor = x, out: torch.Tensor = out, turns=turns, case: Case = case) -> None:
                run_experts(x, next(turns), case.gate_up, case.down, **case.options, out=out, pdl=True)

            took = microseconds(step, repeat=ROUTINGS)
            router = values(layer.experts, layer.hidden)
            routed = microseconds(partial(_route, x, router, layer.chosen), repeat=ROUTINGS)
            beside = f"{torch_grouped(case, x, routings[0]):8.1f}" if layer.kind == "plain" and rows >= 256 else ""
            launches = plan_experts(rows, layer.chosen, layer.experts, BF16, case.gate_up, case.down)
            of_roof, flops = case.floor(routings) / took, case.flops(rows) / took / 1e6
            told = " | ".join(short(launch) for launch in launches)
            print(
                f"{name:26} {rows:5} {took:8.1f} {of_roof:7.0%} {flops:7.0f} {routed:7.1f} {beside:8}  {told}",
                flush=True,
            )
        del case
        torch.cuda.empty_cache()


def sweep(all_rows: list[int], warm: tuple[int, int] | None = None) -> None:
    """Each product by every launch: microseconds, best first, the planned one marked.

    `warm` (i, n): instead of that, compile every nth launch from the ith on.
    """
    turn = 0
    for name, layer in LAYERS.items():
        case = Case(layer)
        for rows in all_rows:
            products = Products(case, rows)
            planned = plan_experts(rows, layer.chosen, layer.experts, BF16, case.gate_up, case.down)
            for product, plan in zip(("gate_up", "down"), planned, strict=True):
                found = []
                for launch in dict.fromkeys([plan, *candidates(layer, rows)]):
                    turn += 1
                    if warm is not None and turn % warm[1] != warm[0]:
                        continue
                    with suppress(OutOfResources):
                        step = products.step(product, launch)
                        if warm is not None:
                            step()
                            continue
                        found.append((microseconds(step, repeat=ROUTINGS, rounds=5), launch))
                if warm is None:
                    found.sort()
                    floor, flops = case.floor(products.routings, product), case.flops(rows, product) / found[0][0] / 1e6
                    cells = [f"{short(launch)}{'*' if launch == plan else ''} {took:.1f}" for took, launch in found]
                    told = " | ".join(cells[:5] + [cell for cell in cells[5:] if "*" in cell])
                    print(f"{name} {rows} {product} (roof {floor:.1f} µs, {flops:.0f} TFLOP/s): {told}", flush=True)
            del products
        del case
        torch.cuda.empty_cache()


def candidates(layer: Layer, rows: int) -> list[Few | Grouped | Boxed]:
    few, grouped = (FEW_PLAIN, GROUPED_PLAIN) if layer.kind == "plain" else (FEW_PACKED, GROUPED_PACKED)
    per_expert = rows * layer.chosen / layer.experts
    sizes = (16,) if per_expert < 6 else (16, 32) if per_expert < 20 else (32, 64) if per_expert < 50 else (64, 128)
    fitting = [launch for launch in grouped if launch.rows in (sizes if per_expert < 200 else (128,))]
    kernels = {"mxfp4": list(STAGES), "plain": [PLAIN_ROWS]}.get(layer.kind, [])
    boxed = [Boxed(size) for size in kernels if size in sizes]
    return [*few] if rows <= 2 else [*few[1::2], *boxed, *fitting] if rows <= 16 else [*boxed, *fitting]


class Products:
    """Both products of a layer by themselves, with one routing after another."""

    def __init__(self, case: Case, rows: int) -> None:
        layer, pairs = case.layer, rows * case.layer.chosen
        self.case, self.routings = case, [case.routing(rows) for _ in range(ROUTINGS)]
        self.x, self.inner = values(rows, layer.hidden), values(pairs, layer.width)
        self.results, self.out = nans(pairs, layer.hidden), nans(rows, layer.hidden)

    def step(self, product: str, launch: Few | Grouped | Boxed) -> Callable[[], None]:
        layer, is_first = self.case.layer, product == "gate_up"
        weight = self.case.gate_up if is_first else self.case.down
        x = self.x if is_first else self.inner
        code = code_of(layer.activation, layer.limit) if is_first else NO_ACTIVATION.value
        common = {"local": layer.experts, "activation": code, "limit": layer.limit or 0.0, "alpha": 1.702, "pdl": True}
        turns = cycle(self.routings)
        if isinstance(launch, Few):
            out = self.inner if is_first else self.out
            return lambda: few_product(
                x, weight, None, next(turns), out, first=0, weighted=not is_first, launch=launch, **common
            )
        out = self.inner if is_first else self.results
        made = [(routing, sort_pairs(routing, 0, layer.experts, launch.rows, pdl=False)) for routing in self.routings]
        both = cycle(made)
        if isinstance(launch, Boxed):
            gathers = is_first and not takes_rows(weight, code)
            read = cycle([(gather_rows(x, s, r, pdl=False) if gathers else x, s) for r, s in made])

            def boxed() -> None:
                rows, by_expert = next(read)
                by_expert.count[1:].zero_()  # as sorting does
                boxed_product(rows, weight, None, by_expert, out, chosen=layer.chosen, launch=launch, **common)

            return boxed

        def grouped() -> None:
            routing, by_expert = next(both)
            grouped_product(x, weight, None, routing, by_expert, out, weighted=False, launch=launch, **common)

        return grouped


def torch_grouped(case: Case, x: torch.Tensor, routing: Routing) -> float:
    """Both products by torch's own grouped product of sorted rows, without sorting, activation and sum."""
    layer = case.layer
    order = routing.ids.flatten().sort(stable=True).indices
    counts = routing.ids.flatten().bincount(minlength=layer.experts)
    ends = counts.cumsum(0).int()
    gate_up = case.gate_up.view(layer.experts, -1, layer.hidden).transpose(1, 2)
    down = case.down.view(layer.experts, -1, layer.width).transpose(1, 2)
    rows, inner = x[order // layer.chosen], values(len(order), layer.width)

    def step() -> None:
        torch._grouped_mm(rows, gate_up, offs=ends)
        torch._grouped_mm(inner, down, offs=ends)

    return microseconds(step, repeat=3)


# ------------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """The weights of a layer, drawn anew."""

    layer: Layer
    biases: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        layer = self.layer
        has_biases = layer.limit is not None
        outputs = {"gate_up_bias": self.sets * layer.width, "down_bias": layer.hidden}
        self.biases = {name: values(layer.experts, count) for name, count in outputs.items()} if has_biases else {}

    @property
    def sets(self) -> int:
        return 1 if self.layer.activation == "relu2" else 2

    @cached_property
    def gate_up(self) -> torch.Tensor | PackedWeight:
        return self._weight(self.layer.experts * self.sets * self.layer.width, self.layer.hidden)

    @cached_property
    def down(self) -> torch.Tensor | PackedWeight:
        return self._weight(self.layer.experts * self.layer.hidden, self.layer.width)

    @property
    def options(self) -> dict:
        layer = self.layer
        return {"experts": layer.experts, "activation": layer.activation, "limit": layer.limit} | self.biases

    def routing(self, rows: int) -> Routing:
        chosen = torch.rand(rows, self.layer.experts, device=CUDA).topk(self.layer.chosen).indices
        return Routing(chosen.int(), torch.rand(rows, self.layer.chosen, device=CUDA) + 0.1)

    def floor(self, routings: list[Routing], product: str | None = None) -> float:
        """Microseconds that reading the experts which are needed takes."""
        weights = {"gate_up": [self.gate_up], "down": [self.down], None: [self.gate_up, self.down]}[product]
        needed = sum(len(routing.ids.unique()) for routing in routings) / len(routings)
        return needed / self.layer.experts * sum(weight.nbytes for weight in weights) / ROOF_TB / 1e6

    def flops(self, rows: int, product: str | None = None) -> float:
        sets = {"gate_up": self.sets, "down": 1, None: self.sets + 1}[product]
        return 2 * rows * self.layer.chosen * sets * self.layer.hidden * self.layer.width

    def _weight(self, outputs: int, inputs: int) -> torch.Tensor | PackedWeight:
        layer = self.layer
        if layer.kind == "plain":
            return values(outputs, inputs) / inputs**0.5
        dtype = "float32" if layer.kind == "fp8" else None
        scale_outputs = 128 if layer.kind == "fp8" and layer.group else 1
        form = PackedForm(layer.kind, outputs, inputs, layer.group, scale_outputs, layer.zeros, scale_dtype=dtype)
        weight = PackedWeight.empty(form, BF16, CUDA)
        limits = torch.iinfo(weight.units.dtype)
        weight.units.random_(limits.min, limits.max)
        if layer.kind == "mxfp4":
            weight.scales.random_(119, 124)
            return weight
        if layer.kind == "fp8":
            weight.units.bitwise_and_(0xBFBFBFBF - 2**32)  # below 2, and no NaN
        weight.scales.copy_((torch.rand(weight.scales.shape, device=CUDA) + 0.5) * 0.2 / inputs**0.5)
        if weight.zeros is not None:
            weight.zeros.random_(-(2**31), 2**31 - 1)
        return weight


def _route(x: torch.Tensor, router: torch.Tensor, chosen: int) -> None:
    route(x, router, None, None, None, chosen=chosen, scoring="softmax", renormalize=True, pdl=True)


def short(launch: Few | Grouped | Boxed) -> str:
    if isinstance(launch, Boxed):
        return f"boxes {launch.rows}"
    if isinstance(launch, Few):
        return f"few {launch.outputs} w{launch.warps} s{launch.stages}"
    return f"{launch.outputs}×{launch.rows}×{launch.step} w{launch.warps} s{launch.stages}{' tma' * launch.tma}"


def compile_first(all_rows: list[int]) -> None:
    """Launches of a sweep, by several processes at once: what they compile stays in the cache."""
    rows = [str(count) for count in all_rows]
    command = [sys.executable, "-m", "bench.gpu_checks.experts", "warm"]
    started = [subprocess.Popen([*command, str(i), *rows]) for i in range(COMPILERS)]
    for process in started:
        process.wait()


if __name__ == "__main__":
    word, *rest = sys.argv[1:] or ["all"]
    if word == "warm":
        sweep([int(count) for count in rest[1:]], (int(rest[0]), COMPILERS))
    if word == "all":
        for name, check in checks():
            began = time.perf_counter()
            try:
                told = "ok   " + check()
            except Exception as error:
                told = f"FAIL {type(error).__name__}: {error}"[:600]
            print(f"{name}: {told} ({time.perf_counter() - began:.1f} s)", flush=True)
    if word in ("all", "table"):
        timings()
    if word in ("all", "sweep"):
        swept = [int(count) for count in rest] or [1, 8, 256, 8192]
        compile_first(swept)
        sweep(swept)
