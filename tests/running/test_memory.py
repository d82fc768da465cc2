from __future__ import annotations

from pathlib import Path

import torch

from tests.running.harness import Knobs, generate, layout_of
from tests.running.small_models import WINDOW, spec_of
from tests.running.test_against_transformers import prompt
from windowpane.device import heap
from windowpane.device import pages as pages_module
from windowpane.kv import arena as arena_module
from windowpane.kv.capacity import Capacity
from windowpane.runners.plain import LONG_PROMPT_TOKENS

CANARY = 0xA5


def test_only_pages_that_were_handed_out_are_written(monkeypatch):
    """Fill the arena with a canary; afterwards changed bytes lie only in pages that the manager gave to someone."""
    handed_out: set[tuple[int, int]] = set()

    def recording(take):
        def take_and_record(self, group, *about):
            offsets = take(self, group, *about)
            handed_out.update((group, int(o)) for o in offsets)
            return offsets

        return take_and_record

    for name in ("take", "take_block"):
        monkeypatch.setattr(arena_module.Arena, name, recording(getattr(arena_module.Arena, name)))
    monkeypatch.setattr(pages_module, "_zeros", lambda size, device: torch.full((size,), CANARY, dtype=torch.uint8))
    run = generate("gemma4 everything", [prompt(1, 77), prompt(2, 30)], 20, Knobs(chunk_tokens=40, poison=False))
    layout = run.scheduler.manager.layout
    allowed = torch.zeros(len(run.runner.arena), dtype=torch.bool)
    for group, offset in handed_out:
        allowed[offset * 256 : offset * 256 + layout.groups[group].page_bytes] = True
    changed = run.runner.arena != CANARY
    assert changed.any()
    assert not (changed & ~allowed).any()


def test_peak_pages_are_what_the_plan_says():
    for name in ("gemma3", "gemma4 everything"):
        prompt_tokens, new_tokens = 5 * WINDOW, 30
        run = generate(name, [prompt(1, prompt_tokens)], new_tokens, Knobs(chunk_tokens=17, block_tokens=16))
        layout = layout_of(list(spec_of(name).caches), Knobs(block_tokens=16))
        # The last sampled token is never computed.
        assert run.peak_pages == Capacity(layout, 0).pages(prompt_tokens + new_tokens - 1)


def test_a_long_prefill_owns_no_more_window_pages_than_a_short_one():
    peaks = []
    for prompt_tokens in (2 * WINDOW, 40 * WINDOW):
        run = generate("gemma3", [prompt(1, prompt_tokens)], 4, Knobs(block_tokens=16, poison=False))
        layout = run.scheduler.manager.layout
        peaks.append(run.peak_pages[layout.groups.index(layout.group(f"window-{WINDOW}"))])
    assert peaks[0] == peaks[1]


def test_the_present_passes_through_the_kv_format():
    """With bfloat16 pages under float32 compute, chunking changes far less than the format does.

    Not nothing: a value that lies between two bfloat16 numbers may be rounded up in one product and down in another.
    """
    whole, chunked = (
        torch.stack(generate("gemma3", [prompt(1, 77)], 16, knobs).logits[0])
        for knobs in (Knobs(kv_cache_dtype="bfloat16"), Knobs(chunk_tokens=7, kv_cache_dtype="bfloat16"))
    )
    exact = torch.stack(generate("gemma3", [prompt(1, 77)], 16, Knobs()).logits[0])
    from_format = (whole - exact).abs().max()
    assert from_format > 1e-4
    assert (whole - chunked).abs().max() <= from_format / 5


def test_memory_that_long_prompts_took_goes_back_to_the_system(monkeypatch):
    given_back = []
    monkeypatch.setattr(heap, "give_back", lambda: given_back.append(1))
    for prompt_tokens, times in ((30, 0), (LONG_PROMPT_TOKENS, 1)):
        generate("gemma3", [prompt(1, prompt_tokens)], 3, Knobs(block_tokens=16, poison=False))
        assert len(given_back) == times


def test_freed_memory_is_given_back():
    blocks = [torch.ones(16 * 1024) for _ in range(1024)]  # of 64 KiB: the allocator keeps such
    del blocks[:-1]
    held = resident_bytes()
    heap.give_back()
    assert resident_bytes() < held - 32 * 2**20


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) * 1024
