"""The launch that has all int4 products between two layers' attention, on a GPU: against float64, and timed.

Its error may be 1.5 times that of plain torch over dequantised matrices in bf16.

    python3 -m bench.gpu_checks.chain      timings beside the same products as launches of their own
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu_checks.fused import ALLOWED, CUDA, EPS, Checks, values
from bench.gpu_checks.quantized import in_turn, random_weight, relative
from bench.timing import microseconds
from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links, has_chain, run_chain, try_chain
from windowpane.lowering.gpu.kernels.hopper_tiled import is_hopper
from windowpane.lowering.gpu.kernels.norms import residual_norm
from windowpane.lowering.gpu.kernels.packed import packed_linear
from windowpane.lowering.reference.ops import ACTIVATIONS
from windowpane.measure.rounds import roof_bytes_per_second

BF16 = torch.bfloat16
REPLAYS = 50
MOST_FOLLOWING = 18432  # outputs of a projection of Gemma 4 31B

# What is attended, the width, what is inside, and the next layer's projections: of Gemma 4 31B, then others.
SHAPES = {
    "31B sliding": (8192, 5376, 21504, 16384),
    "31B before a full layer": (8192, 5376, 21504, 18432),
    "31B full": (16384, 5376, 21504, 16384),
    "31B last": (16384, 5376, 21504, 0),
    "small": (4096, 2304, 8192, 6144),
    "odd": (5120, 2560, 9728, 3333),
    "Qwen3-32B": (8192, 5120, 25600, 10240),
    "Llama 70B": (8192, 8192, 28672, 10240),
    "three parts of whole rows": (4096, 2304, 9216, 30_000),
    "twelve parts": (4096, 2304, 9216, 20_000),
}


def checks() -> Checks:
    if not is_hopper(CUDA):
        return []
    return [
        *((f"layer chain {name}", partial(compare, name)) for name in SHAPES),
        *(
            (f"layer chain {name}, one kernel with the widest", partial(compare, name, most_following=MOST_FOLLOWING))
            for name in ("31B sliding", "31B full")
        ),
        ("layer chain layers of a model in turn", in_one_kernel),
        ("layer chain without norms between, silu", partial(compare, "31B sliding", plain=True)),
        ("layer chain of what is not a number", not_a_number),
        ("layer chain with a residual that cancels", partial(compare, "31B sliding", plain=True, cancels=True)),
    ]


def random_links(attended: int, width: int, inner: int, following: int, *, plain: bool = False) -> Links:
    """`plain`: no norms behind products, no scalar, silu."""

    def norm() -> torch.Tensor:
        return torch.rand(width, device=CUDA) + 0.5

    weight = partial(random_weight, "int4 g32")
    return Links(
        out=weight(width, attended),
        gate_up=weight(2 * inner, width),
        down=weight(width, inner),
        following=weight(following, width) if following else None,
        post_attention_norm=None if plain else norm(),
        pre_mlp_norm=norm(),
        post_mlp_norm=None if plain else norm(),
        next_norm=norm(),
        scalar=None if plain else torch.full((1,), 0.7, dtype=BF16, device=CUDA),
        eps=EPS,
        gelu=not plain,
    )


def in_torch(attended: torch.Tensor, hidden: torch.Tensor, links: Links, dtype: torch.dtype) -> list[torch.Tensor]:
    """What follows and the residual stream, with matrices and results in `dtype`."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double() if dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + links.eps) * weight).to(dtype)

    activation = ACTIVATIONS["gelu_pytorch_tanh" if links.gelu else "silu"]
    attended, hidden = attended.to(dtype), hidden.to(dtype)
    mixed = F.linear(attended, links.out.dequantize(dtype))
    hidden = hidden + (mixed if links.post_attention_norm is None else norm(mixed, links.post_attention_norm))
    gate, up = F.linear(norm(hidden, links.pre_mlp_norm), links.gate_up.dequantize(dtype)).chunk(2, -1)
    mixed = F.linear(activation(gate) * up, links.down.dequantize(dtype))
    hidden = hidden + (mixed if links.post_mlp_norm is None else norm(mixed, links.post_mlp_norm))
    hidden = hidden if links.scalar is None else hidden * links.scalar.to(dtype)
    result = norm(hidden, links.next_norm)
    if links.following is not None:
        result = F.linear(result, links.following.dequantize(dtype))
    return [result, hidden]


def compare(name: str, *, plain: bool = False, cancels: bool = False, most_following: int = 0) -> str:
    """`cancels`: the output projection takes a large channel out of the residual stream. `most_following`: projections
    of another layer of the model have so many outputs.
    """
    links = random_links(*SHAPES[name], plain=plain)
    assert has_chain(links, BF16)
    attended, start = values(1, links.out.inputs), values(1, len(links.out))
    if cancels:
        start[0, 7] = -(attended.double() @ links.out[7:8].dequantize(torch.float64).T).item()
        factor = 2e4 / float(start[0, 7].abs())
        start[0, 7] *= factor
        links.out.scales[7] *= factor
    exact = in_torch(attended, start, links, torch.float64)
    torch_errors = [relative(x, e) for x, e in zip(in_torch(attended, start, links, BF16), exact, strict=True)]
    scratch = ChainScratch(len(links.out), links.down.inputs, CUDA, most_following)
    found = run_chain(attended, start, links, scratch, pdl=False)
    errors = [relative(x, e) for x, e in zip(found, exact, strict=True)]
    for error, allowed in zip(errors, torch_errors, strict=True):
        assert error <= ALLOWED * allowed, f"errors {errors}, torch {torch_errors}"
    # Overlapped launches in a graph, each of which needs what the one before has left in the residual stream.
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        hidden = start
        for _ in range(4):
            result, hidden = run_chain(attended, hidden, links, scratch, pdl=True)
            results.append(result)
    last = None
    for turn in range(REPLAYS):
        graph.replay()
        assert torch.equal(results[0], found[0]), f"turn {turn} differs from the first launch"
        assert last is None or torch.equal(results[-1], last), f"turn {turn} differs from the one before"
        last = results[-1].clone()
    return f"{errors[0]:.1e} (torch {torch_errors[0]:.1e})"


def in_one_kernel() -> str:
    """Layers that differ in what they attend and in what follows, in one graph, against each by itself. An odd number
    of steps among them, so that the ring's places change from one to the next.
    """
    shapes = [
        (attended, 5376, 21504, following) for attended, following in ((8192, 18432), (6144, 16384), (16384, 16384))
    ]
    layers = [random_links(*shape) for shape in shapes]
    inputs = [values(1, links.out.inputs) for links in layers]
    start = values(1, 5376)
    apart, hidden = [], start
    for links, attended in zip(layers, inputs, strict=True):
        scratch = ChainScratch(5376, 21504, CUDA, MOST_FOLLOWING)
        result, hidden = run_chain(attended, hidden, links, scratch, pdl=False)
        apart += [result, hidden]
    scratch, graph, together, hidden = (
        ChainScratch(5376, 21504, CUDA, MOST_FOLLOWING),
        torch.cuda.CUDAGraph(),
        [],
        start,
    )
    try_chain(layers[0], scratch, BF16, pdl=True)
    with torch.cuda.graph(graph):
        for links, attended in zip(layers, inputs, strict=True):
            result, hidden = run_chain(attended, hidden, links, scratch, pdl=True)
            together += [result, hidden]
    for turn in range(REPLAYS):
        graph.replay()
        same = [torch.equal(a, b) for a, b in zip(together, apart, strict=True)]
        assert all(same), f"turn {turn}: {same}"
    return f"{REPLAYS} replays equal"


def not_a_number() -> str:
    """Whatever its bits are. If a product left those that stand for what is not there yet, this would hang."""
    for bits in (-1, 0x7FFF, 0x7FC0, 0x7F80):
        links = random_links(*SHAPES["small"])
        attended, hidden = values(1, links.out.inputs), values(1, len(links.out))
        attended.view(torch.int16)[0, 7] = bits
        scratch = ChainScratch(len(links.out), links.down.inputs, CUDA)
        for _ in range(3):
            found, hidden = run_chain(attended, hidden, links, scratch, pdl=False)
        assert found.isnan().all() and hidden.isnan().all(), hex(bits)
    return "comes out as NaN"


def as_launches(attended: torch.Tensor, hidden: torch.Tensor, links: Links) -> None:
    """The same without a chain."""
    mixed, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    inner = hidden.new_empty(1, links.down.inputs)
    packed_linear(attended, links.out, mixed, pdl=True)
    residual_norm(hidden, mixed, links.post_attention_norm, links.pre_mlp_norm, None, links.eps, normed, pdl=True)
    packed_linear(normed, links.gate_up, inner, activation="gelu_pytorch_tanh" if links.gelu else "silu")
    packed_linear(inner, links.down, mixed, pdl=True)
    residual_norm(hidden, mixed, links.post_mlp_norm, links.next_norm, links.scalar, links.eps, normed, pdl=True)
    if links.following is not None:
        packed_linear(normed, links.following, hidden.new_empty(1, len(links.following)), pdl=True)


def timings() -> None:
    roof = roof_bytes_per_second(CUDA)
    print(f"\n{'layer chain':26} {'µs':>6} {'TB/s':>5} {'of roof':>7} {'as launches':>11}")
    for name in list(SHAPES)[:4]:
        layers = [random_links(*SHAPES[name]) for _ in range(4)]  # far more than fits into L2
        attended, hidden = values(1, layers[0].out.inputs), values(1, len(layers[0].out))
        scratch = ChainScratch(len(layers[0].out), layers[0].down.inputs, CUDA, MOST_FOLLOWING)
        took = microseconds(in_turn(layers, partial(_once, attended, hidden, scratch)), repeat=8)
        others = microseconds(in_turn(layers, partial(as_launches, attended, hidden)), repeat=8)
        rate = sum(w.nbytes for w in layers[0].weights) / took * 1e6
        print(f"{name:26} {took:6.1f} {rate / 1e12:5.2f} {rate / roof:7.1%} {others:11.1f}", flush=True)


def _once(attended: torch.Tensor, hidden: torch.Tensor, scratch: ChainScratch, links: Links) -> None:
    run_chain(attended, hidden, links, scratch, pdl=True)


if __name__ == "__main__":
    timings()
