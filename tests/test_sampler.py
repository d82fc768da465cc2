"""Sampling: transformers' processors and the exact distribution as yardsticks, and independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from windowpane.engine import sampler as sampling
from windowpane.engine.sampler import Draw, Sampler, keep_likely, top_logprobs
from windowpane.lowering.cpu.logits import likeliest
from windowpane.schedule.request import Request, SamplingParams

CPU = torch.device("cpu")
VOCAB = 50


def request(prompt: Any = (1, 2, 3), output: Any = (), **params: Any) -> Request:
    made = Request("r", np.array(prompt), SamplingParams(max_tokens=1000, **params))
    made.output = list(output)
    return made


def sample(logits: torch.Tensor, requests: list[Request], positions: Any = None, seed: int = 0) -> list[int]:
    at = np.array([r.known_tokens for r in requests] if positions is None else positions)
    return Sampler(logits.shape[-1], CPU, seed).sample(logits, requests, at).tokens.tolist()


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draws(logits: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    """How often each token is drawn for the same logits, at `count` positions of one request."""
    tokens = []
    sampler, one = Sampler(logits.shape[-1], CPU), request(seed=7, **params)
    for start in range(0, count, 1000):
        rows = logits.expand(1000, -1)
        tokens += sampler.sample(rows, [one] * 1000, np.arange(start, start + 1000)).tokens.tolist()
    return np.bincount(tokens, minlength=logits.shape[-1])


class TestGreedy:
    def test_takes_the_likeliest_and_the_first_of_equals(self) -> None:
        logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 0.0], [1.0, 0.0, 1.0]])
        assert sample(logits, [request([0], temperature=0) for _ in range(3)]) == [1, 0, 0]

    def test_rows_keep_their_own_parameters_in_a_mixed_batch(self) -> None:
        logits = random_logits(4)
        requests = [
            request(temperature=0),
            request(top_k=1),
            request(temperature=0, logit_bias={9: 1000.0}),
            request(min_p=1.0),
        ]
        best = logits.argmax(-1).tolist()
        assert sample(logits, requests) == [best[0], best[1], 9, best[3]]


class TestDistribution:
    """99.9 % quantiles of chi-square: 27.9 for 9 degrees of freedom, 20.5 for 5."""

    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, 0.3, 1.5]])

    def test_draws_follow_the_softmax(self) -> None:
        counts = draws(self.logits, 20_000)
        assert chi_square(counts, self.logits.softmax(-1)[0].numpy()) < 27.9

    def test_temperature_sharpens_and_flattens(self) -> None:
        for temperature in (0.3, 3.0):
            counts = draws(self.logits, 20_000, temperature=temperature)
            expected = (self.logits / temperature).softmax(-1)[0].numpy()
            likely = expected * counts.sum() >= 5
            assert chi_square(counts[likely], expected[likely] / expected[likely].sum()) < 27.9

    def test_top_k_renormalizes_what_it_keeps(self) -> None:
        counts = draws(self.logits, 20_000, top_k=6)
        kept = self.logits[0].topk(6).indices.numpy()
        assert counts.sum() == counts[kept].sum()
        assert chi_square(counts[kept], self.logits[0][kept].softmax(-1).numpy()) < 20.5

    def test_successive_positions_are_independent(self) -> None:
        """Pairs of draws of one request fill the table of all pairs evenly: 63 degrees of freedom, 103.4."""
        logits = torch.zeros(1, 8)
        one = request([0], seed=3)
        tokens = Sampler(8, CPU).sample(logits.expand(16_000, -1), [one] * 16_000, np.arange(16_000)).tokens.numpy()
        pairs = np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64)
        assert chi_square(pairs, np.full(64, 1 / 64)) < 103.4

    def test_seeds_are_independent_of_each_other(self) -> None:
        logits = torch.zeros(1, 8).expand(16_000, -1)
        requests = [request([0], seed=seed) for seed in range(16_000)]
        tokens = np.array(sample(logits, requests, np.full(16_000, 5)))
        assert chi_square(np.bincount(tokens, minlength=8), np.full(8, 1 / 8)) < 24.4
        pairs = np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64)
        assert chi_square(pairs, np.full(64, 1 / 64)) < 103.4

    def test_a_vanishing_temperature_is_greedy(self) -> None:
        logits = random_logits(20)
        assert sample(logits, [request(temperature=1e-30)] * 20) == logits.argmax(-1).tolist()

    def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should(self) -> None:
        """100,000 tokens with half of all probability between them: the tail has the resolution it needs."""
        logits = torch.zeros(1, 100_001)
        logits[0, 0] = float(np.log(100_000))
        one = request([0], seed=1)
        sampler = Sampler(100_001, CPU)
        tokens = np.array([int(sampler.sample(logits, [one], np.array([at])).tokens) for at in range(400)])
        assert 150 < (tokens == 0).sum() < 250
        assert len(set(tokens[tokens > 0])) > 140


def kept_tokens(logits: torch.Tensor, **params: Any) -> list[set[int]]:
    """Per row, the tokens that can still be drawn."""
    requests = [request([0], **params) for _ in range(len(logits))]
    drawn = Draw.of(requests, range(len(logits)), Sampler(logits.shape[-1], CPU))
    scores, tokens = keep_likely(logits, drawn)
    names = torch.arange(logits.shape[-1]).expand_as(logits) if tokens is None else tokens
    return [set(n[s > float("-inf")].tolist()) for s, n in zip(scores, names, strict=True)]


def transformers_keep(logits: torch.Tensor, *processors: Any) -> list[set[int]]:
    for processor in processors:
        logits = processor(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
    return [set(torch.nonzero(row > float("-inf")).flatten().tolist()) for row in logits]


class TestAgainstTransformers:
    @pytest.mark.parametrize("k", [1, 2, 7, 49, 50])
    def test_top_k(self, k: int) -> None:
        logits = random_logits(8)
        assert kept_tokens(logits, top_k=k) == transformers_keep(logits, TopKLogitsWarper(k))

    @pytest.mark.parametrize("p", [0.01, 0.3, 0.8, 0.95, 0.999])
    def test_top_p(self, p: float) -> None:
        logits = random_logits(8)
        assert kept_tokens(logits, top_p=p) == transformers_keep(logits, TopPLogitsWarper(p))

    @pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 1.0])
    def test_min_p(self, p: float) -> None:
        logits = random_logits(8)
        assert kept_tokens(logits, min_p=p) == transformers_keep(logits, MinPLogitsWarper(p))

    def test_all_three_in_their_order(self) -> None:
        logits = random_logits(16)
        expected = transformers_keep(logits, TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05))
        assert kept_tokens(logits, top_k=20, top_p=0.9, min_p=0.05) == expected

    def test_a_nucleus_wider_than_the_first_look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = random_logits(8, 400)
        logits[3:] *= 0.1  # flat rows need most of the vocabulary
        expected = transformers_keep(logits, TopPLogitsWarper(0.9))
        for guess in (8, 64, 1024):
            monkeypatch.setattr(sampling, "NUCLEUS_GUESS", guess)
            assert kept_tokens(logits, top_p=0.9) == expected

    @pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
    def test_repetition_penalty(self, penalty: float) -> None:
        logits = random_logits(1)
        seen = [4, 4, 7, 20]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*seen, 30]]), logits.clone())
        assert torch.allclose(adjusted(logits, request(seen, [30], repetition_penalty=penalty)), expected)


def adjusted(logits: torch.Tensor, *requests: Request, positions: Any = None) -> torch.Tensor:
    """Logits after penalties, bias and masks."""
    sampler = Sampler(logits.shape[-1], CPU)
    rows = sampling._Rows(list(requests), sampler)
    return sampler._adjust(logits, rows, np.array(positions or [r.known_tokens for r in requests]))


class TestAdjusting:
    def test_frequency_and_presence_count_the_answer_only(self) -> None:
        logits = torch.zeros(1, VOCAB)
        result = adjusted(logits, request([5, 5, 6], [7, 7, 8], frequency_penalty=0.5, presence_penalty=0.25))
        assert result[0, [5, 6, 7, 8, 9]].tolist() == [0, 0, -1.25, -0.75, 0]

    def test_penalties_see_tokens_that_have_not_reached_the_host(self) -> None:
        """`output` stays as it was, as it does while a step overlaps; the counts live beside the logits."""
        logits = torch.tensor([[3.0, 2.9, 2.8, 0.0]])
        sampler, one = Sampler(4, CPU), request([3], temperature=0, presence_penalty=0.5)
        assert [int(sampler.sample(logits, [one], np.array([1 + i])).tokens) for i in range(3)] == [0, 1, 2]

    def test_a_place_given_back_starts_clean(self) -> None:
        logits = torch.tensor([[3.0, 2.9, 0.0, 0.0]])
        sampler = Sampler(4, CPU)
        for _ in range(10):
            one = request([3], temperature=0, presence_penalty=0.5)
            assert int(sampler.sample(logits, [one], np.array([1])).tokens) == 0
            sampler.forget(one)
        assert len(sampler._history._counts) == 4

    def test_many_penalized_requests_at_once(self) -> None:
        logits = random_logits(1).expand(9, -1)
        requests = [request([3], [i], temperature=0, presence_penalty=2.0) for i in range(9)]
        alone = [sample(logits[:1], [r])[0] for r in requests]
        assert sample(logits, requests) == alone

    def test_logit_bias_moves_single_tokens(self) -> None:
        result = adjusted(torch.zeros(2, VOCAB), request(), request(logit_bias={3: 5.0, 4: -100.0}))
        assert result[1, [3, 4, 5]].tolist() == [5, -100, 0]
        assert not result[0].any()

    def test_stop_tokens_wait_for_min_tokens(self) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 9] = 10
        one = request([1, 2, 3], temperature=0, min_tokens=2, stop_token_ids=(9,))
        assert [sample(logits, [one], [at])[0] == 9 for at in (3, 4, 5, 6)] == [False, False, True, True]

    def test_raw_logits_are_left_alone(self) -> None:
        logits = random_logits(2)
        before = logits.clone()
        sample(logits, [request([3], [4], presence_penalty=2.0, logit_bias={1: 3.0}), request(top_p=0.5)])
        assert torch.equal(logits, before)


def any_request(data: st.DataObject) -> Request:
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
    output = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
    return request(
        prompt,
        output,
        seed=data.draw(st.integers(-(2**70), 2**70)),
        temperature=data.draw(st.sampled_from([0, 0.5, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([-1, 0, 1, 5, 1000])),
        top_p=data.draw(st.sampled_from([1.0, 0.5, 0.9])),
        min_p=data.draw(st.sampled_from([0.0, 0.1])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.0, -2.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        logit_bias=data.draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3)),
        min_tokens=data.draw(st.integers(0, 8)),
        stop_token_ids=tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),
        logprobs=data.draw(st.sampled_from([None, 0, 3])),
    )


class TestIndependence:
    @settings(deadline=None, max_examples=60)
    @given(data=st.data(), rows=st.integers(1, 6), seed=st.integers(0, 1000))
    def test_nobody_else_in_the_batch_changes_what_a_request_draws(self, data, rows, seed):
        requests = [any_request(data) for _ in range(rows)]
        logits = random_logits(rows, seed=seed)
        alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
        assert sample(logits, requests) == alone
        order = data.draw(st.permutations(range(rows)))
        assert sample(logits[order], [requests[i] for i in order]) == [alone[i] for i in order]

    def test_requests_without_a_seed_differ_from_each_other_but_repeat_with_the_engine_seed(self) -> None:
        logits = torch.zeros(40, VOCAB)
        requests = [request() for _ in range(40)]
        for arrival, one in enumerate(requests):
            one.arrival = arrival
        first = sample(logits, requests, seed=1)
        assert len(set(first)) > 15
        assert sample(logits, requests, seed=1) == first
        assert sample(logits, requests, seed=2) != first

    @settings(deadline=None, max_examples=40)
    @given(data=st.data(), seed=st.integers(0, 1000))
    def test_only_tokens_that_the_limits_keep_are_drawn(self, data, seed):
        one = any_request(data)
        logits = random_logits(1, seed=seed)
        token = sample(logits, [one])[0]
        early = len(one.output) < one.params.min_tokens
        assert not (early and token in one.params.stop_token_ids)
        if one.params.top_k > 0 and not one.params.is_greedy:
            assert token in adjusted(logits, one)[0].topk(min(one.params.top_k, VOCAB)).indices


class TestLogprobs:
    def test_are_those_of_the_raw_distribution(self) -> None:
        logits = random_logits(3)
        requests = [request(), request(logprobs=2, temperature=0.1, logit_bias={4: 50.0}), request(logprobs=0)]
        result = Sampler(VOCAB, CPU).sample(logits, requests, np.array([3, 3, 3]))
        assert list(result.logprob_rows) == [1, 2]
        assert result.logprobs is not None
        expected = logits.log_softmax(-1)
        assert int(result.tokens[1]) == 4
        assert torch.allclose(result.logprobs.chosen[0], expected[1, 4])
        assert torch.allclose(result.logprobs.top[0], expected[1].topk(2).values)
        assert torch.equal(result.logprobs.top_tokens[0], expected[1].topk(2).indices)

    def test_long_prompts_are_taken_in_parts(self) -> None:
        logits = random_logits(600)
        tokens = torch.arange(600) % VOCAB
        expected = logits.log_softmax(-1)
        result = top_logprobs(logits, tokens, 3)
        assert torch.allclose(result.chosen, expected[torch.arange(600), tokens])
        assert result.top.shape == (600, 3)


class TestParameters:
    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"temperature": -0.1}, "temperature must be 0"),
            ({"temperature": float("nan")}, "temperature must be 0"),
            ({"top_k": -2}, "top_k must be at least 1"),
            ({"top_k": 1.5}, "top_k takes whole numbers"),
            ({"top_p": 0.0}, "top_p is a probability"),
            ({"top_p": 1.1}, "top_p is a probability"),
            ({"min_p": -0.1}, "min_p is a share"),
            ({"presence_penalty": 2.1}, "presence_penalty must lie between -2 and 2"),
            ({"frequency_penalty": -3}, "frequency_penalty must lie between -2 and 2"),
            ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
            ({"logit_bias": {-1: 2.0}}, "logit_bias maps token numbers"),
            ({"logit_bias": {1: float("inf")}}, "logit_bias maps token numbers"),
            ({"logprobs": -1}, "logprobs is how many"),
            ({"stop": [""]}, "stop is one or more strings"),
            ({"stop_token_ids": [-5]}, "stop_token_ids are token numbers"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**params)

    def test_lists_and_a_lone_string_take_their_one_form(self) -> None:
        params = SamplingParams(stop="end", stop_token_ids=[1, np.int64(2)], logit_bias={np.int32(3): 1})
        assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (1, 2), {3: 1.0})
        assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=(1, 2)))

    def test_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            SamplingParams().temperature = 2.0  # type: ignore[misc]


FIELDS: dict[str, list[Any]] = {
    "temperature": [0.7, 1.6],
    "top_k": [3, 1500, 2500],
    "top_p": [0.3, 0.97],
    "min_p": [0.02],
    "presence_penalty": [1.5],
    "frequency_penalty": [-0.7],
    "repetition_penalty": [1.3],
    "logit_bias": [{5: 4.0, 2999: 9.0}],
}


def plain_reference(logits: torch.Tensor, one: Request) -> set[int]:
    """Tokens that may be drawn, by the definitions alone: a row by itself, everything sorted, in double precision."""
    p, row = one.params, logits.double().clone()
    counts = torch.bincount(torch.tensor(one.output), minlength=len(row))
    seen = (counts > 0) | torch.isin(torch.arange(len(row)), torch.tensor(one.prompt.tolist()))
    row = torch.where(seen, torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty), row)
    row -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    for token, bias in p.logit_bias.items():
        row[token] += bias
    order = (row / p.temperature).argsort(descending=True)
    if p.top_k > 0:
        order = order[: p.top_k]
    probabilities = (row / p.temperature)[order].softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < p.top_p
    kept &= probabilities >= p.min_p * probabilities[0]
    return set(order[kept].tolist())


class TestMixedBatches:
    """What a row draws depends on its own parameters and seed, whoever stands beside it."""

    def test_pairs_of_fields_beside_one_another(self) -> None:
        vocab = 3000
        combinations: list[dict[str, Any]] = [{}]
        for name, values in FIELDS.items():
            combinations += [{name: value} for value in values]
            for other, others in FIELDS.items():
                if other > name:
                    combinations += [{name: value, other: another} for value in values for another in others]
        logits = random_logits(len(combinations), vocab, seed=5)
        requests = [
            request(prompt=[7, 8], output=[9, 9, 10], seed=i, **fields) for i, fields in enumerate(combinations)
        ]
        together = sample(logits, requests)
        for row, one in enumerate(requests):
            assert sample(logits[row : row + 1], [one]) == [together[row]], combinations[row]
            assert together[row] in plain_reference(logits[row], one), combinations[row]

    @pytest.mark.parametrize("top_k", [1025, 2000, 2999])
    def test_a_large_top_k_beside_a_top_p_alone(self, top_k: int) -> None:
        """The likeliest 1,024 tokens hold nearly all of a row's probability, or hardly any of it."""
        logits = random_logits(400, 3000, seed=6) * torch.linspace(0.02, 1, 400).unsqueeze(1)
        mine = [request(top_k=top_k, top_p=0.9, seed=i) for i in range(399)]
        mate = request(top_p=0.2, seed=0)
        together = sample(logits, [*mine, mate])
        assert together[:-1] == [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(mine)]


@pytest.mark.parametrize("shape", [(1, 9000), (3, 4096), (2, 17), (1, 1)])
def test_the_likeliest_token_is_the_first_of_the_highest(shape):
    logits = torch.randn(shape).mul(4).round()
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
    assert torch.equal(likeliest(torch.full(shape, float("-inf"))), torch.zeros(shape[0], dtype=torch.int64))
    stored = torch.randn(shape[0], 2 * shape[1])  # rows that lie apart
    assert torch.equal(likeliest(stored[:, : shape[1]]), stored[:, : shape[1]].argmax(dim=-1))
