"""The engine's steps, plain and overlapped, over a runner that computes a known function of each sequence's history."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.test_layout import layout_of
from windowpane.engine import engine as engine_module
from windowpane.engine import sent_step as sent_step_module
from windowpane.engine.engine import Engine, TokenOutput
from windowpane.engine.sampler import Sampler
from windowpane.kv.caches import TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Full, Window
from windowpane.schedule.batch import Batch
from windowpane.schedule.request import FinishReason, Request, SamplingParams
from windowpane.schedule.scheduler import RequestTooLong, Scheduler

VOCAB = 128
CACHES = [TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(64), 1, 64, 64)]
BOTH_WAYS = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])


def model_logits(history: tuple[int, ...]) -> torch.Tensor:
    """The model: logits are any fixed function of the whole history."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(history) % 2**31))


@dataclass
class Output:
    logits: torch.Tensor
    prompt_logits: dict[int, Callable[[slice], torch.Tensor]] = field(default_factory=dict)
    too_far: torch.Tensor | None = None


class HistoryRunner:
    """Knows each slot's tokens, as far as batches and sampled tokens have told it. Can be told to fail a step."""

    def __init__(self, num_slots: int) -> None:
        self.history: dict[int, tuple[int, ...]] = {}
        self.sampled = torch.zeros(num_slots, dtype=torch.int64)
        self.steps = 0
        self.fail_at: dict[int, BaseException] = {}

    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int]) -> Output:
        self.steps += 1
        if self.steps in self.fail_at:
            raise self.fail_at[self.steps]
        rows, prompts = [], {}
        for slot, position in zip(batch.decode_slots.tolist(), batch.decode_positions.tolist(), strict=True):
            self.history[slot] = (*self.history[slot][:position], int(self.sampled[slot]))
            rows.append(model_logits(self.history[slot]))
        for chunk in batch.chunks:
            before = self.history[chunk.slot][: chunk.start] if chunk.start else ()
            assert len(before) == chunk.start
            self.history[chunk.slot] = whole = (*before, *chunk.tokens.tolist())
            each = [model_logits(whole[: at + 1]) for at in range(chunk.start, len(whole))]
            if chunk.slot in all_logits_slots:
                prompts[chunk.slot] = torch.stack(each).__getitem__
            if chunk.samples:
                rows += each[-1 - (chunk.drafts or 0) :]
        return Output(torch.stack(rows) if rows else torch.zeros(0, VOCAB), prompts)

    def take_sampled(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        self.sampled[slots] = tokens


def solo(prompt: Any, params: SamplingParams) -> list[int]:
    """What the request answers alone, without pages, batches or steps."""
    request = Request("solo", np.array(prompt), params)
    sampler = Sampler(VOCAB, torch.device("cpu"))
    while len(request.output) < params.max_tokens:
        history = (*request.prompt.tolist(), *request.output)
        logits = model_logits(history).unsqueeze(0)
        token = int(sampler.sample(logits, [request], np.array([len(history)])).tokens)
        request.output.append(token)
        if token in params.stop_token_ids and len(request.output) >= params.min_tokens:
            break
    return request.output


def engine_for(
    overlapped: bool,
    *,
    sequences: int = 8,
    length: int = 300,
    slots: int = 8,
    budget: int = 64,
    keep: bool = False,
) -> Engine:
    layout = layout_of(CACHES, block_tokens=16)
    manager = KVManager(layout, Capacity(layout, 0).slabs_for(sequences, length), slots, 1000)
    runner, sampler = HistoryRunner(slots), Sampler(VOCAB, torch.device("cpu"))
    scheduler = Scheduler(manager, budget, growth_tokens=16, restore_points=RestorePoints(manager) if keep else None)
    return Engine(scheduler, runner, sampler, async_scheduling=overlapped)


def request(name: str, prompt: Any, **params: Any) -> Request:
    return Request(name, np.array(prompt), SamplingParams(**{"max_tokens": 20, "seed": 5, **params}))


def run(engine: Engine, *requests: Request) -> list[TokenOutput]:
    for one in requests:
        engine.add(one)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert is_idle(engine)
    return outputs


def run_without_idle_check(engine: Engine, one: Request) -> None:
    engine.add(one)
    while engine.has_work:
        engine.step()


def is_idle(engine: Engine) -> bool:
    engine.manager.check_integrity()
    return engine.manager.free_bytes == engine.manager.arena.total_bytes


@BOTH_WAYS
class TestAnswers:
    def test_are_those_of_each_request_alone(self, overlapped: bool) -> None:
        engine = engine_for(overlapped)
        requests = [
            request("greedy", range(30), temperature=0),
            request("drawn", range(100), temperature=1.0, top_p=0.9),
            request("penalized", [3], temperature=0, presence_penalty=1.0, repetition_penalty=1.2),
            request("stops", range(7), stop_token_ids=tuple(range(10)), min_tokens=3),
            request("one token", range(5), max_tokens=1),
        ]
        outputs = run(engine, *requests)
        for one in requests:
            assert one.output == solo(one.prompt, one.params)
            assert [o.token for o in outputs if o.request is one] == one.output
            *earlier, last = [o.finish_reason for o in outputs if o.request is one]
            assert set(earlier) <= {None}
            assert last is one.finish_reason

    def test_survive_preemption(self, overlapped: bool) -> None:
        engine = engine_for(overlapped, sequences=2, length=160)
        kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0, "frequency_penalty": 0.7}]
        requests = [request(str(i), range(60), max_tokens=90, **kinds[i % 2]) for i in range(4)]
        run(engine, *requests)
        assert engine.scheduler.preemptions > 0
        assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]

    def test_logprobs_come_with_the_tokens(self, overlapped: bool) -> None:
        engine = engine_for(overlapped)
        one = request("one", range(10), logprobs=2, temperature=1.0)
        outputs = run(engine, one, request("other", range(20)))
        assert [o.logprobs for o in outputs if o.request is one] == one.logprobs
        for at, entry in enumerate(one.logprobs):
            expected = model_logits((*range(10), *one.output[:at])).log_softmax(-1)
            assert entry.token == one.output[at]
            assert entry.logprob == pytest.approx(float(expected[entry.token]))
            assert [token for token, _ in entry.top] == expected.topk(2).indices.tolist()

    def test_prompt_logprobs_cover_every_chunk(self, overlapped: bool) -> None:
        prompt = [i % VOCAB for i in range(150)]
        one = request("one", prompt, prompt_logprobs=1, max_tokens=3)
        run(engine_for(overlapped, budget=40), one, request("other", range(20)))
        assert len(one.prompt_logprobs) == 150
        assert one.prompt_logprobs[0] is None
        for at, entry in enumerate(one.prompt_logprobs[1:], start=1):
            expected = model_logits(tuple(prompt[:at])).log_softmax(-1)
            assert entry is not None
            assert (entry.token, len(entry.top)) == (prompt[at], 1)
            assert entry.logprob == pytest.approx(float(expected[prompt[at]]))

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_prompt_logprobs_are_whole_after_a_preemption_in_mid_prompt(self, overlapped: bool, steps: int) -> None:
        """The prompt is computed again in chunks that end elsewhere, since others decode no longer."""
        prompt = [i % VOCAB for i in range(150)]
        one = request("one", prompt, prompt_logprobs=0, max_tokens=3)
        engine = engine_for(overlapped, budget=40)
        for other in (request("other", [1], max_tokens=4), request("third", range(9), max_tokens=2), one):
            engine.add(other)
        for _ in range(steps):
            engine.step()
        engine.scheduler._preempt(next(slot for slot, r in engine.scheduler.running.items() if r is one))
        while engine.has_work:
            engine.step()
        assert one.preemptions == 1
        expected = [model_logits(tuple(prompt[:at])).log_softmax(-1)[prompt[at]] for at in range(1, 150)]
        assert [entry.logprob for entry in one.prompt_logprobs[1:] if entry] == pytest.approx(
            list(map(float, expected))
        )

    def test_a_prompt_of_one_token_has_nothing_to_predict_it(self, overlapped: bool) -> None:
        one = request("one", [4], prompt_logprobs=3)
        run(engine_for(overlapped), one)
        assert one.prompt_logprobs == [None]


@BOTH_WAYS
class TestCancelling:
    def test_at_any_moment_returns_every_byte(self, overlapped: bool) -> None:
        for steps in range(8):
            engine = engine_for(overlapped, budget=32)
            gone, stays = request("gone", range(40), presence_penalty=1.0), request("stays", range(30))
            for one in (gone, stays):
                engine.add(one)
            for _ in range(steps):
                engine.step()
            known = len(gone.output)
            engine.cancel(gone, FinishReason.STOP)
            run(engine)
            assert (gone.finish_reason, len(gone.output)) == (FinishReason.STOP, known)
            assert stays.output == solo(stays.prompt, stays.params)

    def test_what_has_ended_stays_as_it_ended(self, overlapped: bool) -> None:
        engine, one = engine_for(overlapped), request("one", [1])
        run(engine, one)
        engine.cancel(one)
        assert one.finish_reason is FinishReason.LENGTH


@BOTH_WAYS
class TestFailing:
    @settings(deadline=None, max_examples=25)
    @given(at=st.integers(1, 12), late=st.integers(0, 12))
    def test_a_step_that_raises_fails_its_requests_and_no_others(self, overlapped: bool, at: int, late: int) -> None:
        engine = engine_for(overlapped, budget=32)
        assert isinstance(engine.runner, HistoryRunner)
        engine.runner.fail_at[at] = RuntimeError("the device is unhappy")
        early = [request(f"early {i}", range(40), presence_penalty=0.5) for i in range(3)]
        for one in early:
            engine.add(one)
        outputs = [o for _ in range(late) for o in engine.step()]
        second = request("late", range(10))
        outputs += run(engine, second)
        for one in (*early, second):
            if one.finish_reason is FinishReason.FAILED:
                assert str(one.error) == "the device is unhappy"
                ends = [o for o in outputs if o.request is one and o.finish_reason is not None]
                assert [o.token for o in ends] == [None]
            else:
                assert one.output == solo(one.prompt, one.params)
        after = request("after", range(25))
        run(engine, after)
        assert after.output == solo(after.prompt, after.params)

    @settings(deadline=None, max_examples=25)
    @given(at=st.integers(1, 10))
    def test_a_step_that_raises_leaves_no_restore_point(self, overlapped: bool, at: int) -> None:
        engine = engine_for(overlapped, budget=32, keep=True)
        run_without_idle_check(engine, request("before", range(40), max_tokens=3))
        assert engine.scheduler.cache_stats.restore_points > 0
        assert isinstance(engine.runner, HistoryRunner)
        engine.runner.fail_at[engine.runner.steps + at] = RuntimeError("the device is unhappy")
        later = [request(f"later {i}", range(20 + i, 70 + i), max_tokens=8) for i in range(3)]
        for one in later:
            engine.add(one)
        while engine.has_work:
            outputs = engine.step()
            if any(o.finish_reason is FinishReason.FAILED for o in outputs):
                assert engine.scheduler.cache_stats.restore_points == 0
        engine.manager.check_integrity()
        assert any(one.finish_reason is FinishReason.FAILED for one in later)

    def test_an_interrupt_reaches_the_caller_and_leaves_the_engine_usable(self, overlapped: bool) -> None:
        engine = engine_for(overlapped)
        assert isinstance(engine.runner, HistoryRunner)
        engine.runner.fail_at[3] = KeyboardInterrupt()
        one = request("one", range(10))
        with pytest.raises(KeyboardInterrupt):
            run(engine, one)
        outputs = run(engine)
        assert outputs[-1].finish_reason is FinishReason.FAILED
        after = request("after", range(25))
        run(engine, after)
        assert after.output == solo(after.prompt, after.params)

    @pytest.mark.parametrize("line", [*range(3, 1200, 31), *range(1040, 1088, 3)])
    def test_an_interrupt_at_any_line_leaves_the_engine_usable(self, overlapped: bool, line: int) -> None:
        engine = engine_for(overlapped, budget=32, keep=True)
        run_without_idle_check(engine, request("before", range(40), max_tokens=3))
        for one in (request("one", range(60, 90), max_tokens=6), request("two", range(5, 30), max_tokens=6)):
            engine.add(one)
        with suppress(KeyboardInterrupt), interrupted_at(line):
            while engine.has_work:
                engine.step()
        while engine.has_work:
            engine.step()
        engine.manager.check_integrity()
        after = request("after", range(100, 125))
        run_without_idle_check(engine, after)
        assert after.output == solo(after.prompt, after.params)


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """As if somebody typed ^C when so many lines of the engine and the scheduler have run."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("engine.py", "scheduler.py", "restoring.py", "manager.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class TestOverlapping:
    def test_an_error_reported_late_fails_the_step_sent_after_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may have resumed from what the failed step was to write."""
        engine = engine_for(True, keep=True)
        first, second = request("first", range(30)), request("second", range(50, 80))
        engine.add(first)
        engine.step()
        engine.add(second)
        read = engine_module.HostCopy.array

        def unhappy(copy: Any) -> Any:
            monkeypatch.setattr(engine_module.HostCopy, "array", read)
            raise RuntimeError("the device is unhappy")

        monkeypatch.setattr(engine_module.HostCopy, "array", unhappy)
        while engine.has_work:
            engine.step()
        assert [r.finish_reason for r in (first, second)] == [FinishReason.FAILED] * 2
        assert engine.scheduler.cache_stats.restore_points == 0
        assert is_idle(engine)

    def test_a_step_is_on_its_way_before_the_one_before_it_is_known(self) -> None:
        engine = engine_for(True)
        assert isinstance(engine.runner, HistoryRunner)
        engine.add(request("one", range(10)))
        assert engine.step() == []
        for steps in (2, 3, 4):
            (output,) = engine.step()
            assert engine.runner.steps == steps
            assert output.request.known_tokens == 10 + steps - 1

    def test_plain_steps_give_their_own_tokens(self) -> None:
        engine = engine_for(False)
        engine.add(request("one", range(10)))
        assert [len(engine.step()) for _ in range(3)] == [1, 1, 1]


class TestRefusing:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([1, VOCAB], {}, "prompt has token 128; the vocabulary is 128"),
            ([-1], {}, "prompt has token -1"),
            ([1], {"stop_token_ids": (999,)}, "stop_token_ids has token 999"),
            ([1], {"logit_bias": {130: 1.0}}, "logit_bias has token 130"),
            ([1], {"logprobs": 129}, "logprobs 129 exceeds the vocabulary"),
        ],
    )
    def test_tokens_outside_the_vocabulary(self, prompt: list[int], params: dict[str, Any], message: str) -> None:
        engine = engine_for(False)
        with pytest.raises(ValueError, match=message):
            engine.add(request("one", prompt, **params))
        assert not engine.has_work

    def test_a_request_that_can_never_fit(self) -> None:
        with pytest.raises(RequestTooLong):
            engine_for(False).add(request("one", [1] * 990, max_tokens=500))


class TestTimes:
    """What the pace is told of each step, by a clock that only the runner moves."""

    @staticmethod
    def observed(engine: Engine, monkeypatch: pytest.MonkeyPatch, host_waits: bool) -> list[tuple[int, float]]:
        clocks = SimpleNamespace(host=0.0, device=0.0)
        told = []
        forward = engine.runner.forward

        def timed(batch: Batch, **kwargs: Any) -> Any:
            clocks.device = max(clocks.device, clocks.host) + 1.0 + batch.prompt_tokens
            clocks.host = clocks.device if host_waits else clocks.host + 0.25  # sent off, and noticed much later
            return forward(batch, **kwargs)

        class DeviceMoment:
            at = None

            def __init__(self, _device: torch.device) -> None:
                self.over = clocks.device

            def seconds_since(self, earlier: DeviceMoment) -> float:
                return self.over - earlier.over

        monkeypatch.setattr(engine.runner, "forward", timed)
        for module in (engine_module, sent_step_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clocks.host))
        if not host_waits:
            monkeypatch.setattr(engine_module, "Moment", DeviceMoment)
        pace = SimpleNamespace(tokens=lambda: 23, observe=lambda _decoding, tokens, s: told.append((tokens, s)))
        engine.scheduler.pace = pace
        run(engine, request("first", range(40)), request("second", range(90), max_tokens=3))
        return told

    @BOTH_WAYS
    def test_a_step_took_as_long_as_its_own_tokens(self, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        told = self.observed(engine_for(overlapped), monkeypatch, host_waits=True)
        assert {tokens for tokens, _ in told} >= {0, 23}
        assert all(seconds == 1 + tokens for tokens, seconds in told)

    def test_by_the_device_where_the_host_runs_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = self.observed(engine_for(True), monkeypatch, host_waits=False)
        assert {tokens for tokens, _ in told} >= {0, 23}
        assert all(seconds == 1 + tokens for tokens, seconds in told[1:])
