"""Decode parts of the spike: latent, sliding and int8, each checked, then timed."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from bench.spike.decode import Partial, Tuning, angle_tables, combine, decode, rebuild_k
from bench.spike.decode_tma import decode_tma
from bench.spike.measure import LOG2E, Row, attend, microseconds, relative_error, require
from bench.spike.pages import (
    QUERY_HEADS,
    WINDOW_TOKENS,
    LayerView,
    gemma4_layout,
    layer_view,
    random_tables,
    rows,
    scales,
    write_rows,
)
from bench.spike.work import plan_work

SMS = 132
DEVICE = "cuda"


@dataclass(frozen=True)
class Step:
    """One decode step of one layer: lengths, tables, queries and the present token, on random data."""

    arena: torch.Tensor
    view: LayerView
    first: list[int]
    past: list[int]
    table: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]

    @property
    def kv_bytes(self) -> int:
        row = self.view.dim * (1 if self.view.scale_offsets else 2) + (4 if self.view.scale_offsets else 0)
        tokens = sum(self.past) - sum(self.first)
        return tokens * self.view.kv_heads * len(self.view.data_offsets) * row


def make_step(
    arena: torch.Tensor, view: LayerView, past: list[int], window: int | None = None, pages_per_slab: int = 1
) -> Step:
    first = [0 if window is None else max(0, n - window + 1) for n in past]
    # pages that slid out of the window are gone: a table starts with the first page held
    drop = [f // view.block_tokens * view.block_tokens for f in first]
    first, past = [f - d for f, d in zip(first, drop, strict=True)], [n - d for n, d in zip(past, drop, strict=True)]
    table = random_tables(view, past, arena.numel(), DEVICE, pages_per_slab)
    # random numbers as large as normalised heads give a softmax with some tokens that matter and many that do not
    q = (torch.randn(len(past), QUERY_HEADS, view.dim, device=DEVICE) * 2 / view.dim**0.5).bfloat16()
    k, v = (torch.randn(len(past), view.kv_heads, view.dim, device=DEVICE).bfloat16() for _ in range(2))
    w = torch.ones(view.dim, device=DEVICE)
    w[:128].uniform_(0.5, 1.5)  # w of the dims that are not rotated is folded into q
    angles = angle_tables(max(past) + 130, 512, DEVICE) if view.latent else (w, w)
    return Step(arena, view, first, past, table, q, k, v, w, angles)


def reference(step: Step, seq: int) -> torch.Tensor:
    """Output of one sequence in float32, from rows gathered in plain torch."""
    view, tokens = step.view, range(step.first[seq], step.past[seq])
    dtype = torch.int8 if view.scale_offsets else torch.bfloat16
    stored = []
    for which in range(len(view.data_offsets)):
        x = rows(step.arena, view, step.table[seq], tokens, which, dtype).float()
        if view.scale_offsets:
            x *= scales(step.arena, view, step.table[seq], tokens, which)[..., None]
        stored.append(x)
    k, v = (stored * 2)[:2]
    if view.latent:
        k = rebuild_k(k, step.w, *(a[: tokens.stop].float() for a in step.angles))
    k = torch.cat([k, step.k[seq][:, None].float()], 1)
    v = torch.cat([v, step.v[seq][:, None].float()], 1)
    return attend(step.q[seq][:, None], k, v)[:, 0]


def poison_ends(step: Step) -> None:
    """Make every row that no token fills NaN (bytes 0xFF), so that a kernel that lets one in is caught."""
    view = step.view
    for seq, past in enumerate(step.past):
        slots = -(-past // view.block_tokens) * view.block_tokens
        if slots > past:
            for which in range(len(view.data_offsets)):
                nan = torch.full(
                    (view.kv_heads, slots - past, view.dim), float("nan"), dtype=torch.bfloat16, device=DEVICE
                )
                write_rows(step.arena, view, step.table[seq], range(past, slots), which, nan)


def run_step(step: Step, kernel: str, tuning: Tuning, check: list[int]) -> tuple[float, float]:
    """Check the given sequences, then time attention over the past alone: microseconds, and the largest error."""
    view = step.view
    work = plan_work(step.first, step.past, tuning.tile_tokens, view.kv_heads, SMS * tuning.programs_per_sm, DEVICE)
    partial = Partial.empty(work, QUERY_HEADS // view.kv_heads, view.dim, parts=2 if kernel == "tma" else 1)
    out = torch.full_like(step.q, float("nan"))
    past = torch.tensor(step.past, dtype=torch.int32, device=DEVICE)
    first = torch.tensor(step.first, dtype=torch.int32, device=DEVICE)
    # TMA: one row of angles per work item, float32; Triton: a row per token and head, so bf16 to keep the traffic down
    angles = step.angles if kernel == "tma" else tuple(a.bfloat16() for a in step.angles)

    def past_only() -> None:
        if kernel == "tma":
            decode_tma(step.q, step.arena, view, step.table, past, angles, step.w, work, partial, LOG2E)
        else:
            decode(step.q, step.arena, view, step.table, first, past, angles, step.w, work, partial, LOG2E, tuning)

    past_only()
    combine(step.q, step.k, step.v, partial, work, out, LOG2E)
    if not bool(out.isfinite().all()):
        raise AssertionError(f"{kernel}: output has NaN or Inf")
    error = max(relative_error(out[seq], reference(step, seq)) for seq in check)
    require(error, 1e-2, f"{kernel} {tuning}")
    return microseconds(past_only), error


def combine_microseconds(step: Step) -> float:
    work = plan_work(step.first, step.past, TMA.tile_tokens, step.view.kv_heads, SMS * TMA.programs_per_sm, DEVICE)
    partial = Partial.empty(work, QUERY_HEADS // step.view.kv_heads, step.view.dim, parts=2)
    out = torch.empty_like(step.q)
    return microseconds(lambda: combine(step.q, step.k, step.v, partial, work, out, LOG2E), repeat=20)


def fill_bf16(arena: torch.Tensor) -> None:
    values = arena.view(torch.bfloat16)
    for i in range(0, values.numel(), 2**28):
        values[i : i + 2**28].normal_()


def fill_int8(arena: torch.Tensor, view: LayerView) -> None:
    """Random codes everywhere, and scales that bring them to about unit size in the slice under test."""
    for i in range(0, arena.numel(), 2**28):
        arena[i : i + 2**28].random_(0, 256)
    pages = arena[: arena.numel() // view.page_bytes * view.page_bytes].view(-1, view.page_bytes)
    for offset in view.scale_offsets:
        size = view.kv_heads * view.block_tokens * 4
        section = pages[:, offset : offset + size]
        values = torch.empty(len(pages), size // 4, device=arena.device).uniform_(0.005, 0.02)
        section.copy_(values.view(torch.uint8))


TMA = Tuning(programs_per_sm=1)
TRITON_LATENT = Tuning(32, 2, 4, 5)


def rate(step: Step, us: float) -> float:
    return step.kv_bytes / us / 1e6


def latent_rows(arena: torch.Tensor) -> Iterator[Row]:
    fill_bf16(arena)
    layouts = {block: gemma4_layout(block_tokens=block) for block in (16, 64)}
    views = {block: layer_view(layout.group("full"), 3) for block, layout in layouts.items()}
    kernels = (("Triton", "triton", TRITON_LATENT), ("TMA", "tma", TMA))
    for block, view in views.items():
        step = make_step(arena, view, [5003, 63, 20001, 1, 64, 8192])
        poison_ends(step)
        for name, kernel, tuning in kernels:
            us, error = run_step(step, kernel, tuning, list(range(6)))
            yield Row(
                "latent",
                f"{name}, block {block}: six odd lengths, NaN after the end",
                us,
                rate(step, us),
                "TB/s",
                error,
            )
    fill_bf16(arena)
    mixed = torch.randint(16, 32768, (64,), generator=torch.Generator().manual_seed(7)).tolist()
    for title, past in (
        ("8 x 65,536", [65536] * 8),
        ("1 x 131,072", [131072]),
        (f"64 mixed, {sum(mixed):,} tokens", mixed),
    ):
        for block, view in views.items():
            step = make_step(arena, view, past)
            for name, kernel, tuning in kernels:
                us, error = run_step(step, kernel, tuning, [0])
                yield Row("latent", f"{name}, block {block}: {title}", us, rate(step, us), "TB/s", error)
        us = combine_microseconds(step)
        yield Row("latent", f"combine with the present token: {title}", us, us, "us")
    view = views[16]
    slab = layouts[16].pages_per_slab(layouts[16].group("full"))
    step = make_step(arena, view, [65536] * 8, pages_per_slab=slab)
    us, error = run_step(step, "tma", TMA, [0])
    yield Row(
        "latent", f"TMA, block 16: 8 x 65,536, pages slab by slab ({slab} to a slab)", us, rate(step, us), "TB/s", error
    )
    # the same few pages again and again, so that nearly all reads come from L2: how fast are the kernels themselves?
    step.table.copy_(step.table[:1, :64].repeat(8, step.table.shape[1] // 64 + 1)[:, : step.table.shape[1]])
    for name, kernel, tuning in kernels:
        us, error = run_step(step, kernel, tuning, [0])
        yield Row(
            "latent", f"{name}, block 16: 8 x 65,536, all in the same 64 pages (L2)", us, rate(step, us), "TB/s", error
        )


PAIR_TUNINGS = (Tuning(64, 2, 4, 3), Tuning(32, 3, 4, 3), Tuning(32, 3, 4, 5), Tuning(64, 2, 4, 5))


def best(step: Step, tunings: tuple[Tuning, ...], check: list[int]) -> tuple[float, float, Tuning]:
    results = []
    for tuning in tunings:
        with contextlib.suppress(OutOfResources):  # some tilings of wide heads exceed shared memory
            results.append((*run_step(step, "triton", tuning, check), tuning))
    return min(results, key=lambda r: r[0])


def sliding_rows(arena: torch.Tensor) -> Iterator[Row]:
    fill_bf16(arena)
    view = layer_view(gemma4_layout().group("window-1024"), 7)
    odd = make_step(arena, view, [1500, 3, 1023, 1024, 1025, 70001], WINDOW_TOKENS)
    us, error, tuning = best(odd, PAIR_TUNINGS[:1], list(range(6)))
    yield Row("sliding", "six odd lengths, window 1,024", us, rate(odd, us), "TB/s", error)
    for batch in (8, 64):
        # windows that start anywhere in a page, as in a running engine
        step = make_step(arena, view, (torch.randint(2000, 100000, (batch,))).tolist(), WINDOW_TOKENS)
        us, error, tuning = best(step, PAIR_TUNINGS, [0, batch - 1])
        yield Row(
            "sliding", f"{batch} x 1,023 past tokens, any start; {short(tuning)}", us, rate(step, us), "TB/s", error
        )
    us = combine_microseconds(step)
    yield Row("sliding", "combine with the present token, batch 64", us, us, "us")


def full_pair_rows(arena: torch.Tensor) -> Iterator[Row]:
    """What a latent is up against: K and V both stored, K already rotated."""
    fill_bf16(arena)
    step = make_step(arena, layer_view(gemma4_layout(latent=False).group("full"), 3), [65536] * 8)
    us, error, tuning = best(step, PAIR_TUNINGS, [0])
    yield Row("pair", f"full layer, 8 x 65,536; {short(tuning)}", us, rate(step, us), "TB/s", error)


def int8_rows(arena: torch.Tensor) -> Iterator[Row]:
    layout = gemma4_layout("int8_per_token_head")
    window = layer_view(layout.group("window-1024"), 7)
    fill_int8(arena, window)
    step = make_step(arena, window, torch.randint(2000, 100000, (64,)).tolist(), WINDOW_TOKENS)
    us, error, tuning = best(step, PAIR_TUNINGS, [0, 63])
    yield Row("int8", f"sliding pair, 64 x 1,023; {short(tuning)}", us, rate(step, us), "TB/s", error)
    pair = layer_view(gemma4_layout("int8_per_token_head", latent=False).group("full"), 3)
    fill_int8(arena, pair)
    step = make_step(arena, pair, [65536] * 8)
    us, error, tuning = best(step, PAIR_TUNINGS, [0])
    yield Row("int8", f"full pair, 8 x 65,536; {short(tuning)}", us, rate(step, us), "TB/s", error)
    latent = layer_view(layout.group("full"), 3)
    fill_int8(arena, latent)
    step = make_step(arena, latent, [65536] * 8)
    us, error, tuning = best(step, (Tuning(32, 2, 4, 3), Tuning(64, 1, 8, 3), Tuning(32, 2, 8, 4)), [0])
    yield Row("int8", f"full latent, 8 x 65,536; Triton, {short(tuning)}", us, rate(step, us), "TB/s", error)
    for title, past in (
        ("six odd lengths", [5003, 63, 20001, 1, 64, 8192]),
        ("8 x 65,536", [65536] * 8),
        ("1 x 131,072", [131072]),
    ):
        step = make_step(arena, latent, past)
        us, error = run_step(step, "tma", TMA, list(range(6 if len(past) == 6 else 1)))
        yield Row("int8", f"full latent, {title}; TMA", us, rate(step, us), "TB/s", error)


def short(tuning: Tuning) -> str:
    return f"tile {tuning.tile_tokens}, {tuning.num_warps} warps, {tuning.num_stages} stages"
