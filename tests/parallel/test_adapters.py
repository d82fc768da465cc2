"""Two ranks add what one does: each has its part of every adapter, and holds the bytes of the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.parallel.ranks import CPU, RANKS, Model, assert_same, start_on
from tests.running.adapters import RANK, merged, write_adapter
from tests.running.harness import Knobs, generate_by, generate_with
from tests.running.test_against_transformers import prompt
from windowpane.engine.adapters import EngineAdapters
from windowpane.kv.layout import Layout
from windowpane.models.adapters import AdapterRoom, adapter_bytes
from windowpane.models.blocks import on_rank
from windowpane.models.tensors import ONLY_RANK
from windowpane.parallel.launch import Workers
from windowpane.parallel.runner import ParallelRunner
from windowpane.schedule.adapters import AdapterSlots

NEW_TOKENS = 8
ROOM = AdapterRoom(2, RANK)


@pytest.mark.parametrize("name", ["gemma4 everything", "phi3", "qwen3 experts", "qwen3-next"])
def test_two_ranks_say_what_merged_weights_do(name: str, workers: Workers, tmp_path: Path) -> None:
    model = Model.named(name, tmp_path)
    deltas = [{}, *(write_adapter(tmp_path / str(seed), model.spec, seed) for seed in (1, 2))]
    prompts, adapters = [prompt(1, 40), prompt(2, 9), prompt(3, 30)], (1, 0, 2)
    knobs = Knobs(chunk_tokens=33, poison=False, adapters=adapters, adapter_slots=ROOM.slots)

    def make_runner(layout: Layout, slabs: int, length: int) -> ParallelRunner:
        job = replace(model.job(layout, slabs, knobs.num_slots, length), adapter_room=ROOM)
        runner, reports = start_on(workers, job)
        assert model.spec.decoder is not None
        planned = adapter_bytes(on_rank(model.spec.decoder, RANKS), ROOM, "float32")
        assert [report.adapter_bytes for report in reports] == [planned] * RANKS
        own = runner._own
        assert own.adapters is not None
        read = partial(job.read_adapter, place=workers.group.place)
        known = EngineAdapters(own.adapters, AdapterSlots(ROOM.slots), read, workers)
        assert [known.load(str(seed), tmp_path / str(seed)).number for seed in (1, 2)] == [1, 2]
        return runner

    caches = [cache.shard(RANKS) for cache in model.spec.caches]
    run = generate_by(make_runner, caches, prompts, NEW_TOKENS, knobs)  # type: ignore[arg-type]
    weights = model.job(None, 0, 0, 0).load(CPU, ONLY_RANK)  # type: ignore[arg-type]
    for i, adapter in enumerate(adapters):
        alone = generate_with(model.spec, merged(dict(weights), deltas[adapter]), [prompts[i]], NEW_TOKENS, Knobs())
        assert_same(replace(run, outputs=[run.outputs[i]], logits=[run.logits[i]]), alone)
