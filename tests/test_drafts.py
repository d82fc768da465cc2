"""Drafts change no answer: right, wrong and none at all, with every kind of sampling, and whatever else happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench.known_drafts import Eager, KnownAnswers
from tests.kv.test_layout import layout_of
from tests.test_engine import BOTH_WAYS, CACHES, VOCAB, HistoryRunner, model_logits, request, run, solo
from windowpane.drafts.config import DraftConfig, DraftConfigError
from windowpane.drafts.costs import StepCosts
from windowpane.drafts.drafter import Asking, HostKnows, Known, waits_for_step
from windowpane.drafts.ngram import NgramDrafter
from windowpane.drafts.speculator import REFRESH, TRY_AGAIN, Speculator
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampler
from windowpane.kv.caches import StateCache, StatePart
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.plan.config import EngineConfig
from windowpane.runners.device_drafts import DeviceDrafts
from windowpane.schedule.batch import Batch, accepted
from windowpane.schedule.request import NO_TOKENS, FinishReason, Request, Tokens
from windowpane.schedule.scheduler import Scheduler
from windowpane.schedule.step import LAST_SAMPLED, Segment, Step

STATES = [*CACHES, StateCache(2, (StatePart("recurrent", 4, 64, "float32"),))]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "biased": {"temperature": 0, "logit_bias": {3: 5.0}, "min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 9))},
}


def drafting_engine(
    overlapped: bool, drafts: int, *, caches: Any = None, speculator: Speculator | None = None, keep: bool = False,
    sequences: int = 8,
) -> Engine:  # fmt: skip
    layout = layout_of(caches or CACHES, block_tokens=16)
    rollback = rollback_for(drafts, layout)
    manager = KVManager(layout, Capacity(layout, 0, rollback).slabs_for(sequences, 300), 8, 1000, rollback)
    points = RestorePoints(manager) if keep else None
    scheduler = Scheduler(manager, 8 * (1 + drafts), 16, points, draft_tokens=drafts)
    sampler = Sampler(VOCAB, torch.device("cpu"))
    speculator = speculator or Eager(KnownAnswers(alone), drafts)
    return Engine(scheduler, HistoryRunner(8), sampler, async_scheduling=overlapped, speculator=speculator)


def alone(request: Request) -> list[int]:
    return solo(request.prompt, request.params)


def finish(engine: Engine, *requests: Request) -> None:
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, tokens).tolist()


@BOTH_WAYS
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("drafts", [1, 4])
def test_answers_are_the_same_with_drafts(overlapped, kind, drafts):
    engine = drafting_engine(overlapped, drafts)
    requests = [request(str(i), prompt(i, 3 + 9 * i), max_tokens=30, **SAMPLING[kind]) for i in range(5)]
    outputs = run(engine, *requests)
    assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]
    assert [o.finish_reason is not None for o in outputs].count(True) == len(requests)
    assert [o.token for o in outputs if o.request is requests[0]] == requests[0].output
    assert engine.runner.steps < sum(len(r.output) for r in requests) / 3
    assert 0 < sum(r.accepted_tokens for r in requests) <= engine.speculator.stats.accepted_tokens
    assert engine.speculator.stats.accepted_tokens == sum(engine.speculator.stats.accepted_by_position)
    assert not engine.speculator._chances, "ended requests are forgotten"


@BOTH_WAYS
def test_a_recurrent_state_and_little_memory_change_nothing(overlapped):
    engine = drafting_engine(overlapped, 3, caches=STATES, sequences=2)
    requests = [request(str(i), prompt(i, 20), max_tokens=200, temperature=0) for i in range(4)]
    run(engine, *requests)
    assert engine.scheduler.preemptions > 0
    assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]


@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_and_prefix_hits_are_the_same_with_drafts(drafts):
    engine = drafting_engine(False, drafts, keep=True)
    first = request("first", prompt(1, 40), max_tokens=40, temperature=0, logprobs=2)
    finish(engine, first)
    assert [entry.token for entry in first.logprobs] == first.output
    for at, entry in enumerate(first.logprobs):
        expected = model_logits((*first.prompt.tolist(), *first.output[:at])).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-5)
    again = request("again", [*first.prompt.tolist(), *first.output, 5, 6], max_tokens=4)
    finish(engine, again)
    assert again.cached_tokens == 79, "all but the last token of the answer, which was never computed"


def test_a_step_with_drafts_is_on_its_way_before_tokens_of_the_one_before_become_text():
    engine = drafting_engine(True, 4, speculator=all_right())
    engine.add(request("r", prompt(1, 7), max_tokens=30, temperature=0))
    assert engine.step() == []
    for steps, tokens in ((2, 1), (3, 1), (4, 5), (5, 5)):  # the second has no token to draft behind
        assert len(engine.step()) == tokens
        assert engine.runner.steps == steps


@BOTH_WAYS
def test_an_interrupt_loses_no_token_that_was_known(overlapped):
    engine = drafting_engine(overlapped, 4, speculator=all_right())
    engine.runner.fail_at[4] = KeyboardInterrupt()
    one, outputs = request("r", prompt(1, 7), max_tokens=30, temperature=0), []
    engine.add(one)
    with pytest.raises(KeyboardInterrupt):
        while engine.has_work:
            outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    assert [o.token for o in outputs] == [*one.output, None] and len(one.output) == (7 if overlapped else 11)
    assert one.finish_reason is FinishReason.FAILED


def all_right() -> Eager:
    return Eager(KnownAnswers(alone, 1.0, always_most=True), 4)


@BOTH_WAYS
@pytest.mark.parametrize("ends_at", [1, 2])
def test_a_stop_string_drops_what_its_step_gave_behind_it(overlapped, ends_at):
    engine = drafting_engine(overlapped, 4, keep=True, speculator=all_right())
    one = request("r", prompt(1, 40), max_tokens=12, temperature=0, logprobs=0)
    engine.add(one)
    while True:
        outputs = engine.step()
        if len(outputs) > 3:
            break
    before = len(one.output) - len(outputs)
    engine.stop(outputs[ends_at])
    assert (len(one.output), len(one.logprobs), one.finish_reason) == (before + ends_at + 1,) * 2 + (FinishReason.STOP,)
    assert [o.is_dropped for o in outputs] == [False] * (ends_at + 1) + [True] * (len(outputs) - ends_at - 1)
    while engine.has_work:
        assert engine.step() == []
    engine.manager.check_idle()
    assert engine.manager.restore_points, "what was computed can be resumed from"


def test_the_distribution_is_the_targets_own():
    """Tokens drawn behind drafts that are right half of the time, over many seeds, have the model's probabilities."""
    params = {"max_tokens": 3, "temperature": 1.0, "top_k": 8}
    requests = [request(str(seed), [1, 2, 3], seed=seed, **params) for seed in range(1500)]
    engine = drafting_engine(False, 2, speculator=Eager(KnownAnswers(alone, 0.5), 2))
    run(engine, *requests)
    counts = np.bincount([r.output[1] for r in requests if r.output[0] == requests[0].output[0]], minlength=VOCAB)
    logits = model_logits((1, 2, 3, requests[0].output[0]))
    kept = logits.topk(8)
    expected = torch.zeros(VOCAB).scatter(0, kept.indices, kept.values.softmax(0)).numpy() * counts.sum()
    assert counts.sum() > 100 and not counts[expected == 0].any()
    chi_squared = float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    assert chi_squared < 24.3, "0.1 % of all samples of the model's distribution are further from it"


# -- prompt lookup -------------------------------------------------------------------------------------------------


def propose(drafter: NgramDrafter, one: Request, most: int = 4) -> list[int]:
    return drafter.propose([Asking(one, 0, one.known_tokens - 1, most)])[0].tolist()


def test_what_followed_the_longest_run_is_drafted():
    one = Request("r", np.array([1, 2, 3, 4, 9, 9, 2, 3, 7, 8, 1, 2, 3]))
    drafter = NgramDrafter(3, 1)
    assert propose(drafter, one) == [4, 9, 9, 2], "1 2 3 stood before 4"
    assert drafter.kind_of(one) == 3
    assert propose(NgramDrafter(2, 1), one) == [7, 8, 1, 2], "of two places where 2 3 stood, the later one"
    assert propose(NgramDrafter(3, 1), one, most=2) == [4, 9]
    assert propose(NgramDrafter(3, 3), Request("r", np.array([1, 2, 3, 7, 2, 3]))) == []


def test_what_repeats_is_drafted_on_and_on():
    assert propose(NgramDrafter(2, 2), Request("r", np.array([5, 6, 5, 6])), most=5) == [5, 6, 5, 6, 5]


def test_a_replaced_token_does_not_end_a_source():
    one = Request("r", np.array([10, 11, 12, 13, 14, 15, 16, 17, 50, 10, 11]))
    drafter = NgramDrafter(3, 2)
    assert propose(drafter, one) == [12, 13, 14, 15]
    one.output += [12, 13, 99]
    assert propose(drafter, one) == [15, 16, 17, 50]
    one.output += [98, 97, 96]
    assert propose(drafter, one) == [], "it resembles its source no more"
    drafter.forget(one)


# -- drafts that stay on the device --------------------------------------------------------------------------------


def test_places_stand_for_the_drafts_that_were_made_for_their_sequence():
    drafts = DeviceDrafts(4, 5, torch.device("cpu"))
    drafts.made.copy_(torch.randint(0, 1000, (4, 5), dtype=torch.int32))
    made, copy = drafts.made.clone(), drafts.copy(3)
    asked = [Known(slot, 8, np.array([1]), most) for slot, most in ((7, 4), (2, 1), (9, 3), (0, 2))]
    places = drafts.hand_out(asked, [9, 7, 2], copy)
    assert [len(p) for p in places] == [4, 1, 3, 0], "slot 0 has none"
    assert all(p.max(initial=-2) < -1 and p.dtype == np.int32 for p in places)
    # Some are left out, and known tokens stand before the rest.
    rows = np.concatenate([[17], places[0][:2], [0], places[1], [-1], places[2]]).astype(np.int32)
    expected = [17, *made[:2, 1].tolist(), 0, *made[:1, 2].tolist(), -1, *made[:3, 0].tolist()]
    assert drafts.resolved(torch.from_numpy(rows)).tolist() == expected
    drafts.made.zero_()  # the next ones are on their way when the host asks
    told = drafts.tell([places[0][:2], np.array([3, 4], dtype=np.int32), places[3], places[2]])
    assert [t.tolist() for t in told] == [made[:2, 1].tolist(), [3, 4], [], made[:3, 0].tolist()]


def test_drafts_that_are_known_are_told_as_they_are():
    drafts = DeviceDrafts(4, 5, torch.device("cpu"))
    known = [np.array([3, 4], dtype=np.int32), NO_TOKENS]
    assert drafts.tell(known) == known


class OnDevice(KnownAnswers):
    """Passes on where its drafts lie. Others take their places as soon as a step that verifies them is on its way:
    with `rows_ahead` those that stand behind what that step accepts.
    """

    def __init__(self, most: int, rows_ahead: int = 0) -> None:
        super().__init__(alone)
        self.drafts = DeviceDrafts(most, 8, torch.device("cpu"))
        self.rows_ahead = rows_ahead
        self.sampled = torch.zeros(8, dtype=torch.int64)
        self.not_accepted = torch.zeros(8, dtype=torch.int32)
        self._begun: list[int] = []
        self._asking: dict[int, tuple[Request, int]] = {}  # by slot, and the tokens that its answer has on the device

    def propose(self, asking: list[Asking]) -> list[Tokens]:
        if waits_for_step(asking):
            return [np.zeros(a.most, np.int32) for a in asking]
        self._asking = {a.slot: (a.request, len(a.request.output)) for a in asking}
        for column, tokens in enumerate(super().propose(asking)):
            self._make(column, tokens)
        return self.drafts.hand_out(asking, [a.slot for a in asking], self.drafts.copy(len(asking)))

    def ahead(self, asking: list[Asking]) -> list[Tokens]:
        return self.drafts.hand_out(asking, self._begun, self.drafts.copy(len(self._begun)))

    def begin(self, slots: list[int], drafts: list[Tokens], sampled: torch.Tensor) -> bool:
        if not self.rows_ahead:
            self.drafts.made.fill_(1)
            return False
        told, row, self._begun = [self.drafts.resolved(torch.from_numpy(d)) for d in drafts], 0, []
        for slot, tokens in zip(slots, told, strict=True):
            count = accepted(sampled[row : row + len(tokens)].tolist(), tokens.numpy())
            self.sampled[slot], self.not_accepted[slot] = sampled[row + count], len(tokens) - count
            row += 1 + len(tokens)
            if slot in self._asking:
                one, come = self._asking[slot]
                self._asking[slot] = one, come + count + 1
                self._make(len(self._begun), self.behind(one, come + count + 1, len(self.drafts.made)))
                self._begun.append(slot)
        return True

    def tell(self, drafts: list[Tokens]) -> list[Tokens]:
        return self.drafts.tell(drafts)

    def _make(self, column: int, tokens: Tokens) -> None:
        self.drafts.made[:, column] = 0
        self.drafts.made[: len(tokens), column] = torch.from_numpy(tokens)


class ResolvingRunner(HistoryRunner):
    """Knows what only the device knows: drafts, and how many of a step's before were accepted."""

    def __init__(self, drafter: OnDevice) -> None:
        super().__init__(8)
        self.drafter, self.sampled = drafter, drafter.sampled
        self.steps_ahead = 0

    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int]) -> Any:
        too_far = torch.zeros(8, dtype=torch.int32)
        too_far[list(batch.unsettled)] = self.drafter.not_accepted[list(batch.unsettled)]
        chunks = []
        for chunk in batch.chunks:
            tokens = self.drafter.drafts.resolved(torch.from_numpy(chunk.tokens)).numpy().copy()
            tokens[tokens == LAST_SAMPLED] = self.sampled[chunk.slot]
            chunks.append(replace(chunk, start=chunk.start - int(too_far[chunk.slot]), tokens=tokens))
        positions = batch.decode_positions - too_far[batch.decode_slots].numpy()
        moved = replace(batch, chunks=chunks, decode_positions=positions)
        output = super().forward(moved, all_logits_slots=all_logits_slots)
        self.steps_ahead += batch.is_ahead
        if not batch.is_ahead:
            return output
        return replace(output, too_far=too_far[np.repeat(batch.sampling_slots, batch.sampled_rows)])


def device_engine(overlapped: bool, rows_ahead: int, **rest: Any) -> Engine:
    drafter = OnDevice(4, rows_ahead)
    engine = drafting_engine(overlapped, 4, speculator=Eager(drafter, 4), **rest)
    engine.runner = ResolvingRunner(drafter)
    return engine


@BOTH_WAYS
@pytest.mark.parametrize("rows_ahead", [0, 40])
@pytest.mark.parametrize("kind", SAMPLING)
def test_answers_are_the_same_with_drafts_that_only_the_device_knows(overlapped, kind, rows_ahead):
    engine = device_engine(overlapped, rows_ahead)
    requests = [request(str(i), prompt(i, 3 + 9 * i), max_tokens=30, **SAMPLING[kind]) for i in range(5)]
    run(engine, *requests)
    assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]
    assert sum(r.accepted_tokens for r in requests) > 50
    goes_ahead = overlapped and rows_ahead and kind != "penalized"
    assert bool(engine.runner.steps_ahead) == bool(goes_ahead), "penalties hang on tokens that the host has to know"


@pytest.mark.parametrize(("memory", "keep"), [(1, False), (8, True)])
def test_steps_go_ahead_with_little_memory_restore_points_and_stop_tokens(memory, keep):
    engine = device_engine(True, 40, sequences=memory, keep=keep)
    stops = (3, 30)
    requests = [request(str(i), prompt(i, 20), max_tokens=150, stop_token_ids=stops[i % 2 :]) for i in range(6)]
    finish(engine, *requests)
    assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]
    assert engine.runner.steps_ahead > engine.runner.steps / 3
    assert bool(engine.scheduler.preemptions) == (memory == 1)
    if keep:
        one = requests[0]
        again = request("again", [*one.prompt.tolist(), *one.output, 5, 6], max_tokens=4)
        finish(engine, again)
        assert again.cached_tokens == len(one.prompt) + len(one.output), "its window has not slid past its end"


def test_a_step_with_drafts_is_sent_before_the_one_before_it_has_landed():
    engine = device_engine(True, 40)
    engine.add(request("r", prompt(1, 7), max_tokens=60, temperature=0))
    while len(engine._sent_steps) < 1 or not engine._sent_steps[0].drafts:
        engine.step()
    steps = engine.runner.steps
    for sent in range(1, 5):
        assert engine.step()
        assert engine.runner.steps == steps + sent and engine.runner.steps_ahead == sent
        assert len(engine._sent_steps) == 1


def test_a_step_of_too_many_rows_is_not_sent_ahead():
    engine = device_engine(True, 2)
    requests = [request(str(i), prompt(i, 9), max_tokens=20, temperature=0) for i in range(3)]
    run(engine, *requests)
    assert engine.runner.steps_ahead == 0
    assert [r.output for r in requests] == [solo(r.prompt, r.params) for r in requests]


@pytest.mark.parametrize("fails_at", range(3, 8))
def test_a_step_that_fails_takes_the_one_ahead_of_it_with_it_and_no_other(fails_at):
    engine = device_engine(True, 40)
    engine.runner.fail_at[fails_at] = RuntimeError("the device is out of order")
    one = request("r", prompt(1, 7), max_tokens=60, temperature=0)
    finish(engine, one)
    assert one.finish_reason is FinishReason.FAILED and "out of order" in str(one.error)
    assert one.output == solo(one.prompt, one.params)[: len(one.output)]
    other = request("other", prompt(2, 7), max_tokens=40)
    run(engine, other)
    assert other.output == solo(other.prompt, other.params)


def test_decoding_rows_of_one_sequence_one_behind_another_are_one_segment():
    rng = np.random.default_rng(5)
    for _ in range(200):
        runs = [(int(s), int(rng.integers(9)), int(rng.integers(1, 5))) for s in rng.integers(0, 3, rng.integers(0, 6))]
        slots = np.array([slot for slot, _, count in runs for _ in range(count)], dtype=np.int64)
        at = np.array([start + i for _, start, count in runs for i in range(count)], dtype=np.int64)
        step = Step(NO_TOKENS, at, slots, (), (), np.arange(len(at)))
        expected: list[Segment] = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
            if expected and (expected[-1].slot, expected[-1].stop) == (slot, position):
                expected[-1] = expected[-1]._replace(stop=position + 1, q_count=expected[-1].q_count + 1)
            else:
                expected.append(Segment(slot, position, position + 1, row, row, 1))
        assert step.decoding_segments() == expected


# -- how many ------------------------------------------------------------------------------------------------------


class Fixed(HostKnows):
    """Proposes the same, free or not."""

    def __init__(self, *, is_free: bool) -> None:
        self.is_free = is_free
        self.asked = self.kind = 0

    def propose(self, asking: list[Asking]) -> list[Tokens]:
        self.asked += 1
        return [np.arange(a.most, dtype=np.int32) for a in asking]

    def kind_of(self, request: Request) -> int:
        return self.kind

    def forget(self, request: Request) -> None:
        pass


def asking(count: int, most: int = 4) -> list[Asking]:
    return [Asking(Request(str(i), np.arange(9)), i, 8, most) for i in range(count)]


def test_drafts_are_left_out_where_a_row_costs_as_much_as_a_step():
    speculator, one = Speculator(Fixed(is_free=True), 4), asking(1)
    assert speculator.drafts(one, 1) == {}, "no step was measured yet"
    speculator.stepped(1, 0, 0.010)
    assert len(speculator.drafts(one, 1)[0]) == 4, "drafts are tried first"
    speculator.stepped(1, 4, 0.050)
    assert speculator.drafts(one, 1) == {}


def test_as_many_drafts_are_verified_as_their_chances_are_worth():
    speculator, one = Speculator(Fixed(is_free=True), 4), asking(1)
    speculator.stepped(1, 0, 0.010)
    speculator.stepped(1, 4, 0.018)  # a draft costs a fifth of a step
    assert len(speculator.drafts(one, 1)[0]) == 3, "1 + 0.7 + 0.49 + 0.34 tokens, and the next is worth 0.24"
    for right in (1, 0, 1, 0, 1, 0):
        speculator.verified(one[0].request, 4, right)
    assert len(speculator.drafts(one, 1)[0]) == 1
    for _ in range(12):
        speculator.verified(one[0].request, 1, 0)
    assert speculator.drafts(one, 1) == {}


def test_more_drafts_are_verified_of_a_kind_of_guess_that_is_often_right():
    drafter = Fixed(is_free=True)
    speculator, one = Speculator(drafter, 4), asking(1)
    speculator.stepped(1, 0, 0.010)
    speculator.stepped(1, 4, 0.018)
    found = {}
    for _ in range(10):
        for drafter.kind, right in ((2, 0), (5, 4)):
            found[drafter.kind] = len(speculator.drafts(one, 1).get(0, ()))
            speculator.verified(one[0].request, 4, right)
    assert found[2] <= 1 and found[5] == 4
    speculator.forget(one[0].request)
    assert not speculator._kind_of


def test_requests_whose_drafts_are_accepted_get_them():
    speculator, two = Speculator(Fixed(is_free=True), 4), asking(2)
    speculator.stepped(2, 0, 0.010)
    speculator.stepped(2, 8, 0.020)
    for _ in range(20):
        speculator.verified(two[0].request, 4, 4)
        speculator.verified(two[1].request, 4, 0)
    assert {slot: len(tokens) for slot, tokens in speculator.drafts(two, 2).items()} == {0: 4}


def test_a_free_drafter_wins_its_requests_back_without_a_step_of_its_own():
    speculator, one = Speculator(Fixed(is_free=True), 4), asking(1)
    request = one[0].request
    speculator.stepped(1, 0, 0.010)
    speculator.stepped(1, 4, 0.014)
    for _ in range(20):
        speculator.verified(request, 4, 0)
    assert speculator.drafts(one, 1) == {}
    for _ in range(20):
        request.output.append(0)  # what was proposed
        speculator.stepped(1, 0, 0.010)
        found = speculator.drafts(one, 1)
    assert len(found[0]) == 4


def test_any_other_drafter_is_tried_again_from_time_to_time():
    drafter = Fixed(is_free=False)
    speculator, one = Speculator(drafter, 4), asking(1)
    speculator.stepped(1, 0, 0.010)
    speculator.stepped(1, 4, 0.014)
    for _ in range(20):
        speculator.verified(one[0].request, 4, 0)
    asked = drafter.asked
    assert speculator.drafts(one, 1) == {} and drafter.asked == asked, "it is not even asked"
    for _ in range(TRY_AGAIN):
        speculator.stepped(1, 0, 0.010)
    assert len(speculator.drafts(one, 1)[0]) == 1


def test_a_step_without_drafts_is_measured_again():
    speculator, one = Speculator(Fixed(is_free=True), 4), asking(1)
    speculator.stepped(1, 0, 0.010)
    for _ in range(REFRESH):
        assert speculator.drafts(one, 1)
        speculator.stepped(1, 4, 0.011)
    assert speculator.drafts(one, 1) == {}


def test_a_number_of_drafts_that_was_slow_once_is_tried_again():
    speculator, one = Speculator(Fixed(is_free=False), 4), asking(1)
    for seconds in (0.010, 0.010):
        speculator.stepped(1, 0, seconds)
    speculator._overall.observe(40, 41)  # nearly all are right
    counts = []
    for step in range(100):
        count = len(speculator.drafts(one, 1).get(0, ()))
        counts.append(count)
        slow = 0.030 if step == 0 else 0.0  # something was loaded
        speculator.stepped(1, count, 0.010 + 0.001 * count + slow if count else 0.010)
    assert counts[0] == 4 and 0 < max(counts[1:40]) < 4 and counts.count(4) > 20


def test_one_long_step_is_no_measure():
    costs = StepCosts()
    costs.observe(1, 0, 0.010)
    costs.observe(1, 2, 3.0)  # kernels were compiled
    assert costs.extra(1, np.array([2]))[0] < 0.010
    costs.observe(1, 2, 0.012)
    costs.observe(1, 4, 0.018)
    assert costs.extra(1, np.array([0, 1, 2, 3, 4, 8])) == pytest.approx([0, 0.001, 0.002, 0.005, 0.008, 0.016])


# -- the config ----------------------------------------------------------------------------------------------------


def test_a_config_is_read_from_json_a_mapping_or_itself():
    config = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    assert (config.draft_tokens, config.drafting.ngram_tokens) == (4, (5, 2))
    config = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3})
    assert (config.draft_tokens, config.drafting.ngram_tokens) == (2, (3, 3))
    assert (EngineConfig().draft_tokens, EngineConfig().drafting) == (0, None)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("ngram", "is no JSON"),
        ("[1]", r"is a JSON object, not \[1\]"),
        ({"num_speculative_tokens": 4}, "needs method, as in"),
        ({"method": "ngram"}, "needs num_speculative_tokens, as in"),
        ({"method": "medusa", "num_speculative_tokens": 4}, "method 'medusa' is not known; use ngram"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "is a whole number from 1 to 15, not 0"),
        ({"method": "ngram", "num_speculative_tokens": 4, "tokens": 1}, "'tokens' is not known; use method, num_"),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_max 2 is below prompt_lookup_min 3",
        ),
    ],
)
def test_a_config_that_cannot_work_is_one_clear_error(given, error):
    with pytest.raises(DraftConfigError, match=error):
        DraftConfig.of(given)
