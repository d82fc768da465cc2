"""The tail writer's part of the spike: exactness on a small arena, then cost per step in a stream of whole steps."""

from collections.abc import Callable, Iterator

import torch

from bench.spike.decode import Partial, Tuning, combine, decode
from bench.spike.measure import LOG2E, Row, microseconds
from bench.spike.pages import (
    QUERY_HEADS,
    WINDOW_TOKENS,
    gemma4_layout,
    layer_view,
    random_tables,
)
from bench.spike.run_decode import SMS, make_step
from bench.spike.work import plan_work
from bench.spike.writer import targets, write
from bench.spike.writer_check import check
from windowpane.kv.layout import Layout

DEVICE = "cuda"


def writer_rows(arena: torch.Tensor) -> Iterator[Row]:
    layout = gemma4_layout()
    quantised = gemma4_layout("int8_per_token_head")
    for plan in (layout, quantised):
        for group in plan.groups:
            check(layer_view(group, 2), DEVICE)
    for name, plan in (("bf16", layout), ("int8", quantised)):
        for title, batch, chunk in (("decode, batch 64", 64, 0), ("prefill chunk of 8,192", 1, 8192)):
            window_step = one_layer_writes(arena, plan, "window-1024", batch, min(chunk, WINDOW_TOKENS - 1) or 1)
            full_step = one_layer_writes(arena, plan, "full", batch, chunk or 1)

            def step(
                window_step: Callable[[int], None] = window_step, full_step: Callable[[int], None] = full_step
            ) -> None:
                for layer in range(50):
                    window_step(layer)
                for layer in range(10):
                    full_step(layer)

            us = microseconds(step, repeat=2)
            yield Row("writer", f"{name}, {title}: all 60 layers, one launch each", us, us / 60, "us a layer")
    yield from stream_rows(arena)


def stream_rows(arena: torch.Tensor) -> Iterator[Row]:
    """A sliding layer's decode with and without its write behind it: what the write adds to a step."""
    view = layer_view(gemma4_layout().group("window-1024"), 7)
    step = make_step(arena, view, torch.randint(2000, 100000, (64,)).tolist(), WINDOW_TOKENS)
    tuning = Tuning(32, 3, 4, 3)
    work = plan_work(step.first, step.past, tuning.tile_tokens, view.kv_heads, SMS * tuning.programs_per_sm, DEVICE)
    partial = Partial.empty(work, QUERY_HEADS // view.kv_heads, view.dim)
    out = torch.empty_like(step.q)
    past, first = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (step.past, step.first))
    seqs = torch.arange(64, dtype=torch.int32, device=DEVICE)
    # the slot that the window's oldest page frees; the timing does not care which one it is
    pages, slots = step.table[:, 0].contiguous(), torch.zeros_like(seqs)
    k, v = step.k.flatten(1), step.v.flatten(1)

    def read() -> None:
        decode(step.q, arena, view, step.table, first, past, step.angles, step.w, work, partial, LOG2E, tuning)
        combine(step.q, step.k, step.v, partial, work, out, LOG2E)

    def read_then_write() -> None:
        read()
        write(arena, view, k, v, seqs, pages, slots)

    alone = microseconds(read, repeat=10)
    both = microseconds(read_then_write, repeat=10)
    yield Row("writer", "sliding decode, batch 64: attention and combine", alone, alone, "us a layer")
    yield Row("writer", "the same with the write behind it, one stream", both, both - alone, "us more")


def one_layer_writes(
    arena: torch.Tensor, layout: Layout, group_name: str, batch: int, tokens: int
) -> Callable[[int], None]:
    group = layout.group(group_name)
    views = [layer_view(group, i) for i in range(group.layers)]
    view = views[0]
    table = random_tables(view, [tokens] * batch, arena.numel(), DEVICE)
    parts = [targets(view, table[seq], range(tokens)) for seq in range(batch)]
    pages, slots = (torch.cat(column) for column in zip(*parts, strict=True))
    k, v = (torch.randn(batch * tokens, view.kv_heads * view.dim, device=DEVICE).bfloat16() for _ in range(2))
    chosen = torch.arange(batch * tokens, device=DEVICE, dtype=torch.int32)
    return lambda layer: write(arena, views[layer], k, v, chosen, pages, slots)
