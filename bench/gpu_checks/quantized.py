"""Products with quantized weights on a GPU: checked against float64, timed beside bf16 cuBLAS.

Few rows may be no worse than 1.5 times plain torch over the dequantised matrix in bf16. Inputs are new in every run and
outputs hold NaN before.

    python3 -m bench.gpu_checks.quantized             timings
    python3 -m bench.gpu_checks.quantized 1 8 128     every launch with so many rows
    python3 -m bench.gpu_checks.quantized ways 64 512 every way to multiply so many rows
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from bench.gpu_checks.fused import ALLOWED, CUDA, Checks, nans, values
from bench.timing import microseconds
from windowpane.lowering.gpu.kernels.hopper_tiled import STAGES, plan_shares
from windowpane.lowering.gpu.kernels.packed import (
    MOST_ROWS,
    SPLIT_ROWS,
    Launch,
    Shares,
    choose_launch,
    dequantize_into,
    dequantized_product,
    packed_linear,
    packed_product,
    plan_launch,
)
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.ops import ACTIVATIONS
from windowpane.models.packing import PackedForm

BF16 = torch.bfloat16

# Inputs and outputs of Gemma 4 31B: gate and up, down, sliding q|k|v and output, full q|k and output.
PRODUCTS = [(5376, 43008), (21504, 5376), (5376, 16384), (8192, 5376), (5376, 18432), (16384, 5376)]
# How often each product occurs in a step of Gemma 4 31B.
TIMES = [60, 60, 50, 50, 10, 10]

# Sizes of slices that are dequantised at once, to choose by: an H200 has 50 MB of L2.
SLICE_BYTES = (16 << 20, 32 << 20, 64 << 20)

# (kind, group, block of outputs, zero points)
SCHEMES: dict[str, tuple[str, int | None, int, bool]] = {
    "int4 g32": ("int4", 32, 1, False),
    "int4 g32 zeros": ("int4", 32, 1, True),
    "int4 g64 zeros": ("int4", 64, 1, True),
    "int4 g128": ("int4", 128, 1, False),
    "int4 channel zeros": ("int4", None, 1, True),
    "fp8 channel": ("fp8", None, 1, False),
    "fp8 block": ("fp8", 128, 128, False),
}
SHAPES = [(1, 5376, 4000), (2, 1000, 333), (5, 2560, 256), (8, 21504, 5376), (16, 640, 1111), (17, 5376, 700)]
SHAPES += [(64, 1000, 333), (128, 5376, 5376), (200, 2560, 1000), (300, 5376, 7000)]
SHAPES += [(33, 2560, 4000), (70, 21504, 1000), (96, 8192, 5376)]

SPLIT_LAUNCHES = [
    Launch(outputs, 8, warps, stages, programs)
    for outputs, warps, programs in (
        (16, 4, 4), (16, 8, 3), (32, 2, 4), (32, 2, 6), (32, 2, 8), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 2, 2),
        (64, 2, 4), (64, 4, 2), (64, 4, 3),
    )
    for stages in (3, 4)
]  # fmt: skip
TILE_LAUNCHES = [
    Launch(outputs, rows, warps, stages, programs)
    for outputs, rows, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8), (256, 128, 8))
    for stages, programs in product((2, 3, 4), (1, 2, 4))
]


def checks() -> Checks:
    return [
        *((f"quantized {name}", partial(scheme, name)) for name in SCHEMES),
        *((f"quantized {kind}", partial(dtypes, kind)) for kind in (torch.float16, torch.float32)),
        ("quantized launches", launches),
        ("quantized and reordered", reordered),
        ("quantized chain of dependent launches", dependent_launches),
    ]


# -- checks --------------------------------------------------------------------------------------------------------


def scheme(name: str) -> str:
    """Every shape that the scheme allows; the worst error is told."""
    worst = (0.0, 0.0)
    for rows, inputs, outputs in SHAPES:
        group = SCHEMES[name][1]
        if group is not None and SCHEMES[name][0] == "int4" and inputs % group:
            continue
        worst = max(worst, compare(rows, random_weight(name, outputs, inputs)))
    return f"{worst[0]:.1e} (torch {worst[1]:.1e})"


def dtypes(dtype: torch.dtype) -> str:
    worst = (0.0, 0.0)
    for name in ("int4 g32 zeros", "fp8 block"):
        for rows, inputs, outputs in SHAPES:
            if inputs % 32 == 0:
                worst = max(worst, compare(rows, random_weight(name, outputs, inputs, dtype), dtype=dtype))
    return f"{worst[0]:.1e} (torch {worst[1]:.1e})"


def launches() -> str:
    weight = random_weight("int4 g32", 4104, 1024)
    zeros = random_weight("int4 g32 zeros", 4100, 1024)
    cases: list[tuple[int, PackedWeight, Launch | Shares]]
    cases = [(rows, packed, launch) for launch in SPLIT_LAUNCHES for rows, packed in ((7, weight), (3, zeros))]
    cases += [(130, weight, launch) for launch in TILE_LAUNCHES]
    if isinstance(choose_launch(values(40, 1024), weight, nans(40, 4104)), Shares):
        cases += [(rows, weight, shares) for rows in (40, 130) for shares in share_launches(rows, 4104, 1024)]
    fit = 0
    for rows, packed, launch in cases:
        with suppress(OutOfResources):
            compare(rows, packed, launch)
            fit += 1
    return f"{fit} of {len(cases)} fit into shared memory"


def compare(
    rows: int, weight: PackedWeight, launch: Launch | Shares | None = None, dtype: torch.dtype = BF16
) -> tuple[float, float]:
    """Errors of the kernels and of plain torch, for the product and its gated form."""
    outputs, inputs = weight.shape
    x, bias = values(rows, inputs).to(dtype), values(outputs).to(dtype)
    matrix = weight.dequantize(dtype)
    exact = F.linear(x.double(), weight.dequantize(torch.float64), bias.double())
    # In float32 torch's own products are not exact either, but closer than half precision ever is.
    floor = 1e-5 if dtype == torch.float32 else 0.0

    def once() -> torch.Tensor:
        if launch is None and rows > MOST_ROWS:
            return packed_product(x, weight, bias)
        out = nans(rows, outputs, dtype=dtype)
        packed_linear(x, weight, out, bias, launch=launch)
        return out

    found = once()
    errors = relative(found, exact), relative(F.linear(x, matrix, bias), exact)
    about = f"{rows} × {inputs} → {outputs}, {weight.kind} {weight.group_inputs}, {launch}"
    assert errors[0] <= max(ALLOWED * errors[1], floor), f"{about}: error {errors[0]:.1e} (torch {errors[1]:.1e})"
    assert torch.equal(found, once()), f"{about}: two runs differ"
    expanded = nans(outputs, inputs, dtype=dtype)
    dequantize_into(weight, expanded)
    assert torch.equal(weight.restore_order(expanded), matrix), f"{about}: dequantised matrix"
    if rows <= SPLIT_ROWS and outputs % 2 == 0:
        x = x / 8
        activation = ACTIVATIONS["gelu_pytorch_tanh"]
        out = nans(rows, outputs // 2, dtype=dtype)
        packed_linear(x, weight, out, activation="gelu_pytorch_tanh", launch=launch)
        gate, up = F.linear(x.double(), weight.dequantize(torch.float64)).chunk(2, -1)
        plain_gate, plain_up = F.linear(x, matrix).chunk(2, -1)
        gated = relative(out, activation(gate) * up), relative(activation(plain_gate) * plain_up, activation(gate) * up)
        assert gated[0] <= max(ALLOWED * gated[1], floor), f"{about}: gated {gated[0]:.1e} (torch {gated[1]:.1e})"
    return errors


def reordered() -> str:
    weight = random_weight("int4 g64 zeros", 4000, 2560)
    weight = weight.permute_inputs(torch.randperm(2560, device=CUDA))
    assert weight.order is not None
    worst = max(compare(rows, weight) for rows in (1, 40, 300))
    return f"{worst[0]:.1e} (torch {worst[1]:.1e})"


def dependent_launches() -> str:
    """A chain in which each product needs the one before, overlapped by PDL in a graph, against the same in order."""
    width, inner, layers = 2560, 10240, 16  # more, and what weights have in common would grow beyond bfloat16
    into = [random_weight("int4 g32", 2 * inner, width) for _ in range(layers)]
    back = [random_weight("int4 g32", width, inner) for _ in range(layers)]
    told = []
    for rows in (20, 32):  # fewer never overlap
        start = values(rows, width)
        x, mid = start.clone(), nans(rows, inner)

        def chain(wait: bool, x: torch.Tensor = x, mid: torch.Tensor = mid, rows: int = rows, pdl: bool = True) -> None:
            for layer, (first, second) in enumerate(zip(into, back, strict=True)):
                if rows <= SPLIT_ROWS and layer == 0:  # many gates in a row would end in zeros
                    packed_linear(x, first, mid, activation="silu")
                else:
                    packed_linear(x, first[:inner], mid, pdl=pdl)
                if wait:
                    torch.cuda.synchronize()
                packed_linear(mid, second, x, pdl=pdl)
                if wait:
                    torch.cuda.synchronize()

        chain(wait=True)
        want = x.clone()
        assert want.isfinite().all()
        assert want.abs().max() > 0
        graph = torch.cuda.CUDAGraph()
        x.copy_(start)
        chain(wait=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            chain(wait=False)
        for turn in range(20):
            x.copy_(start)
            graph.replay()
            differ = int((x != want).sum())
            assert not differ, f"{rows} rows, turn {turn}: {differ} of {x.numel()} differ from launches in order"
        times = [microseconds(partial(chain, wait=False, pdl=pdl), repeat=2) / layers for pdl in (False, True)]
        told.append(f"{rows} rows: in order {times[0]:.1f}, overlapped {times[1]:.1f} µs a layer")
    return "; ".join(told)


# -- timings -------------------------------------------------------------------------------------------------------


def timings() -> None:
    for name in ("int4 g32", "int4 g32 zeros", "int4 g128", "fp8 channel"):
        table(name)


def table(name: str) -> None:
    """Each product of Gemma 4 31B as planned, gated where that is how it runs, beside bf16; and a step's sum."""
    print(f"\n{name:16} {'rows':>4} {'launch':>16} {'µs':>8} {'TB/s':>5} {'TFLOP/s':>7} {'bf16 µs':>8} {'ratio':>6}")
    for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 2048):
        totals = [0.0, 0.0]
        for (inputs, outputs), times in zip(PRODUCTS, TIMES, strict=True):
            weights, plain = copies(name, outputs, inputs), plain_copies(outputs, inputs)
            x, out = values(rows, inputs), nans(rows, outputs)
            is_gated = outputs == 43008 and rows <= SPLIT_ROWS
            step = partial(_gated, x, out[:, : outputs // 2]) if is_gated else partial(_product, x, None)
            took = microseconds(in_turn(weights, step), repeat=max(5, len(weights)))
            beside = microseconds(in_turn(plain, partial(_cublas, x, out)), repeat=max(5, len(plain)))
            totals = [totals[0] + times * took, totals[1] + times * beside]
            launch = short(choose_launch(x, weights[0], out)) if rows <= MOST_ROWS else "dequantised"
            flops = 2 * rows * inputs * outputs / took / 1e6
            rate = weights[0].nbytes / took / 1e6
            print(
                f"{f'{inputs} → {outputs}':16} {rows:4} {launch:>16} {took:8.1f} {rate:5.2f} {flops:7.0f} "
                f"{beside:8.1f} {beside / took:6.2f}",
                flush=True,
            )
            del weights, plain
            torch.cuda.empty_cache()
        print(f"{'a step':16} {rows:4} {'':16} {totals[0]:8.0f} {'':13} {totals[1]:8.0f} {totals[1] / totals[0]:6.2f}")


def sweep(rows: int, name: str = "int4 g32") -> None:
    """Every launch for each product, to choose the plan by: microseconds, best first, the planned one marked."""
    tile_rows = 8 if rows <= 8 else 16
    for inputs, outputs in PRODUCTS[:4]:
        weights = copies(name, outputs, inputs)
        x, out = values(rows, inputs), nans(rows, outputs)
        planned = choose_launch(x, weights[0], out)
        candidates: list[Launch | Shares]
        if rows <= SPLIT_ROWS:
            candidates = [launch._replace(rows=tile_rows) for launch in SPLIT_LAUNCHES]
        elif isinstance(planned, Shares):
            candidates = [*share_launches(rows, outputs, inputs), plan_launch(rows, outputs, inputs, _processors())]
        else:
            candidates = [*TILE_LAUNCHES]
        found = []
        for launch in dict.fromkeys([planned, *candidates]):
            with suppress(OutOfResources):
                step = in_turn(weights, partial(_linear, x, out, launch))
                found.append((microseconds(step, repeat=max(5, len(weights))), launch))
        found.sort()
        cells = [f"{short(launch)}{'*' if launch == planned else ''} {took:.1f}" for took, launch in found]
        shown = cells[:8] + [cell for cell in cells[8:] if "*" in cell]
        print(f"{rows} rows {f'{inputs} → {outputs}':16}", " | ".join(shown), flush=True)
        del weights
        torch.cuda.empty_cache()


def share_launches(rows: int, outputs: int, inputs: int) -> list[Shares]:
    """Lower tiles, fewer stages, fewer programs, and as many as share no more than one tile each."""
    planned = plan_shares(rows, outputs, inputs, _processors())
    found = []
    for tile_rows in {planned.rows, planned.rows // 2} & STAGES.keys():
        shares = plan_shares(rows, outputs, inputs, _processors(), tile_rows)
        tiles = shares.work // shares.blocks
        whole = shares.programs // tiles * tiles or shares.programs
        for programs in {shares.programs, whole, min(3 * tiles, shares.programs)}:
            stages = range(max(2, shares.stages - 2), shares.stages + 1)
            found += [shares._replace(programs=programs, stages=count) for count in stages]
    return found


def ways(all_rows: list[int], name: str = "int4 g32") -> None:
    """Each product of Gemma 4 31B by the kernels of few rows, dequantised, and in bf16: where one begins to pay."""
    print(
        f"\n{name:16} {'rows':>4} {'launch':>20} {'µs':>8} {'TFLOP/s':>7} {'bf16':>8}  dequantised in "
        f"{', '.join(f'{size >> 20}' for size in SLICE_BYTES)} MB"
    )
    for rows in all_rows:
        totals = [0.0] * (2 + len(SLICE_BYTES))
        for (inputs, outputs), times in zip(PRODUCTS, TIMES, strict=True):
            weights, plain = copies(name, outputs, inputs), plain_copies(outputs, inputs)
            x, out = values(rows, inputs), nans(rows, outputs)
            steps = [
                in_turn(weights, partial(_linear, x, out, None)),
                in_turn(plain, partial(_cublas, x, out)),
                *(in_turn(weights, partial(_dequantized, x, out, size)) for size in SLICE_BYTES),
            ]
            took = [microseconds(step, repeat=max(3, len(weights))) for step in steps]
            totals = [total + times * each for total, each in zip(totals, took, strict=True)]
            flops = 2 * rows * inputs * outputs / took[0] / 1e6
            launch = short(choose_launch(x, weights[0], out))
            print(
                f"{f'{inputs} → {outputs}':16} {rows:4} {launch:>20} {took[0]:8.1f} {flops:7.0f} {took[1]:8.1f} "
                + " ".join(f"{each:8.1f}" for each in took[2:]),
                flush=True,
            )
            del weights, plain, steps
            torch.cuda.empty_cache()
        print(
            f"{'a step':16} {rows:4} {'':20} {totals[0]:8.0f} {'':7} " + " ".join(f"{each:8.0f}" for each in totals[1:])
        )


def _processors() -> int:
    return torch.cuda.get_device_properties(CUDA).multi_processor_count


def _dequantized(x: torch.Tensor, out: torch.Tensor, slice_bytes: int, weight: PackedWeight) -> None:
    dequantized_product(x, weight, out, slice_bytes)


def _linear(x: torch.Tensor, out: torch.Tensor, launch: Launch | Shares | None, weight: PackedWeight) -> None:
    packed_linear(x, weight, out, launch=launch)


def _product(x: torch.Tensor, bias: torch.Tensor | None, weight: PackedWeight) -> None:
    packed_product(x, weight, bias)


def _gated(x: torch.Tensor, out: torch.Tensor, weight: PackedWeight) -> None:
    packed_linear(x, weight, out, activation="gelu_pytorch_tanh")


def _cublas(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


# ------------------------------------------------------------------------------------------------------------------


def random_weight(name: str, outputs: int, inputs: int, dtype: torch.dtype = BF16) -> PackedWeight:
    kind, group, scale_outputs, zeros = SCHEMES[name]
    form = PackedForm(
        "int4" if kind == "int4" else "fp8",
        outputs,
        inputs,
        group,
        scale_outputs,
        has_zeros=zeros,
        scale_dtype=None if kind == "int4" else "float32",
    )
    weight = PackedWeight.empty(form, dtype, CUDA)
    limits = torch.iinfo(weight.units.dtype)
    weight.units.random_(limits.min, limits.max)
    if kind == "fp8":
        weight.units.bitwise_and_(0xBFBFBFBF - 2**32)  # below 2, and no NaN
    weight.scales.copy_((torch.rand(weight.scales.shape, device=CUDA) + 0.5) * 0.2 / inputs**0.5)
    if weight.zeros is not None:
        weight.zeros.random_(-(2**31), 2**31 - 1)
    return weight


def copies(name: str, outputs: int, inputs: int) -> list[PackedWeight]:
    """As many as do not fit into L2 together, three times over."""
    one = random_weight(name, outputs, inputs)
    return [one, *(random_weight(name, outputs, inputs) for _ in range(math.ceil(180e6 / one.nbytes) - 1))]


def plain_copies(outputs: int, inputs: int) -> list[torch.Tensor]:
    return [values(outputs, inputs) for _ in range(math.ceil(180e6 / (2 * outputs * inputs)))]


def in_turn(weights: list[Any], step: Callable[[Any], None]) -> Callable[[], None]:
    turns = cycle(weights)
    return lambda: step(next(turns))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN where either has one, which compares as too large."""
    return float((found.double() - exact).norm() / exact.norm())


def short(launch: Launch | Shares) -> str:
    if isinstance(launch, Shares):
        return f"hopper ×{launch.rows} s{launch.stages} p{launch.programs}"
    tile = f"{launch.outputs}×{launch.rows}"
    return f"{tile} w{launch.warps} s{launch.stages}" + (f" p{launch.programs}" if launch.programs > 1 else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ways"]:
        ways([int(rows) for rows in sys.argv[2:]])
    else:
        for rows in sys.argv[1:]:
            sweep(int(rows))
    if not sys.argv[1:]:
        timings()
