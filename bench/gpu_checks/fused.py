"""The kernels between matrix products, and the products of a few rows, on a GPU.

Each is compared in bf16 with float64 arithmetic on the same inputs: its error may be 1.5 times that of plain torch in
bf16. Inputs are new in every run and outputs hold NaN before.

    python3 -m bench.gpu_checks.fused            timings
    python3 -m bench.gpu_checks.fused 1 4        every launch of a product with 1 and with 4 rows
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from bench.timing import microseconds
from windowpane.attention.triton.view import LayerView
from windowpane.lowering.gpu.kernels.gated import gated
from windowpane.lowering.gpu.kernels.heads import PageWrite, prepare_heads
from windowpane.lowering.gpu.kernels.logits import ArgmaxScratch, argmax, softcap
from windowpane.lowering.gpu.kernels.matvec import MAX_ROWS, Launch, matvec, plan_launch
from windowpane.lowering.gpu.kernels.norms import residual_norm, rms_norm
from windowpane.lowering.reference.ops import ACTIVATIONS, Ops
from windowpane.lowering.rope import RopeTables, rotate
from windowpane.models.blocks import Norm
from windowpane.models.rope import Rope

Checks = list[tuple[str, Callable[[], str]]]

EPS = 1e-6
ALLOWED = 1.5
UNTOUCHED = 0xA5
CUDA = torch.device("cuda")

# Inputs and outputs: Gemma 4 31B's gate and up, down, head and attention output; E4B's; Qwen3-0.6B's.
PRODUCTS = [
    (5376, 43008),
    (21504, 5376),
    (8192, 5376),
    (5376, 262144),
    (2560, 20480),
    (10240, 2560),
    (2560, 256),
    (256, 2560),
    (1024, 151936),
    (1024, 6144),
    (3072, 1024),
    (2048, 1024),
    (4096, 2816),
]
LAUNCHES = [
    *(Launch(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4)),
    *(Launch(rows, 4, uses_dot=True) for rows in (16, 32, 64)),
    *(Launch(64, 4, uses_dot=True, parts=parts) for parts in (2, 3, 4)),
]


def checks() -> Checks:
    products = [(1, 5376, 4000), (3, 1000, 333), (4, 2560, 256), (5, 5376, 20000), (8, 256, 2560), (8, 8192, 5376)]
    return [
        *(
            (f"norms {rows} × {width}", partial(norms, rows, width))
            for rows, width in ((1, 5376), (300, 2560), (7, 1000))
        ),
        *((f"gates {name}", partial(gates, name)) for name in ACTIVATIONS),
        ("heads of pairs", partial(heads, 32, 16, 256, latent=False)),
        ("heads of pairs, 128 dims", partial(heads, 16, 8, 128, latent=False)),
        ("heads of latents", partial(heads, 32, 4, 512, latent=True)),
        ("logits", logits),
        *((f"product {' × '.join(map(str, shape))}", partial(product, *shape)) for shape in products),
        *((f"product by {launch}", partial(product, 8, 1000, 4100, launch)) for launch in LAUNCHES),
        ("chain of dependent launches", dependent_launches),
    ]


# -- checks --------------------------------------------------------------------------------------------------------


def norms(rows: int, width: int) -> str:
    x, hidden = values(rows, width), values(rows, width)
    post, following = torch.rand(2, width, device=CUDA) + 0.5
    scalar = torch.full((1,), 0.37, device=CUDA, dtype=torch.bfloat16)
    out, mine = nans(rows, width), hidden.clone()
    rms_norm(x, post, EPS, out)
    told = [no_worse(out, Ops().norm(x, post, Norm(EPS)), norm64(x, post))]
    want = (hidden.double() + norm64(x, post)) * scalar.double()
    plain = (hidden + Ops().norm(x, post, Norm(EPS))) * scalar
    out = nans(rows, width)
    residual_norm(mine, x, post, following, scalar, EPS, out)
    told += [
        no_worse(mine, plain, want),
        no_worse(out, Ops().norm(plain, following, Norm(EPS)), norm64(want, following)),
    ]
    return ", ".join(told)


def gates(name: str) -> str:
    activation, told = ACTIVATIONS[name], []
    for rows, width in ((1, 21504), (130, 3000)):
        gate_up, out = 3 * values(rows, 2 * width), nans(rows, width)
        gate, up = gate_up.chunk(2, -1)
        gated(gate_up, out, name)
        told.append(no_worse(out, activation(gate) * up, activation(gate.double()) * up.double()))
        out = nans(rows, width)
        gated(gate, out, name, up=up)
        no_worse(out, activation(gate) * up, activation(gate.double()) * up.double())
    return ", ".join(told)


def heads(query_heads: int, kv_heads: int, dim: int, *, latent: bool) -> str:
    """37 rows, one of them padding, that are stored too, in pages beyond 4 GiB; a ring of two stripes."""
    rows, block, columns, base = 37, 16, 65, 2**24
    pairs = dim // 8 if latent else dim // 2
    every = torch.arange(dim)
    half = dim // 2
    order = torch.cat([every[:pairs], every[half : half + pairs], every[pairs:half], every[half + pairs :]])
    rope = Rope("proportional", dim, theta=1e6, partial=2 * pairs / dim)
    angles = RopeTables(4096).at(rope, torch.arange(4096, device=CUDA))
    positions = torch.randint(0, 4096, (rows,), device=CUDA, dtype=torch.int32)
    positions[5] = -1
    before = values(rows, query_heads + kv_heads * (1 if latent else 2), dim)
    projected = before[:, :, order].flatten(1) if latent else before.flatten(1)
    weights = torch.rand(2, dim, device=CUDA) + 0.5
    q_norm, k_norm = weights[:, order] if latent else weights
    q, k, v = nans(rows, query_heads, dim), nans(rows, kv_heads, dim), nans(rows, kv_heads, dim)
    section_bytes = kv_heads * block * dim * 2
    offsets = (1024,) if latent else (1024, 1024 + section_bytes)
    page_bytes = 1024 + len(offsets) * section_bytes + 512
    view = LayerView(kv_heads, dim, block, columns, True, offsets, 1, 2, torch.bfloat16)
    places = torch.randperm(rows * 2, device=CUDA, dtype=torch.int32).view(rows, 1, 2).expand(-1, columns, -1)
    table = (base + places * (page_bytes // 256)).contiguous()
    arena = torch.full((base * 256 + 2 * rows * page_bytes,), UNTOUCHED, dtype=torch.uint8, device=CUDA)
    prepare_heads(
        projected,
        positions,
        q_norm,
        k_norm,
        q,
        k,
        v,
        v_norm=True,
        angles=(angles[0][:, :pairs].contiguous(), angles[1][:, :pairs].contiguous()),
        pair_distance=pairs if latent else half,
        eps=EPS,
        latent=latent,
        page_write=PageWrite(arena, table, view),
        slots=torch.arange(rows, device=CUDA, dtype=torch.int32),
    )
    plain = _heads_in_torch(before, query_heads, kv_heads, weights, positions, angles, latent)
    exact = _heads_in_torch(before.double(), query_heads, kv_heads, weights.double(), positions, angles, latent)
    if latent:
        plain, exact = ([x[:, :, order] for x in wants] for wants in (plain, exact))
    told = [no_worse(*each) for each in zip((q, k, v), plain, exact, strict=True)]
    found = arena[base * 256 :]
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        page = (int(table[row, 0, 1]) - base) * 256
        for offset, stored in zip(offsets, (v,) if latent else (k, v), strict=True):
            section = found[page + offset : page + offset + section_bytes].view(kv_heads, block, dim * 2)
            written = section[:, position % block]
            assert torch.equal(written, stored[row].view(torch.uint8)), f"row {row} is not in its page"
            written.fill_(UNTOUCHED)
    assert bool((found == UNTOUCHED).all()), "bytes outside of the rows were written"
    return ", ".join(told)


def _heads_in_torch(
    x: torch.Tensor,
    query_heads: int,
    kv_heads: int,
    weights: torch.Tensor,
    positions: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    latent: bool,
) -> list[torch.Tensor]:
    """In float64 where x is, else as the plain decoder rounds."""
    exact = x.dtype == torch.float64

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return norm64(x, weight) if exact else Ops().norm(x, weight, Norm(EPS))

    def turned(x: torch.Tensor) -> torch.Tensor:
        at = positions.clamp(min=0).long()
        cos, sin = (a[at][:, None] for a in angles)
        return rotate(x, cos.double(), sin.double()) if exact else rotate(x.float(), cos, sin).to(torch.bfloat16)

    q, k = x[:, :query_heads], x[:, query_heads : query_heads + kv_heads]
    if latent:
        n = normed(k, None)
        return [turned(normed(q, weights[0])), turned((n if exact else n.float()) * weights[1]), n]
    return [turned(normed(q, weights[0])), turned(normed(k, weights[1])), normed(x[:, query_heads + kv_heads :], None)]


def logits() -> str:
    told = ""
    for rows, width in ((1, 262144), (3, 151936), (256, 32003)):
        x, out = 20 * values(rows, width), nans(rows, width, dtype=torch.float32)
        softcap(x, out, 30.0)
        told = no_worse(out, torch.tanh(x.float() / 30) * 30, torch.tanh(x.double() / 30) * 30, floor=1e-6)
        found = torch.full((rows,), -1, device=CUDA)
        argmax(out, found, ArgmaxScratch(rows, width, CUDA))
        best = out.max(-1, keepdim=True).values
        first = torch.where(out == best, torch.arange(width, device=CUDA), width).min(-1).values
        assert torch.equal(found, first), f"argmax of {rows} × {width}"
        softcap(x, out, None)
        assert torch.equal(out, x.float())
    return told


def product(rows: int, inputs: int, outputs: int, launch: Launch | None = None) -> str:
    x, weight, bias = values(rows, inputs), values(outputs, inputs), values(outputs)
    out = nans(rows, outputs)
    matvec(x, weight, out, bias, launch=launch)
    told = [no_worse(out, F.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))]
    again = nans(rows, outputs)
    matvec(x, weight, again, bias, launch=launch)
    assert torch.equal(out, again), "two runs differ"
    if outputs % 2 == 0:
        weight /= inputs**0.5
        out = nans(rows, outputs // 2)
        matvec(x, weight, out, activation="gelu_pytorch_tanh", launch=launch)
        activation = ACTIVATIONS["gelu_pytorch_tanh"]
        gate, up = F.linear(x, weight).chunk(2, -1)
        exact = F.linear(x.double(), weight.double()).chunk(2, -1)
        told.append(no_worse(out, activation(gate) * up, activation(exact[0]) * exact[1]))
    return ", ".join(told)


def dependent_launches() -> str:
    """A chain in which each kernel needs the one before, overlapped by PDL in a graph, against the same in order."""
    width, inner, layers = 2560, 10240, 24
    into = [values(2 * inner, width) / width**0.5 for _ in range(layers)]
    back = [values(width, inner) / inner**0.5 for _ in range(layers)]
    weight = torch.rand(width, device=CUDA) + 0.5
    start = values(1, width)
    hidden, normed, mid, out = start.clone(), nans(1, width), nans(1, inner), nans(1, width)

    def chain(pdl: bool) -> None:
        rms_norm(hidden, weight, EPS, normed, pdl=pdl)
        for first, second in zip(into, back, strict=True):
            matvec(normed, first, mid, activation="silu", pdl=pdl)
            matvec(mid, second, out, pdl=pdl)
            residual_norm(hidden, out, weight, weight, None, EPS, normed, pdl=pdl)

    chain(False)
    want = normed.clone()
    graph = torch.cuda.CUDAGraph()
    hidden.copy_(start)
    chain(True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(20):
        hidden.copy_(start)
        graph.replay()
        assert torch.equal(normed, want), "overlapped launches differ from ordered ones"
    # `hidden` grows from replay to replay here; only the time counts.
    times = [microseconds(partial(chain, pdl), repeat=2) / layers for pdl in (False, True)]
    gigabytes = (into[0].nbytes + back[0].nbytes) / 1e9
    return ", ".join(
        f"{name} {t:.1f} µs a layer ({gigabytes / t * 1e3:.2f} TB/s)"
        for name, t in zip(("ordered", "overlapped"), times, strict=True)
    )


# -- timings -------------------------------------------------------------------------------------------------------


def timings() -> None:
    small_kernels()
    products()


def small_kernels() -> None:
    print(f"\n{'kernel':40} {'rows':>5} {'µs':>8} {'TB/s':>6}")
    for rows in (1, 8, 128, 256, 8192):
        for name, width in (("31B", 5376), ("E4B", 2560), ("0.6B", 1024)):
            hidden, x, out = values(rows, width), values(rows, width), nans(rows, width)
            weight = torch.ones(width, device=CUDA)
            scalar = torch.ones(1, device=CUDA, dtype=torch.bfloat16)
            tell(f"rms_norm {name}", rows, partial(rms_norm, x, weight, EPS, out), 2 * x.nbytes)
            step = partial(residual_norm, hidden, x, weight, weight, scalar, EPS, out)
            tell(f"residual_norm {name}", rows, step, 4 * x.nbytes)
        for name, width in (("31B", 21504), ("E4B", 10240), ("0.6B", 3072)):
            gate_up, out = values(rows, 2 * width), nans(rows, width)
            tell(f"gated {name}", rows, partial(gated, gate_up, out, "gelu_pytorch_tanh"), 3 * out.nbytes)
        for name, query_heads, kv_heads, dim, latent in (
            ("31B sliding", 32, 16, 256, False),
            ("31B full", 32, 4, 512, True),
            ("0.6B", 16, 8, 128, False),
        ):
            time_heads(name, rows, query_heads, kv_heads, dim, latent)
    for rows in (1, 8, 64, 256):
        for width in (151936, 262144):
            x, out = values(rows, width), nans(rows, width, dtype=torch.float32)
            found, scratch = torch.zeros(rows, dtype=torch.int64, device=CUDA), ArgmaxScratch(rows, width, CUDA)
            tell(f"softcap {width}", rows, partial(softcap, x, out, 30.0), 3 * x.nbytes)
            tell(f"argmax {width}", rows, partial(argmax, out, found, scratch), out.nbytes)
            tell(f"torch argmax {width}", rows, partial(_torch_argmax, out, found), out.nbytes)


def _torch_argmax(values: torch.Tensor, out: torch.Tensor) -> None:
    torch.argmax(values, -1, out=out)


def time_heads(name: str, rows: int, query_heads: int, kv_heads: int, dim: int, latent: bool) -> None:
    pairs = dim // 8 if latent else dim // 2
    projected = values(rows, (query_heads + kv_heads * (1 if latent else 2)) * dim)
    positions = torch.randint(0, 4096, (rows,), device=CUDA, dtype=torch.int32)
    angles = torch.rand(2, 4096, pairs, device=CUDA)
    weight = torch.ones(dim, device=CUDA)
    q, k, v = nans(rows, query_heads, dim), nans(rows, kv_heads, dim), nans(rows, kv_heads, dim)

    def step() -> None:
        prepare_heads(
            projected, positions, weight, weight, q, k, v, v_norm=True, angles=(angles[0], angles[1]),
            pair_distance=pairs, eps=EPS, latent=latent,
        )  # fmt: skip

    tell(f"heads {name}", rows, step, projected.nbytes + q.nbytes + k.nbytes + v.nbytes)


def products() -> None:
    """What `matvec` plans for each shape, beside cuBLAS."""
    print(f"\n{'product':20} {'rows':>4} {'launch':>8} {'matvec':>14} {'gated':>14} {'cuBLAS':>14}   µs and TB/s")
    for inputs, outputs in PRODUCTS:
        weights = copies(outputs, inputs)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x, out, half = values(rows, inputs), nans(rows, outputs), nans(rows, outputs // 2)
            cells = ["", "", ""]
            if rows <= MAX_ROWS:
                launch = plan_launch(rows, outputs, inputs)
                cells = [
                    short(launch),
                    *(timed(weights, f) for f in (partial(_matvec, x, out, launch), partial(_gated, x, half))),
                ]
            cells.append(timed(weights, partial(_cublas, x, out)))
            print(f"{f'{inputs} → {outputs}':20} {rows:4} {cells[0]:>8}", *(f"{c:>14}" for c in cells[1:]), flush=True)
        del weights
        torch.cuda.empty_cache()


def sweep(rows: int) -> None:
    """Every launch for each shape, to choose the table by: TB/s, the best marked, the planned one last."""
    print(f"\n{rows} rows, TB/s  " + " ".join(f"{short(launch):>7}" for launch in LAUNCHES) + " planned")
    for inputs, outputs in PRODUCTS:
        weights = copies(outputs, inputs)
        x, out = values(rows, inputs), nans(rows, outputs)
        took = [time_product(weights, partial(_matvec, x, out, launch)) for launch in LAUNCHES]
        cells = [f"{weights[0].nbytes / t / 1e6:.2f}{'*' if t == min(took) else ' '}" for t in took]
        planned = short(plan_launch(rows, outputs, inputs))
        print(f"{f'{inputs} → {outputs}':16}", *(f"{c:>7}" for c in cells), f"{planned:>7}", flush=True)
        del weights
        torch.cuda.empty_cache()


def _matvec(x: torch.Tensor, out: torch.Tensor, launch: Launch, weight: torch.Tensor) -> None:
    matvec(x, weight, out, launch=launch)


def _gated(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> None:
    matvec(x, weight, out, activation="gelu_pytorch_tanh")


def _cublas(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def copies(outputs: int, inputs: int) -> list[torch.Tensor]:
    """As many weights as do not fit into 60 MB of L2 together, three times over, or one where that does not."""
    count = max(1, math.ceil(180e6 / (2 * outputs * inputs)))
    return [values(outputs, inputs) for _ in range(count)]


def time_product(weights: list[torch.Tensor], product: Callable[[torch.Tensor], None]) -> float:
    """Microseconds of one product, each with the next weight in turn."""
    turns: Iterator[torch.Tensor] = cycle(weights)
    repeat = max(len(weights), 5)
    return microseconds(lambda: product(next(turns)), repeat=repeat)


def tell(name: str, rows: int, step: Callable[[], None], size_bytes: int) -> None:
    took = microseconds(step, repeat=20)
    print(f"{name:40} {rows:5} {took:8.2f} {size_bytes / took / 1e6:6.2f}", flush=True)


def timed(weights: list[torch.Tensor], product: Callable[[torch.Tensor], None]) -> str:
    took = time_product(weights, product)
    return f"{took:8.1f} {weights[0].nbytes / took / 1e6:5.2f}"


def short(launch: Launch) -> str:
    return f"{launch.weight_rows}×{launch.warps}{f'd{launch.parts}' if launch.uses_dot else ''}"


# ------------------------------------------------------------------------------------------------------------------


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def nans(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, math.nan, device=CUDA, dtype=dtype)


def norm64(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), EPS)


def no_worse(mine: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, floor: float = 0.0) -> str:
    """Error against float64 beside that of plain torch. `floor`: differences below do not count. NaN never passes."""
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (mine, plain)]
    told = f"{errors[0]:.1e} (torch {errors[1]:.1e})"
    if not errors[0] <= max(ALLOWED * errors[1], floor):
        raise AssertionError(f"error {told}")
    return told


if __name__ == "__main__":
    for rows in sys.argv[1:]:
        sweep(int(rows))
    if not sys.argv[1:]:
        timings()
