"""The attention kernels on a GPU, at the sizes of real layers: checks against float64, and timings.

A kernel passes when its error against float64 is at most 1.5 times that of plain torch in the same dtype. Inputs are
fresh, every unused row is NaN, and pages lie anywhere in an arena of 6 GiB.

    python3 -m bench.gpu_checks.attention [--sweep] [WORD …]     timings, or timings under other tunings
    python3 -m bench.gpu_checks.attention --rows                 what 1, 2, 4, 8 and 16 rows of a sequence take
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from triton.runtime.errors import OutOfResources

from bench.gpu_checks.attention_cases import (
    Layer,
    chunk_queries,
    error,
    fused_rows,
    make_pages,
    run_decode,
    run_prefill,
    run_rows,
    run_write,
)
from bench.timing import microseconds
from windowpane.attention.chunk_attention import ChunkAttention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.triton import decode_tunings
from windowpane.attention.triton import prefill as prefill_kernels
from windowpane.attention.triton.decode import (
    DecodeScratch,
    decode,
    decode_programs,
    decode_rows,
    plan_decode,
    plan_rows,
)
from windowpane.attention.triton.decode_several import rows_at_once, split_rows
from windowpane.attention.triton.view import LatentRope, LayerView, PagedLayer
from windowpane.kv.retention import Full
from windowpane.schedule.step import Segment

DEVICE = "cuda"
ARENA_BYTES = 6 * 2**30
WINDOW_31B = Layer(16, 2, 256, window_tokens=1024)
FULL_31B = Layer(4, 8, 512, rotary=64)
QWEN3 = Layer(8, 2, 128)
LLAMA_4 = Layer(8, 5, 128, chunk_tokens=8192)
LAYERS = {
    "31B window": WINDOW_31B,
    "31B full, latent": FULL_31B,
    "Qwen3": QWEN3,
    "E4B window": Layer(2, 4, 256, window_tokens=512),
    "E4B full, pair": Layer(2, 4, 512),
    "64 dims, 3 query heads per KV head, 32-token blocks": Layer(5, 3, 64, block_tokens=32),
    "128 dims, 16 query heads, window, 3 stripes": Layer(1, 16, 128, window_tokens=333, stripes=3),
    "Gemma 2 window, soft-capped": Layer(8, 2, 256, window_tokens=1024, softcap=50.0),
    "Gemma 2 full, strongly capped": Layer(8, 2, 256, softcap=1.0),
    "31B full, latent, soft-capped": replace(FULL_31B, softcap=2.0),
    "64 dims, window, sinks": Layer(8, 8, 64, window_tokens=128, has_sinks=True),
    "31B full, latent, soft-capped, sinks": replace(FULL_31B, softcap=2.0, has_sinks=True),
    "Llama 4, chunks of 512": replace(LLAMA_4, chunk_tokens=512),
    "chunks that begin in a page, 2 stripes": Layer(2, 4, 64, chunk_tokens=333, stripes=2),
    "256 dims, chunks": Layer(4, 2, 256, chunk_tokens=64),
    "latent, chunks": Layer(2, 4, 512, rotary=64, chunk_tokens=1024),
}
# Around pages, tiles and windows; none, one, and long.
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 333, 511, 512, 1022, 1023, 1024, 1025, 2049, 9000]
CHUNKS = [
    (1, 1), (64, 64), (700, 700), (65, 3), (1025, 1025), (5, 1), (130, 130), (31, 31), (257, 256), (16, 16), (3, 3),
    (1, 1), (2, 2), (600, 600), (90, 1), (64, 64), (1500, 1500),
]  # fmt: skip

Check = tuple[str, Callable[[], str]]


def checks() -> list[Check]:
    found: list[Check] = []
    for name, layer in LAYERS.items():
        for dtype in (torch.bfloat16, torch.float16) if layer is QWEN3 else (torch.bfloat16,):
            kind = str(dtype).removeprefix("torch.")
            found.append((f"attention decode {name} {kind}", lambda a=layer, b=dtype: check_decode(a, b)))
            found.append((f"attention rows {name} {kind}", lambda a=layer, b=dtype: check_rows(a, b)))
            found.append((f"attention prefill {name} {kind}", lambda a=layer, b=dtype: _prefill(a, b)))
            found.append((f"attention write {name} {kind}", lambda a=layer, b=dtype: _write(a, b)))
    for name, layer in (("pair", Layer(2, 4, 64, window_tokens=70)), ("latent", Layer(2, 4, 128, rotary=16))):
        found.append((f"attention decode {name} float32", lambda a=layer: check_decode(a, torch.float32)))
        found.append((f"attention prefill {name} float32", lambda a=layer: _prefill(a, torch.float32)))
    for name in ("31B window", "31B full, latent", "Llama 4, chunks of 512"):
        found.append((f"attention replays {name}", lambda a=LAYERS[name]: _replays(a)))
    return found


def judge(got: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> str:
    if not bool(got.isfinite().all()):
        raise AssertionError("the output has NaN or Inf")
    mine, torchs = error(got, exact), error(rounded, exact)
    # In float32 both are rounding noise; tensor cores must not have been let in.
    limit = 1e-5 if got.dtype == torch.float32 else 1.5 * torchs
    if not mine <= limit:
        raise AssertionError(f"relative error {mine:.2e} exceeds {limit:.2e} (torch: {torchs:.2e})")
    return f"{mine:.2e}, torch {torchs:.2e}"


def check_decode(layer: Layer, dtype: torch.dtype) -> str:
    told = []
    # One row, few, and more rows than programs: all shares of a line.
    for lengths in ([9000], LENGTHS, [100, 3, 0], [70] * 300):
        paged = make_pages(layer, lengths, DEVICE, dtype, room_tokens=8, arena_bytes=ARENA_BYTES)
        told.append(judge(*run_decode(paged, padding=3)))
    for length in (0, 1, 64, 190, 1023, 1025):  # a lone row has tunings of its own
        judge(*run_decode(make_pages(layer, [length], DEVICE, dtype, room_tokens=8, arena_bytes=ARENA_BYTES)))
    return told[1]


def check_rows(layer: Layer, dtype: torch.dtype) -> str:
    """Several rows of each sequence: few of many, and as many as there may be."""
    told = []
    for lengths, counts in ((LENGTHS, [1, 5, 16, 2, 8, 3, 1, 4, 16, 7, 9, 2, 5, 5, 1, 16, 3]), ([9000, 70], [5, 5])):
        paged = make_pages(layer, lengths, DEVICE, dtype, room_tokens=16, arena_bytes=ARENA_BYTES)
        told.append(judge(*run_rows(paged, counts, padding=3)))
    return told[0]


def _prefill(layer: Layer, dtype: torch.dtype) -> str:
    paged = make_pages(layer, LENGTHS, DEVICE, dtype, room_tokens=2048, arena_bytes=ARENA_BYTES)
    return judge(*run_prefill(paged, CHUNKS))


def _write(layer: Layer, dtype: torch.dtype) -> str:
    run_write(layer, DEVICE, dtype, offset_bytes=ARENA_BYTES)
    return "exact"


@dataclass(frozen=True)
class Bare:
    """A step on random data without a reference, for timing: pages in random order, as after a day of serving."""

    layer: Layer
    view: LayerView
    arena: torch.Tensor
    table: torch.Tensor
    rope: LatentRope | None

    @classmethod
    def make(cls, layer: Layer, sequences: int, tokens: int, arena: torch.Tensor) -> Bare:
        spec = layer.pages(torch.bfloat16)
        columns = layer.retention.max_pages(tokens, layer.block_tokens) + 4 * isinstance(layer.retention, Full)
        view = LayerView.of(spec, spec.slices[1], columns)
        order = torch.randperm(arena.numel() // spec.page_bytes, device=DEVICE)[: sequences * columns]
        table = (order * spec.page_units).to(torch.int32).view(sequences, columns, 1)
        angle = torch.arange(tokens + 8200, dtype=torch.float64)[:, None] * 1e6 ** (-torch.arange(64.0) / 256)
        w = torch.rand(layer.dim, device=DEVICE) + 0.5
        rope = (angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE), w) if layer.rotary else None
        return cls(layer, view, arena, table, rope)

    @property
    def for_kernels(self) -> PagedLayer:
        layer = self.layer
        return PagedLayer(
            self.arena, self.view, self.table, layer.query_heads, layer.mask, layer.scores(DEVICE), self.rope
        )


class DecodeStep:
    """A decode step of rows with this much past, and the bytes of KV that it must read."""

    def __init__(self, bare: Bare, past: torch.Tensor) -> None:
        self.bare, self.layer = bare, bare.for_kernels
        layer, view, rows = bare.layer, bare.view, len(past)
        device = torch.device(DEVICE)
        self.positions = past.to(torch.int32).to(DEVICE)
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.cum_tiles = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        programs = decode_programs(view, device)
        self.scratch = DecodeScratch(rows, view.kv_heads, layer.group, view.dim, programs, device)
        dtype = torch.bfloat16 if view.code else view.dtype
        self.present = fused_rows(layer, rows, DEVICE, dtype)
        self.out = torch.full((rows, layer.query_heads, view.dim), float("nan"), dtype=dtype, device=DEVICE)
        seen = sum(position - layer.mask.first_visible(position) for position in past.tolist())
        row_bytes = view.row_words * 2 + (4 if view.scale_offsets else 0)
        self.kv_bytes = float(seen) * view.kv_heads * row_bytes * len(view.data_offsets)
        self.plan()

    def plan(self) -> None:
        plan_decode(self.positions, self.cum_tiles, self.bare.layer.mask)

    def __call__(self) -> None:
        decode(*self.present, self.layer, self.slots, self.positions, self.cum_tiles, self.scratch, self.out)


class RowsStep:
    """`rows` rows of each sequence with this much past, in one pass over its pages; `rows` 1 is a `DecodeStep`."""

    def __init__(self, bare: Bare, sequences: int, past: int, rows: int) -> None:
        self.layer, layer, view = bare.for_kernels, bare.layer, bare.view
        segments = [Segment(i, past, past + rows, i * rows, i * rows, rows) for i in range(sequences)]
        self.rows = min(rows, rows_at_once(layer.group, view.dim))
        self.segments = torch.tensor(split_rows(segments, self.rows), dtype=torch.int32, device=DEVICE)
        self.cum_tiles = torch.zeros(len(self.segments) + 1, dtype=torch.int32, device=DEVICE)
        self.scratch = DecodeScratch.of_rows(view, layer.group, self.rows, torch.device(DEVICE))
        dtype = torch.bfloat16 if view.code else view.dtype
        self.present = fused_rows(layer, sequences * rows, DEVICE, dtype)
        self.out = torch.empty(sequences * rows, layer.query_heads, view.dim, dtype=dtype, device=DEVICE)
        plan_rows(self.segments, self.cum_tiles, layer.mask)

    def __call__(self) -> None:
        decode_rows(*self.present, self.layer, self.segments, self.cum_tiles, self.scratch, self.out, rows=self.rows)


ROW_COUNTS = (1, 2, 4, 8, 16)
VERIFYING = {
    "31B window": WINDOW_31B,
    "31B full, latent": FULL_31B,
    "Qwen3": QWEN3,
    "64 dims, window, sinks": LAYERS["64 dims, window, sinks"],
    "31B window, int8": replace(WINDOW_31B, kv_format="int8_per_token_head"),
    "31B full, latent, fp8": replace(FULL_31B, kv_format="fp8_per_token_head"),
    "31B full, latent, int4": replace(FULL_31B, kv_format="int4_per_token_head"),
}


def verifying(sequences: int = 16, past: int = 32_768) -> None:
    """Print what several rows of each sequence take beside one row."""
    arena = random_arena(24 * 2**30)
    for name, layer in VERIFYING.items():
        bare = Bare.make(layer, sequences, past + 16, arena)
        one = DecodeStep(bare, torch.full((sequences,), past))
        steps = [one if rows == 1 else RowsStep(bare, sequences, past, rows) for rows in ROW_COUNTS]
        times = [microseconds(step) for step in steps]
        told = "  ".join(
            f"{rows}: {us:7.1f} us x{us / times[0]:.2f}" for rows, us in zip(ROW_COUNTS, times, strict=True)
        )
        print(f"rows {name:24s} {sequences} x {past:,}  {told}", flush=True)


def prefill_step(
    bare: Bare, sequences: int, tokens: int, past: int, scratch: PrefillScratch | None = None
) -> tuple[Callable[[], None], float]:
    """A prefill step as a callable, and its FLOPs: two products over the pairs of tokens that see each other."""
    layer, view = bare.layer, bare.view
    segments = [Segment(i, past, past + tokens, i * tokens, i * tokens, tokens) for i in range(sequences)]
    attention = ChunkAttention(bare.for_kernels, scratch)
    chunks = chunk_queries(segments, attention.tiling, DEVICE)
    q, k, v = fused_rows(layer, sequences * tokens, DEVICE, view.dtype)
    out = torch.empty(sequences * tokens, layer.query_heads, view.dim, dtype=view.dtype, device=DEVICE)

    def step() -> None:
        attention(q, k, v, chunks, out)

    seen = sum(len(layer.mask.seen(position)) for position in range(past, past + tokens))
    return step, 4.0 * layer.dim * layer.query_heads * sequences * float(seen)


def _replays(layer: Layer) -> str:
    """A graph captured at one set of lengths answers for another: nothing that varies is in the launches."""
    bare = Bare.make(layer, 8, 4096, random_arena(2 * 2**30))
    before, after = torch.randint(0, 4096, (2, 8), dtype=torch.int32)
    step = DecodeStep(bare, before)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.plan()
        step()
    step.positions.copy_(after)
    graph.replay()
    replayed = step.out.clone()
    step.out.fill_(float("nan"))
    step()
    if not torch.equal(replayed, step.out):
        raise AssertionError("a replayed graph and a launch differ")
    return "equal"


def random_arena(size_bytes: int) -> torch.Tensor:
    arena = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
    for piece in arena.view(torch.bfloat16).split(2**28):
        piece.normal_()
    return arena


DECODING = (
    ("decode 31B window, 8 x 1,023", WINDOW_31B, 8, 30_000),
    ("decode 31B window, 64 x 1,023", WINDOW_31B, 64, 30_000),
    ("decode 31B window, 128 x 1,023", WINDOW_31B, 128, 30_000),
    ("decode 31B full, latent, 8 x 65,536", FULL_31B, 8, 65_536),
    ("decode 31B full, latent, 128 x 843", FULL_31B, 128, 843),
    ("decode Qwen3, 1 x 843", QWEN3, 1, 843),
    ("decode Qwen3, 256 x 843", QWEN3, 256, 843),
    ("decode E4B full, pair, 256 x 843", LAYERS["E4B full, pair"], 256, 843),
    ("decode Llama 4 chunks, 64 x 4,096", LLAMA_4, 64, 12_288),
)
PREFILLING = (
    ("prefill 31B window, 8 x 1,024", WINDOW_31B, 8, 1024, 0),
    ("prefill 31B window, 1 x 8,192", WINDOW_31B, 1, 8192, 0),
    ("prefill 31B window, 1 x 8,192 over 30,000", WINDOW_31B, 1, 8192, 30_000),
    ("prefill 31B full, latent, 8 x 1,024", FULL_31B, 8, 1024, 0),
    ("prefill 31B full, latent, 1 x 8,192", FULL_31B, 1, 8192, 0),
    ("prefill 31B full, latent, 1 x 8,192 over 16,384", FULL_31B, 1, 8192, 16_384),
    ("prefill Qwen3, 16 x 512", QWEN3, 16, 512, 0),
    ("prefill E4B full, pair, 8 x 1,024", LAYERS["E4B full, pair"], 8, 1024, 0),
    ("prefill Llama 4 chunks, 1 x 8,192 over 4,096", LLAMA_4, 1, 8192, 4096),
)


def timed_steps(
    arena: torch.Tensor, only: tuple[int, bool] | None = None
) -> Iterator[tuple[str, Callable[[], None], float, str]]:
    """(name, step, its work in units of 10^12, the unit of its rate); `only` for layers of this (dim, latent)."""
    for name, layer, sequences, past in DECODING:
        if only in (None, (layer.dim, layer.rotary > 0)):
            # Windows start anywhere in a page, as in a running engine.
            lengths = past + torch.randint(0, 64, (sequences,)) * (layer.window_tokens is not None)
            step = DecodeStep(Bare.make(layer, sequences, past + 64, arena), lengths)
            yield name, step, step.kv_bytes / 1e12, "TB/s"
    for name, layer, sequences, tokens, past in PREFILLING:
        if only in (None, (layer.dim, layer.rotary > 0)):
            run, flops = prefill_step(Bare.make(layer, sequences, past + 1, arena), sequences, tokens, past)
            yield name, run, flops / 1e12, "TFLOP/s"


def timings(words: Sequence[str] = ()) -> None:
    """Print a line per step; given words, only those whose name has one. KV does not fit into L2 but for one row."""
    arena = random_arena(24 * 2**30)
    for name, step, work, unit in timed_steps(arena):
        if not words or any(word in name for word in words):
            us = microseconds(step)
            print(f"attention {name:50s} {us:9.1f} us {work / us * 1e6:8.2f} {unit}", flush=True)


# (tile tokens, programs per multiprocessor, warps, stages) and (rows, keys, warps, stages) worth a try, by layer.
DECODE_TRIALS = {
    (128, False): [(64, 2, 4, 3), (64, 3, 4, 3), (64, 2, 4, 5), (64, 3, 4, 5), (32, 4, 4, 5), (64, 4, 2, 3)],
    (256, False): [(64, 2, 4, 3), (32, 2, 4, 5), (32, 3, 4, 3), (64, 1, 4, 5), (64, 2, 8, 3)],
    (512, False): [(32, 2, 4, 3), (32, 2, 8, 3), (32, 1, 8, 5), (16, 2, 4, 5)],
    (512, True): [(32, 2, 4, 5), (32, 2, 4, 3), (32, 2, 8, 3), (64, 1, 8, 5), (64, 1, 8, 3), (64, 1, 4, 5)],
}
PREFILL_TRIALS = {
    (128, False): [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2), (64, 64, 4, 3)],
    (256, False): [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 5), (64, 32, 4, 3)],
    (512, False): [(64, 32, 8, 3), (64, 32, 8, 2), (64, 16, 8, 3)],
    (512, True): [(64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 3)],
}


def sweep(words: Sequence[str] = ()) -> None:
    """Time every step under other tunings than its own, to see whether one should move in."""
    kinds = (
        ("decode", decode_tunings.TUNINGS, decode_tunings.Tuning, DECODE_TRIALS),
        ("prefill", prefill_kernels.TUNINGS, prefill_kernels.Tuning, PREFILL_TRIALS),
    )
    arena = random_arena(24 * 2**30)
    for kind, tunings, make, trials in kinds:
        for layer, candidates in trials.items():
            kept = tunings[layer]
            for candidate in candidates:
                tunings[layer] = make(*candidate)
                for name, step, work, unit in timed_steps(arena, layer):
                    if kind not in name or (words and not any(word in name for word in words)):
                        continue
                    try:
                        us = microseconds(step)
                        told = f"{us:9.1f} us {work / us * 1e6:8.2f} {unit}"
                    except (OutOfResources, RuntimeError) as refusal:
                        told = str(refusal)[:60]
                    print(f"attention {name:46s} {candidate!s:20s} {told}", flush=True)
            tunings[layer] = kept


if __name__ == "__main__":
    if "--rows" in sys.argv:
        verifying()
        sys.exit()
    (sweep if "--sweep" in sys.argv else timings)([word for word in sys.argv[1:] if not word.startswith("-")])
