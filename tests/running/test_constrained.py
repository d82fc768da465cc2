"""Grammars at work: random and real models, alone and in batches, with steps overlapped or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.test_llm import FLAGS
from tests.text.models import GEMMA, SMOLLM2
from tests.tiny_model import make_model
from windowpane import LLM, FinishReason, SamplingParams
from windowpane.schedule.request import Grammar, Matcher, Request
from windowpane.text.answer import with_stop_ids
from windowpane.text.grammar import GrammarError, Grammars
from windowpane.text.parsers import TOOL_PARSERS, ToolArguments, ToolStart, tool_grammar, tool_parser

BOTH_WAYS = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": -50, "maximum": 1000},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "nested": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "count", "tags", "nested"],
    "additionalProperties": False,
}
PAINT = {
    "type": "object",
    "properties": {"what": {"type": "string", "maxLength": 20}, "colour": {"enum": ["red", "blue"]}},
    "required": ["what", "colour"],
    "additionalProperties": False,
}


def check_record(text: str) -> None:
    record = json.loads(text)
    assert list(record) == ["name", "count", "tags", "nested"]
    assert len(record["name"]) <= 8 and -50 <= record["count"] <= 1000
    assert 1 <= len(record["tags"]) <= 3 and set(record["tags"]) <= {"red", "green", "blue"}
    assert list(record["nested"]) == ["ok"] and isinstance(record["nested"]["ok"], bool)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """A small random model of single bytes, started once with each set of flags."""
    path = make_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)

    @cache
    def start(overlapped: bool, *, kv_bytes: int = 8 * 2**20, length: int = 1500, budget: int = 64) -> LLM:
        flags = {**FLAGS, "kv_cache_memory_bytes": kv_bytes, "max_num_batched_tokens": budget}
        return LLM(path, **flags, async_scheduling=overlapped, max_model_len=length)

    return start


@cache
def real_model(name: str, overlapped: bool) -> LLM:
    size = {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(name, device="cpu", max_model_len=512, async_scheduling=overlapped, **size)


@cache
def grammars_of(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer)


def ask(llm: LLM, prompt: str, grammar: Grammar | None = None, **params: Any) -> Request:
    settings = {"max_tokens": 1200, "seed": 1, "temperature": 1.0, **params}
    if "stop_token_ids" not in settings:
        settings["stop_token_ids"] = with_stop_ids((), llm.tokenizer)
    prompt_tokens = np.array(llm.encode(prompt), dtype=np.int32)
    return Request(prompt[:8], prompt_tokens, SamplingParams(**settings), grammar=grammar)


def run(llm: LLM, *requests: Request) -> Sequence[Request]:
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(llm.engine.manager.live_pages) == 0
    return requests


def text_of(llm: LLM, request: Request) -> str:
    """A constrained answer that is complete: all of it but the stop token."""
    assert request.finish_reason is FinishReason.STOP
    assert request.output[-1] in llm.tokenizer.stop_ids
    return llm.tokenizer.decode(request.output[:-1], skip_special_tokens=False)


@BOTH_WAYS
class TestRandomWeights:
    def test_write_valid_json_every_time(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        llm = random_model(overlapped)
        grammar = grammars_of(llm).json_schema(RECORD)
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}]
        kinds += [{"repetition_penalty": 1.3, "frequency_penalty": 1.0}, {"logit_bias": {0: 100.0, 65: -100.0}}]
        requests = [ask(llm, f"{i}. Write", grammar, seed=i, **kinds[i % len(kinds)]) for i in range(12)]
        answers = [text_of(llm, request) for request in run(llm, *requests)]
        for answer in answers:
            check_record(answer)
        assert len(set(answers)) > 6

    def test_neighbours_do_not_matter(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        """Neither to those with a grammar nor to those without; nor do chunks of the prompt."""
        llm, chunked = random_model(overlapped), random_model(overlapped, budget=8)
        prompts = ["Write a record", "x" * 50, "A prompt that is longer than a chunk of eight tokens", "y"]

        def some(llm: LLM, which: Sequence[int]) -> list[Request]:
            record, digits = grammars_of(llm).json_schema(RECORD), grammars_of(llm).regex(r"[0-9]{5,20}")
            return [ask(llm, prompts[i], (record, None, digits, None)[i], seed=i, max_tokens=200) for i in which]

        together = [r.output for r in run(llm, *some(llm, range(4)))]
        assert [r.output for r in run(chunked, *some(chunked, range(4)))] == together
        assert [run(llm, *some(llm, [i]))[0].output for i in range(4)] == together
        assert [r.output for r in run(llm, *some(llm, [1, 3]))] == [together[1], together[3]]

    def test_preemption_does_not_matter(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        roomy, tight = random_model(overlapped), random_model(overlapped, kv_bytes=512 * 2**10, length=400)

        def some(llm: LLM) -> list[Request]:
            digits = grammars_of(llm).regex(r"[0-9]{280,350}")
            return [ask(llm, f"{i} count", None if i % 3 == 2 else digits, seed=i, max_tokens=380) for i in range(5)]

        expected = [r.output for r in run(roomy, *some(roomy))]
        requests = run(tight, *some(tight))
        assert tight.engine.scheduler.preemptions > 0
        assert [r.output for r in requests] == expected

    def test_ends_cut_off_when_the_length_runs_out(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        llm = random_model(overlapped)
        (request,) = run(llm, ask(llm, "Count", grammars_of(llm).regex("[0-9]{100}"), max_tokens=30))
        assert request.finish_reason is FinishReason.LENGTH
        text = llm.tokenizer.decode(request.output, skip_special_tokens=False)
        assert len(text) == 30 and text.isdecimal()

    def test_min_tokens_holds_while_there_is_more_to_say(
        self, overlapped: bool, random_model: Callable[..., LLM]
    ) -> None:
        llm = random_model(overlapped)
        grammars = grammars_of(llm)
        open_ended, short = run(
            llm,
            *(ask(llm, "Go", grammars.regex(pattern), min_tokens=20, seed=3) for pattern in ("a{1,500}", "[ab]{5}")),
        )
        assert len(open_ended.output) >= 20
        assert len(text_of(llm, short)) == 5

    def test_logprobs_are_those_of_the_model(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        """A grammar changes what is drawn, not what the model thinks of it."""
        llm = random_model(overlapped)
        (free,) = run(llm, ask(llm, "Say", logprobs=258, max_tokens=1))
        (bound,) = run(llm, ask(llm, "Say", grammars_of(llm).choice(["yes", "no"]), logprobs=2))
        assert bound.logprobs[0].top == free.logprobs[0].top[:2]
        assert bound.logprobs[0].logprob == pytest.approx(dict(free.logprobs[0].top)[bound.output[0]], abs=1e-4)
        assert len(bound.logprobs) == len(bound.output)

    def test_a_grammar_that_cannot_go_on_fails_alone(self, overlapped: bool, random_model: Callable[..., LLM]) -> None:
        llm = random_model(overlapped)
        digits = grammars_of(llm).regex("[0-9]{12}")
        good, bad, free = (ask(llm, "Go", g, max_tokens=40) for g in (digits, Stuck(digits, after=4), None))
        run(llm, good, bad, free)
        assert len(text_of(llm, good)) == 12
        assert free.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert bad.finish_reason is FinishReason.FAILED and isinstance(bad.error, GrammarError)
        assert llm.tokenizer.decode(bad.output).isdecimal() and len(bad.output) == 4


class Stuck:
    """A grammar that finds itself too complex after some tokens, as llguidance may."""

    def __init__(self, grammar: Grammar, after: int) -> None:
        self.stop_ids = grammar.stop_ids
        self._grammar = grammar
        self._after = after

    def matcher(self) -> Matcher:
        return StuckMatcher(self._grammar.matcher(), self._after)


class StuckMatcher:
    def __init__(self, matcher: Matcher, left: int) -> None:
        self._matcher = matcher
        self._left = left

    def accept(self, token: int) -> None:
        self._left -= 1
        self._matcher.accept(token)

    def ask(self, *, may_stop: bool) -> None:
        self._matcher.ask(may_stop=may_stop)

    def allowed(self, *, may_stop: bool) -> Any:
        if self._left <= 0:
            raise GrammarError("the grammar cannot go on: too complex")
        return self._matcher.allowed(may_stop=may_stop)


def test_what_ends_the_grammar_must_end_the_request(random_model: Callable[..., LLM]) -> None:
    llm = random_model(False)
    with pytest.raises(ValueError, match="leave ignore_eos out"):
        llm.engine.add(ask(llm, "Go", grammars_of(llm).json_object(), stop_token_ids=(3,)))
    assert not llm.engine.has_work


REAL = pytest.mark.parametrize(("name", "overlapped"), [(SMOLLM2, False), (SMOLLM2, True), (GEMMA, True)])


@REAL
class TestRealModels:
    def test_answer_by_a_grammar_beside_others_that_do_not(self, name: str, overlapped: bool) -> None:
        llm = real_model(name, overlapped)
        grammars = grammars_of(llm)
        kinds = {
            "A red apple as JSON:": grammars.json_schema(RECORD),
            "Is water wet? Answer:": grammars.choice(["yes", "no", "perhaps"]),
            "A date: 2024-": grammars.regex(r"[01][0-9]-[0-3][0-9]"),
        }
        requests = [ask(llm, text, grammar, temperature=0, max_tokens=150) for text, grammar in kinds.items()]
        free, alone = (ask(llm, "The capital of France is", temperature=0, max_tokens=12) for _ in range(2))
        run(llm, *requests, free)
        record, choice, date = (text_of(llm, request) for request in requests)
        check_record(record)
        assert choice in ("yes", "no", "perhaps")
        assert len(date) == 5
        run(llm, alone)
        assert alone.output == free.output

    @pytest.mark.parametrize("form", TOOL_PARSERS)
    def test_call_a_tool_when_they_must(self, name: str, overlapped: bool, form: str) -> None:
        llm = real_model(name, overlapped)
        tools = [{"type": "function", "function": {"name": "paint", "parameters": PAINT}}]
        grammar = tool_grammar(grammars_of(llm), form, tools, function="paint")
        (request,) = run(llm, ask(llm, "Paint the wall blue.\n", grammar, max_tokens=150, temperature=0.7))
        parser = tool_parser(form)()
        start, arguments = [*parser.push(text_of(llm, request)), *parser.finish()]
        assert isinstance(start, ToolStart) and isinstance(arguments, ToolArguments)
        assert start.name == "paint"
        paint = json.loads(arguments.json)
        assert set(paint) == {"colour", "what"} and paint["colour"] in ("red", "blue")
