"""Routed experts that requests are given are those that one whole pass without pages chooses, however they were run."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.running.harness import Knobs, Run, host_slabs, layout_of, poison_unheld
from tests.running.small_models import WINDOW, reference, save, spec_of, weights_of
from tests.running.test_against_transformers import prompt
from windowpane import LLM
from windowpane.device.pages import KVPages
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampler
from windowpane.kv.caches import RouteCache, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.changes import NO_CHANGES
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Full
from windowpane.kv.tier import HostTier
from windowpane.lowering.linear import Weights
from windowpane.lowering.reference.context import StepState
from windowpane.lowering.reference.mixers import ExpertsMixer
from windowpane.models.spec import ModelSpec
from windowpane.runners.plain import Runner
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.schedule.request import FinishReason, Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler
from windowpane.schedule.step import Step

# Full layers alone; windows; windows with K = V and experts beside an MLP; states, where layer 1 has no experts.
NAMES = ("qwen3 experts", "gpt-oss", "gemma4 experts", "qwen3-next")
BOTH_WAYS = [(name, True) for name in NAMES] + [("gemma4 experts", False)]
CPU = torch.device("cpu")


@cache
def model(name: str) -> tuple[ModelSpec, Weights]:
    return spec_of(name), weights_of(name)


@cache
def whole_pass(name: str, tokens: tuple[int, ...]) -> NDArray[np.uint8]:
    """What the routers choose for all tokens at once, by a model that keeps no routes."""
    spec, weights = model(name)
    layout = layout_of(list(spec.caches), Knobs())
    slabs = Capacity(layout, 0).slabs_for(1, len(tokens))
    runner = Runner(spec, dict(weights), layout, slabs, 1, len(tokens), device=CPU, dtype=torch.float32)
    manager = KVManager(layout, slabs, 1, len(tokens))
    manager.start(0, len(tokens))
    manager.extend(0, len(tokens))
    chosen: list[torch.Tensor] = []

    def note(mixer: ExpertsMixer, x: torch.Tensor, state: StepState):
        chosen.append((routing := route(mixer, x, state)).ids)
        return routing

    route, ExpertsMixer.route = ExpertsMixer.route, note
    try:
        nobody = np.zeros(0, dtype=np.int64)
        chunk = PromptChunk(0, 0, np.array(tokens, dtype=np.int32), samples=True)
        batch = Batch(1, nobody, nobody, [chunk], manager.state_slot.copy(), manager.take_changes())
        runner.forward(batch, all_logits_slots=frozenset({0}))
    finally:
        ExpertsMixer.route = route
    return torch.stack(chosen, dim=1).numpy().astype(np.uint8)


def engine_of(name: str, longest: int, knobs: Knobs, *, overlapped: bool = False) -> Engine:
    spec, weights = model(name)
    spec = spec.with_routes()
    layout = layout_of([*spec.caches, spec.routes], knobs)
    slabs = max(1, int(knobs.room * Capacity(layout, 0).slabs_for(1, longest)))
    manager = KVManager(layout, slabs, knobs.num_slots, longest)
    points = RestorePoints(manager) if knobs.keep else None
    host = host_slabs(layout, longest, knobs)
    tier = HostTier(points, host, ahead=1.0) if points is not None and host else None
    budget = max(knobs.chunk_tokens, knobs.num_slots)
    scheduler = Scheduler(manager, budget, knobs.growth_tokens, points, tier=tier)
    runner = Runner(
        spec, dict(weights), layout, slabs, knobs.num_slots, longest, device=CPU, dtype=torch.float32, host_slabs=host
    )
    return Engine(scheduler, runner, Sampler(spec.vocab_size, CPU, 0), async_scheduling=overlapped)


def generate(name: str, requests: list[Request], knobs: Knobs, *, overlapped: bool = False) -> Engine:
    """By the real engine, with freed pages poisoned between steps."""
    engine = engine_of(name, max(request.longest_kv + 1 for request in requests), knobs, overlapped=overlapped)
    run = Run([], [], engine.scheduler, engine.runner, [])
    for request in requests:
        engine.add(request)
        while knobs.one_by_one and engine.has_work:
            engine.step()
            poison_unheld(run)
    while engine.has_work:
        engine.step()
        poison_unheld(run)
    return engine


def asking(index: int, tokens: list[int], max_tokens: int = 12, message_ends=(), **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, return_routed_experts=True, **fields)
    return Request(str(index), np.array(tokens), params, message_ends=message_ends)


def assert_right(name: str, requests: list[Request]) -> None:
    for request in requests:
        tokens = (*request.prompt.tolist(), *request.output[:-1])
        expected = whole_pass(name, tokens)[request.params.routed_experts_prompt_start :]
        assert request.routed_experts is not None and request.routed_experts.dtype == np.uint8
        assert np.array_equal(request.routed_experts, expected), request.id


@pytest.mark.parametrize("chunk_tokens", [1, 17, 4096])
@pytest.mark.parametrize("name", [*NAMES, "nemotron-h"])  # whose last layer has experts and keeps nothing else
def test_in_chunks_of_any_size(name, chunk_tokens):
    knobs = Knobs(chunk_tokens=chunk_tokens, block_tokens=16, num_slots=1 if chunk_tokens == 1 else 4)
    requests = [asking(0, prompt(1, 3 * WINDOW + 5)), asking(1, prompt(2, 1)), asking(2, prompt(3, WINDOW))]
    requests = requests[: knobs.num_slots]
    generate(name, requests, knobs)
    assert_right(name, requests)


@pytest.mark.parametrize(("name", "overlapped"), BOTH_WAYS)
def test_of_tokens_found_by_prefix_reuse(name, overlapped):
    stem, ends = prompt(1, 70), (20, 70)
    prompts = [stem + prompt(2, 30), stem + prompt(3, 25), stem + prompt(2, 30)]
    requests = [asking(i, p, message_ends=ends) for i, p in enumerate(prompts)]
    knobs = Knobs(chunk_tokens=33, block_tokens=16, keep=True, one_by_one=True)
    generate(name, requests, knobs, overlapped=overlapped)
    assert_right(name, requests)
    # The last is known to its end: nothing of its prompt is computed.
    assert [r.cached_tokens for r in requests] == [0, 70, 100]


@pytest.mark.parametrize(("name", "overlapped"), BOTH_WAYS)
def test_of_sessions_that_went_to_the_host_and_came_back(name, overlapped):
    """Everything is spilled at every step, and what the device has is given up before each session's next turn."""
    knobs = Knobs(chunk_tokens=33, block_tokens=16, keep=True, room=2.0, host_room=12.0)
    engine = engine_of(name, 100, knobs, overlapped=overlapped)
    run = Run([], [], engine.scheduler, engine.runner, [])
    turns = [asking(i, prompt(i % 2, 61) + prompt(9, 9 * (i // 2))) for i in range(4)]
    for turn in turns:
        for point in engine.manager.restore_points:
            engine.manager.drop(point)
        engine.add(turn)
        while engine.has_work:
            engine.step()
            poison_unheld(run)
    assert_right(name, turns)
    assert engine.scheduler.tier is not None and engine.scheduler.tier.stats.fetches == 2
    assert [turn.cached_tokens for turn in turns] == [0, 0, 61, 61]


@pytest.mark.parametrize(("name", "overlapped"), BOTH_WAYS)
def test_after_preemption(name, overlapped):
    requests = [asking(seed, prompt(seed, 10), 70) for seed in range(1, 5)]
    knobs = Knobs(chunk_tokens=64, block_tokens=16, room=1.6, growth_tokens=4)
    engine = generate(name, requests, knobs, overlapped=overlapped)
    assert engine.scheduler.preemptions > 0, "this test is about preemption"
    assert_right(name, requests)


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_a_stop_token_ends_the_rows_with_the_answer(overlapped):
    first = asking(0, prompt(1, 30))
    generate("gpt-oss", [first], Knobs())
    end = first.output.index(first.output[5])
    stopped = asking(1, prompt(1, 30), stop_token_ids=(first.output[5],))
    from_the_answer = asking(2, prompt(1, 30), routed_experts_prompt_start=30, max_tokens=1)
    from_within = asking(3, prompt(1, 30), routed_experts_prompt_start=17)
    generate("gpt-oss", [stopped, from_the_answer, from_within], Knobs(chunk_tokens=8), overlapped=overlapped)
    assert_right("gpt-oss", [stopped, from_the_answer, from_within])
    shapes = [r.routed_experts.shape for r in (stopped, from_the_answer, from_within)]
    assert shapes == [(30 + end, 4, 2), (0, 4, 2), (30 - 17 + 11, 4, 2)]


def test_a_request_that_was_preempted_in_the_step_that_ends_it_has_all_rows():
    """A stop string is found when a step has landed. By then the request may have left its slot and wait again."""
    engine = engine_of("gpt-oss", 60, Knobs(chunk_tokens=8), overlapped=True)
    request = asking(0, prompt(1, 30), 30)
    engine.add(request)
    while len(request.output) < 9:
        engine.step()
    engine.scheduler._preempt(0)
    while not engine.scheduler.waiting:
        engine.step()
    engine.cancel(request, FinishReason.STOP)
    assert len(request.output) < 30
    assert_right("gpt-oss", [request])


def test_routers_are_those_of_transformers():
    request = asking(0, prompt(1, 40))
    generate("qwen3 experts", [request], Knobs(chunk_tokens=16))
    tokens = torch.tensor([[*request.prompt.tolist(), *request.output[:-1]]])
    with torch.no_grad():
        logits = reference("qwen3 experts")(tokens, use_cache=False, output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(3, dim=-1).indices for layer in logits], dim=1)
    assert np.array_equal(request.routed_experts, expected.numpy())


def test_more_than_256_experts_are_kept_in_two_bytes():
    cache = RouteCache((1, 3, 4), 5, 300)
    layout = layout_of([TokenCache(0, Full(), 1, 16, 16), cache], Knobs(block_tokens=16))
    group = layout.group("routed-experts")
    assert (group.stored_as, group.layers, group.page_bytes) == ("int16", 3, 512)
    pages = KVPages(layout, 16, 2, 64, CPU)
    manager = KVManager(layout, 16, 2, 64)
    for slot in range(2):
        manager.start(slot, 40)
        manager.extend(slot, 40)
    pages.before_step(manager.take_changes())
    nobody = np.zeros(0, dtype=np.int64)
    chunks = [PromptChunk(slot, 0, np.zeros(40, dtype=np.int32), samples=True) for slot in (1, 0)]
    step = Step.of(Batch(1, nobody, nobody, chunks, np.zeros(2, dtype=np.int8), NO_CHANGES))
    ids = torch.randint(0, 300, (80, 3, 5), generator=torch.Generator().manual_seed(1))
    assert pages.routes is not None
    for place, layer in enumerate(cache.layers):
        pages.routes.write(step, layer, ids[:, place])
    assert np.array_equal(pages.routes.read(1, 0, 40)(), ids[:40].numpy())
    assert np.array_equal(pages.routes.read(0, 21, 39)(), ids[61:79].numpy())


class TestLibrary:
    def test_two_ranks_answer_as_one_pass_does(self, tmp_path):
        save("qwen3 experts", tmp_path)
        flags = {"device": "cpu", "kv_cache_memory_bytes": 2**21, "max_model_len": 256, "max_num_seqs": 4}
        params = [SamplingParams(max_tokens=9, temperature=0, return_routed_experts=asks) for asks in (True, False)]
        with LLM(tmp_path, enable_return_routed_experts=True, tensor_parallel_size=2, **flags) as llm:
            told, silent = llm.generate([prompt(1, 40), prompt(2, 20)], params)
        tokens = (*told.prompt_token_ids, *told.token_ids[:-1])
        assert np.array_equal(told.routed_experts, whole_pass("qwen3 experts", tokens))
        assert silent.routed_experts is None

    def test_what_cannot_be_had_is_refused_by_name(self, tmp_path):
        save("qwen3 experts", tmp_path)
        llm = LLM(tmp_path, device="cpu", kv_cache_memory_bytes=2**21, max_model_len=256, max_num_seqs=4)
        assert [g.name for g in llm.plan.sizing.layout.groups] == ["full"]
        with pytest.raises(ValueError, match="--enable-return-routed-experts"):
            llm.generate(prompt(1, 4), SamplingParams(return_routed_experts=True))
        with pytest.raises(ValueError, match="set that too"):
            SamplingParams(routed_experts_prompt_start=3)
        engine = engine_of("gpt-oss", 60, Knobs())
        with pytest.raises(ValueError, match="5 is beyond the prompt's 4 tokens"):
            engine.add(asking(0, prompt(1, 4), routed_experts_prompt_start=5))
