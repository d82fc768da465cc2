"""What it costs when a kernel's instructions are no longer at hand: the layer chain behind a launch of straight code.

python3 -m bench.gpu_checks.code      timings

The straight code reads and writes next to nothing. While both kernels fit into a multiprocessor's instruction cache,
the chain takes as long as it would alone; beyond that both take longer with every KiB.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bench.gpu_checks.chain import MOST_FOLLOWING, SHAPES, random_links
from bench.gpu_checks.fused import CUDA, values
from bench.timing import exclusive_times
from windowpane.attention.triton.view import processors_of
from windowpane.lowering.gpu.kernels.chain import ChainScratch, run_chain

INSTRUCTION_BYTES = 16
SIZES_KIB = (0, 1, 8, 16, 24, 32, 48, 64, 96, 128, 192)
ROUNDS, WARM_ROUNDS = 3, 30


def straight_code(instructions: int) -> str:
    """So many, none of which waits for the one before it."""
    body = ["{.reg .f32 a,b,c,d; mov.f32 a,$1; mov.f32 b,$1; mov.f32 c,$1; mov.f32 d,$1;"]
    for i in range(instructions):
        to, other = "abcd"[i % 4], "bcda"[i % 4]
        body.append(f"fma.rn.f32 {to},{to},0f3F7FF{i % 4096:03X},{other};")
    return "\n".join([*body, "add.f32 a,a,b; add.f32 c,c,d; add.f32 $0,a,c;}"])


@triton.jit
def straight_kernel(X, CODE: tl.constexpr):
    gdc_launch_dependents()
    gdc_wait()
    x = tl.load(X + tl.arange(0, 32))
    y = tl.inline_asm_elementwise(CODE, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    tl.store(X + 32 + tl.program_id(0) * 32 + tl.arange(0, 32), y)


def microseconds_of_kernels(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Medians by name."""
    for _ in range(WARM_ROUNDS):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(ROUNDS):
            graph.replay()
        torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in exclusive_times(profile).items()}


def timings() -> None:
    layers = [random_links(*SHAPES["31B sliding"]) for _ in range(4)]  # far more than fits into L2
    attended, hidden = values(1, layers[0].out.inputs), values(1, len(layers[0].out))
    scratch = ChainScratch(len(layers[0].out), layers[0].down.inputs, CUDA, MOST_FOLLOWING)
    processors = processors_of(CUDA)
    x = torch.ones(32 * (processors + 1), device=CUDA)

    def measure(code: str | None, *, with_chain: bool) -> dict[str, float]:
        def once() -> None:
            for links in layers:
                if code is not None:
                    straight_kernel[(processors,)](x, code, num_warps=1, launch_pdl=True)
                if with_chain:
                    run_chain(attended, hidden, links, scratch, pdl=True)

        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                once()
        return microseconds_of_kernels(graph)

    print(f"{'straight code':>13} {'alone, µs':>10} {'between chains':>15} {'the chain':>10}")
    for size in SIZES_KIB:
        code = straight_code(size * 1024 // INSTRUCTION_BYTES) if size else None
        both = measure(code, with_chain=True)
        alone = measure(code, with_chain=False)["straight_kernel"] if code else 0.0
        between = both.get("straight_kernel", 0.0)
        print(f"{size:9d} KiB {alone:10.1f} {between:15.1f} {both['chain_kernel']:10.1f}", flush=True)


if __name__ == "__main__":
    timings()
