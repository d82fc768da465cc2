"""Greedy generation through the real scheduler, manager and runner, with every knob that must not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tests.running.small_models import spec_of, weights_of
from windowpane.drafts.drafter import Asking, DraftingModel, ModelDrafter
from windowpane.kv.caches import Cache, StateCache, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats, rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Full
from windowpane.kv.tier import HostTier
from windowpane.lowering.linear import Weights
from windowpane.models import ModelSpec
from windowpane.runners.plain import Runner
from windowpane.schedule.adapters import AdapterSlots
from windowpane.schedule.batch import accepted
from windowpane.schedule.request import NO_TOKENS, Request, SamplingParams, Tokens
from windowpane.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class Knobs:
    """What paging and batching may vary. `room` is in sequences of the longest request: below 1 forces preemption."""

    chunk_tokens: int = 4096
    block_tokens: int | None = None
    slab_bytes: int | None = None
    num_slots: int = 8
    room: float = 8.0
    growth_tokens: int = 32
    swa_full: bool = False
    state_slots: int = 2
    kv_cache_dtype: str = "auto"
    poison: bool = True
    keep: bool = False  # restore points
    host_room: float = 0.0  # of a host tier, as `room`; everything is spilled as soon as it is there
    one_by_one: bool = False
    message_ends: tuple[int, ...] = ()
    drafts: int = 0  # of a sequence in a step, where `guess` has so many: what may follow a request's known tokens
    guess: Callable[[Request, int], Tokens] | None = None
    adapters: tuple[int, ...] = ()  # of each prompt, 0 for none
    adapter_slots: int = 1


@dataclass
class Run:
    outputs: list[list[int]]
    logits: list[list[torch.Tensor]]
    scheduler: Scheduler
    runner: Runner
    peak_pages: list[int]
    requests: list[Request] = field(default_factory=list)
    accepted_drafts: int = 0


def layout_of(caches: list[Cache], knobs: Knobs) -> Layout:
    caches = [replace(c, slots=knobs.state_slots) if isinstance(c, StateCache) else c for c in caches]
    if knobs.swa_full:
        caches = [replace(c, retention=Full()) if isinstance(c, TokenCache) else c for c in caches]
    formats = resolve_formats(knobs.kv_cache_dtype, group_caches(caches), "float32")
    return plan_layout(caches, formats, "float32", block_tokens=knobs.block_tokens, slab_bytes=knobs.slab_bytes)


def generate(name: str, prompts: list[list[int]], max_tokens: int, knobs: Knobs) -> Run:
    """Greedy continuations of all prompts, run together, and the logits of every sampled token."""
    return generate_with(spec_of(name), weights_of(name), prompts, max_tokens, knobs)


def generate_with(spec: ModelSpec, weights: Weights, prompts: list[list[int]], max_tokens: int, knobs: Knobs) -> Run:
    def make_runner(layout: Layout, slabs: int, length: int) -> Runner:
        device = torch.device("cpu")
        sizes = (layout, slabs, knobs.num_slots, length)
        runner = Runner(
            spec,
            weights,
            *sizes,
            device=device,
            dtype=torch.float32,
            draft_tokens=knobs.drafts,
            host_slabs=host_slabs(layout, length, knobs),
        )
        runner.pages.host.memory.fill_(0xFF)
        return runner

    return generate_by(make_runner, list(spec.caches), prompts, max_tokens, knobs)


def generate_by(
    make_runner: Callable[[Layout, int, int], Runner],
    caches: list[Cache],
    prompts: list[list[int]],
    max_tokens: int,
    knobs: Knobs,
) -> Run:
    """As `generate`, by any runner: it is made of a layout of these caches, slabs, and the longest length."""
    layout = layout_of(caches, knobs)
    longest = max(len(p) for p in prompts) + max_tokens
    rollback = rollback_for(knobs.drafts, layout)
    slabs = max(1, int(knobs.room * Capacity(layout, 0, rollback).slabs_for(1, longest)))
    manager = KVManager(layout, slabs, knobs.num_slots, longest, rollback)
    points = RestorePoints(manager) if knobs.keep else None
    budget = max(knobs.chunk_tokens, knobs.num_slots * (1 + knobs.drafts))
    tier = None
    if points is not None and knobs.host_room:
        tier = HostTier(points, host_slabs(layout, longest, knobs), ahead=1.0)
    slots = AdapterSlots(knobs.adapter_slots) if knobs.adapters else None
    scheduler = Scheduler(
        manager, budget, knobs.growth_tokens, points, draft_tokens=knobs.drafts, tier=tier, adapter_slots=slots
    )
    runner = make_runner(layout, slabs, longest)
    requests = [
        Request(str(i), np.array(p), SamplingParams(max_tokens=max_tokens), message_ends=knobs.message_ends)
        for i, p in enumerate(prompts)
    ]
    for request, adapter in zip(requests, knobs.adapters, strict=False):
        request.adapter = adapter
    run = Run([r.output for r in requests], [[] for _ in requests], scheduler, runner, [0] * len(layout.groups))
    run.requests = requests
    for request in requests:
        scheduler.add(request)
        while knobs.one_by_one and scheduler.has_work:
            _step(run, requests, knobs)
    while scheduler.has_work:
        _step(run, requests, knobs)
    return run


def host_slabs(layout: Layout, longest: int, knobs: Knobs) -> int:
    return int(knobs.host_room * Capacity(layout, 0).slabs_for(1, longest))


def _step(run: Run, requests: list[Request], knobs: Knobs) -> None:
    scheduler, runner = run.scheduler, run.runner
    if scheduler.tier is not None:
        scheduler.land(runner.landed())
    batch = scheduler.schedule(_drafts(scheduler, getattr(runner, "drafter", None), knobs))
    if batch is None:
        assert not scheduler.has_work, "work is left but nothing can be scheduled"
        return
    run.peak_pages = [max(a, b) for a, b in zip(run.peak_pages, scheduler.manager.live_pages, strict=True)]
    slots = [*batch.decode_slots.tolist(), *(c.slot for c in batch.chunks if c.samples)]
    asking = [requests.index(scheduler.running[slot]) for slot in slots]
    logits = runner.forward(batch).logits.split(batch.sampled_rows.tolist())
    emitted = []
    for index, rows, drafts in zip(asking, logits, batch.drafts or [NO_TOKENS] * len(asking), strict=True):
        tokens = rows.argmax(dim=-1)
        count = accepted(tokens.tolist(), drafts)
        run.accepted_drafts += count
        run.logits[index] += [row.clone() for row in rows[: count + 1]]
        emitted.append(tokens[: count + 1])
    if emitted:
        runner.take_sampled(torch.tensor(slots, dtype=torch.int64), torch.stack([tokens[-1] for tokens in emitted]))
    sampled = torch.cat(emitted).numpy() if emitted else ()
    scheduler.commit(sampled, [len(tokens) for tokens in emitted] if batch.drafts else None)
    if knobs.poison:
        poison_unheld(run)


def _drafts(scheduler: Scheduler, drafter: DraftingModel | None, knobs: Knobs) -> dict[int, Tokens]:
    if not knobs.drafts:
        return {}
    rooms = {slot: scheduler.draft_room(slot) for slot in scheduler.running}
    if drafter is not None:
        lengths = scheduler.manager.lengths
        asking = [Asking(scheduler.running[s], s, int(lengths[s]), room) for s, room in rooms.items() if room]
        return {
            a.slot: tokens
            for a, tokens in zip(asking, ModelDrafter(drafter).propose(asking), strict=True)
            if len(tokens)
        }
    assert knobs.guess is not None
    guessed = {slot: knobs.guess(scheduler.running[slot], room) for slot, room in rooms.items() if room}
    return {slot: tokens for slot, tokens in guessed.items() if len(tokens)}


def poison_unheld(run: Run) -> None:
    """Fill every byte that no sequence holds with NaN patterns: whoever reads them shows it."""
    manager, arena = run.scheduler.manager, run.runner.arena
    units = arena.view(-1, 256)  # what offsets count
    held = torch.zeros(len(units), dtype=torch.bool)
    for g, table in enumerate(manager.tables):
        page_units = manager.layout.groups[g].page_units
        pages = [table.page_offsets(slot) for slot in range(manager.num_slots)]
        pages += [manager.point_offsets(point, g) for point in manager.restore_points]
        pages += [manager.books.shared[g].offsets[ids[g]] for ids in manager.books.transit.values()]
        # A state's snapshot is copied with the next step, even where its sequence has ended by then.
        pages.append(np.array([move.source for move in manager.books.log.copies if move.group == g], dtype=np.int64))
        for offset in np.concatenate(pages).tolist():
            held[offset : offset + page_units] = True
    units[~held] = 0xFF
