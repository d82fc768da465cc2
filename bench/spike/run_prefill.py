"""Prefill parts of the spike: one sequence, one layer, a chunk of present tokens over a past in pages."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.spike.decode import angle_tables, rebuild_k
from bench.spike.measure import LOG2E, Row, attend, microseconds, relative_error, require
from bench.spike.pages import (
    QUERY_HEADS,
    WINDOW_TOKENS,
    LayerView,
    gemma4_layout,
    layer_view,
    random_tables,
    rows,
    write_rows,
)
from bench.spike.prefill256 import prefill256
from bench.spike.prefill512 import prefill512
from bench.spike.rebuild import copy_tail, rotate, rotated_rows
from bench.spike.run_decode import fill_bf16

DEVICE = "cuda"
NO_WINDOW = 2**30


@dataclass(frozen=True)
class Chunk:
    """`past` counts held tokens, from the first slot of the first page."""

    arena: torch.Tensor
    view: LayerView
    table: torch.Tensor
    past: int
    window: int
    q: torch.Tensor
    present: tuple[torch.Tensor, ...]
    w: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def flops(self) -> float:
        """Two products over the pairs a row really sees: masked work inside a tile does not count."""
        row = torch.arange(self.tokens, dtype=torch.float64) + self.past + 1
        return 4.0 * self.view.dim * QUERY_HEADS * float(row.clamp(max=self.window).sum())


def make_chunk(arena: torch.Tensor, view: LayerView, tokens: int, past: int, window: int = NO_WINDOW) -> Chunk:
    # a window group holds the pages from the first visible token's on
    held = past - max(0, past - window + 1) // view.block_tokens * view.block_tokens
    table = random_tables(view, [max(held, 1)], arena.numel(), DEVICE)[0]
    q = (torch.randn(tokens, QUERY_HEADS, view.dim, device=DEVICE) * 2 / view.dim**0.5).bfloat16()
    present = tuple(torch.randn(tokens, view.kv_heads * view.dim, device=DEVICE).bfloat16() for _ in view.data_offsets)
    w = torch.ones(view.dim, device=DEVICE)
    w[:128].uniform_(0.5, 1.5)
    angles = angle_tables(held + tokens, 512, DEVICE) if view.latent else (w, w)
    return Chunk(arena, view, table, held, window, q, present, w, angles)


class Runner:
    """Scratch and output of one chunk; `prepare` is what runs once per chunk and layer before `attend`."""

    def __init__(self, chunk: Chunk):
        view = chunk.view
        self.chunk = chunk
        self.out = torch.full_like(chunk.q, float("nan"))
        self.tail = torch.full(
            (len(view.data_offsets) * view.kv_heads * 64, view.dim), float("nan"), device=DEVICE, dtype=torch.bfloat16
        )
        heads, count = (view.kv_heads, rotated_rows(chunk.past, chunk.tokens)) if view.latent else (1, 64)
        self.rotated = torch.full((heads, count, 128), float("nan"), device=DEVICE, dtype=torch.bfloat16)

    def prepare(self) -> None:
        c = self.chunk
        copy_tail(c.arena, c.view, c.table, c.past, self.tail)
        if c.view.latent:
            rotate(c.arena, c.view, c.table, c.present[0], c.past, c.angles, c.w, self.rotated)

    def attend(self) -> None:
        c = self.chunk
        if c.view.dim == 512:
            prefill512(c.q, self.out, c.arena, c.view, c.table, c.past, c.present, self.tail, self.rotated, LOG2E)
        else:
            prefill256(c.q, self.out, c.arena, c.view, c.table, c.past, *c.present, self.tail, c.window, LOG2E)


def reference(c: Chunk, tokens: torch.Tensor) -> torch.Tensor:
    """Output of some tokens of the chunk in float32: [tokens, 32, dim]."""
    stored = []
    for which, fresh in enumerate(c.present):
        now = fresh.view(c.tokens, c.view.kv_heads, c.view.dim).transpose(0, 1).float()
        before = rows(c.arena, c.view, c.table, range(c.past), which, torch.bfloat16).float()
        stored.append(torch.cat([before, now], 1))
    k, v = (stored * 2)[:2]
    if c.view.latent:
        k = rebuild_k(k, c.w, *(a[: k.shape[1]] for a in c.angles))
    key = torch.arange(k.shape[1], device=DEVICE)[None]
    row = (c.past + tokens)[:, None]
    hidden = (key > row) | (key <= row - c.window)
    return attend(c.q[tokens].transpose(0, 1), k, v, hidden).transpose(0, 1)


def poison_end(c: Chunk) -> None:
    """Make the rows of the past's last page that no token fills NaN, so that a kernel that lets one in is caught."""
    slots = -(-c.past // c.view.block_tokens) * c.view.block_tokens
    nan = torch.full((c.view.kv_heads, slots - c.past, c.view.dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    for which in range(len(c.view.data_offsets)):
        write_rows(c.arena, c.view, c.table, range(c.past, slots), which, nan)


def check_and_time(c: Chunk, timed: bool = True) -> tuple[float, float, float]:
    """Microseconds of attention and of what is prepared for it, and the error on a sample of rows."""
    runner = Runner(c)
    runner.prepare()
    runner.attend()
    if not bool(runner.out.isfinite().all()):
        raise AssertionError(f"{c.view} past {c.past} tokens {c.tokens}: output has NaN or Inf")
    sample = torch.unique(
        torch.cat([torch.randint(c.tokens, (29,)), torch.tensor([0, c.tokens // 2, c.tokens - 1])])
    ).to(DEVICE)
    error = require(
        relative_error(runner.out[sample], reference(c, sample)), 1e-2, f"prefill past {c.past} tokens {c.tokens}"
    )
    if not timed:
        return 0.0, 0.0, error
    prepare = microseconds(runner.prepare) if c.view.latent else 0.0
    return microseconds(runner.attend, repeat=1, rounds=5), prepare, error


def prefill_rows(arena: torch.Tensor) -> Iterator[Row]:
    fill_bf16(arena)
    latent = {bt: layer_view(gemma4_layout(block_tokens=bt).group("full"), 3) for bt in (16, 64)}
    pair = layer_view(gemma4_layout(latent=False).group("full"), 3)
    window = layer_view(gemma4_layout().group("window-1024"), 7)
    for name, view, span in (
        ("latent 512, block 16", latent[16], NO_WINDOW),
        ("latent 512, block 64", latent[64], NO_WINDOW),
        ("pair 512", pair, NO_WINDOW),
        ("pair 256, window 1,024", window, WINDOW_TOKENS),
        ("pair 256, causal", window, NO_WINDOW),
    ):
        errors = []
        for tokens, past in ((777, 1037), (64, 0), (5, 3001)):
            chunk = make_chunk(arena, view, tokens, past, span)
            poison_end(chunk)
            errors.append(check_and_time(chunk, timed=False)[2])
            fill_bf16(arena)  # without the NaNs
        yield Row("prefill", f"{name}: odd chunks over odd pasts, NaN after the end", 0.0, 0.0, "-", max(errors))
    chunks = [(4096, 0), (8192, 0), (4096, 16384), (4096, 65536), (8192, 65536)]
    short = [(8192, 0), (4096, 65536)]
    cases = [("latent 512, block 16", latent[16], NO_WINDOW, chunks)]
    cases += [("latent 512, block 64", latent[64], NO_WINDOW, short)]
    cases += [("pair 512", pair, NO_WINDOW, short)]
    cases += [("pair 256, window 1,024", window, WINDOW_TOKENS, [(4096, 0), (8192, 0), (4096, 65536), (8192, 65536)])]
    cases += [("pair 256, causal", window, NO_WINDOW, [(8192, 0), (4096, 16384)])]
    for name, view, span, shapes in cases:
        for tokens, past in shapes:
            c = make_chunk(arena, view, tokens, past, span)
            us, prepare_us, error = check_and_time(c)
            yield Row("prefill", f"{name}: {tokens:,} tokens over {past:,}", us, c.flops / us / 1e6, "TFLOP/s", error)
            if view.latent:
                yield Row(
                    "prefill",
                    f"{name}: {tokens:,} tokens over {past:,}, rotating keys once",
                    prepare_us,
                    100 * prepare_us / us,
                    "% of it",
                )
    q = torch.randn(1, QUERY_HEADS, 8192, 256, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 16, 8192, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    us = microseconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        repeat=1,
        rounds=5,
    )
    yield Row(
        "prefill",
        "torch SDPA 256, causal: 8,192 tokens over 0",
        us,
        2.0 * 8192**2 * 256 * QUERY_HEADS / us / 1e6,
        "TFLOP/s",
    )
