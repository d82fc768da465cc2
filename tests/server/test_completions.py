"""/v1/completions through the real client, on a tiny random model: every field that shapes an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import Running
from tests.tiny_model import BOS, EOS
from windowpane.text import Tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
LETTERS = "abcdefgh"


def letters(server: Running) -> dict[str, int]:
    """A bias under which only plain letters are said."""
    tokenizer = server.service.tokenizer
    assert tokenizer is not None
    return {str(token): 100 for token in tokenizer.encode(LETTERS, add_special_tokens=False)}


def ask(server: Running, prompt: Any = "Hello", **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    return server.openai.completions.create(model="tiny", prompt=prompt, extra_body=extra, **{**GREEDY, **fields})


EXTRA = (
    *("top_k", "min_p", "ignore_eos", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "priority"),
    *("repetition_penalty", "skip_special_tokens", "add_special_tokens", "cache_salt", "request_id"),
)


class TestAnswers:
    def test_an_answer_has_text_a_reason_and_its_cost(self, server: Running) -> None:
        answer = ask(server, cache_salt="nobody has asked this before")
        (choice,) = answer.choices
        assert (answer.object, answer.model, choice.finish_reason) == ("text_completion", "tiny", "length")
        assert answer.usage.prompt_tokens == len("Hello") + 1
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 18)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0

    def test_streamed_pieces_make_up_the_same_text(self, server: Running) -> None:
        whole = ask(server).choices[0].text
        chunks = list(ask(server, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1

    def test_several_prompts_of_every_form(self, server: Running) -> None:
        one, two = (ask(server, prompt).choices[0].text for prompt in ("Hello", "World"))
        tokens = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
        assert tokens[0] == BOS
        assert ask(server, tokens).choices[0].text == one
        assert [c.text for c in ask(server, ["Hello", "World"]).choices] == [one, two]
        both = ask(server, [tokens, tokens])
        assert [(c.index, c.text) for c in both.choices] == [(0, one), (1, one)]

    def test_n_choices_are_drawn_apart_and_the_prompt_counts_once(self, server: Running) -> None:
        answer = ask(server, temperature=1.0, n=3, seed=5, logit_bias=letters(server))
        texts = [choice.text for choice in answer.choices]
        assert len(set(texts)) == 3
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 36)
        alone = [ask(server, temperature=1.0, seed=5 + i, logit_bias=letters(server)) for i in range(3)]
        assert texts == [a.choices[0].text for a in alone]

    def test_choices_stream_side_by_side(self, server: Running) -> None:
        fields: dict[str, Any] = {"temperature": 1.0, "n": 2, "seed": 5}
        whole = [choice.text for choice in ask(server, **fields).choices]
        texts = ["", ""]
        for chunk in ask(server, stream=True, **fields):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == whole

    def test_usage_comes_last_when_asked_for(self, server: Running) -> None:
        *chunks, last = ask(server, stream=True, stream_options={"include_usage": True})
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 12)
        assert all(chunk.usage is None for chunk in chunks)

    def test_usage_comes_with_every_chunk_when_asked_for(self, server: Running) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(ask(server, stream=True, stream_options=options, logit_bias=letters(server)))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 12 and counts[0] < 12

    def test_the_id_can_be_chosen(self, server: Running) -> None:
        assert ask(server, request_id="mine-1").id == "mine-1"


class TestSampling:
    def test_a_seed_repeats_an_answer(self, server: Running) -> None:
        first, second, other = (ask(server, temperature=1.0, seed=s).choices[0].text for s in (7, 7, 8))
        assert first == second != other

    def test_one_candidate_is_greedy_by_any_name(self, server: Running) -> None:
        greedy = ask(server).choices[0].text
        for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            assert ask(server, temperature=1.0, seed=1, **fields).choices[0].text == greedy
        assert ask(server, temperature=1e-9).choices[0].text == greedy

    def test_bias_decides(self, server: Running) -> None:
        only_x = {"logit_bias": {str(ord("x") - 33): 100}}  # printable ASCII is the byte alphabet's beginning
        assert ask(server, **only_x).choices[0].text == "x" * 12

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
    def test_penalties_change_what_is_repeated(self, server: Running, name: str) -> None:
        ab = {"logit_bias": {str(ord(c) - 33): 30 for c in "ab"}, "max_tokens": 24}
        assert ask(server, **ab).choices[0].text != ask(server, **ab, **{name: 2.0}).choices[0].text


class TestStopping:
    def test_the_models_own_stop_token_is_a_stop_and_no_text(self, server: Running) -> None:
        eager = {"logit_bias": {str(EOS): 100}}
        (choice,) = ask(server, **eager).choices
        assert (choice.text, choice.finish_reason) == ("", "stop")
        ignored = ask(server, ignore_eos=True, **eager)
        assert (ignored.choices[0].finish_reason, ignored.usage.completion_tokens) == ("length", 12)
        late = ask(server, min_tokens=4, **eager)
        assert (late.choices[0].finish_reason, late.usage.completion_tokens) == ("stop", 5)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_string_ends_the_text_before_it(self, server: Running, stream: bool) -> None:
        free: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "logit_bias": letters(server)}
        whole = ask(server, **free).choices[0].text
        stop = whole[10:13]
        expected = whole[: whole.index(stop)]

        def text_of(**fields: Any) -> str:
            answer = ask(server, stream=stream, stop=["zzz", stop], **free, **fields)
            return "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text

        assert text_of() == expected
        assert text_of(include_stop_str_in_output=True) == expected + stop

    def test_which_stop_it_was_is_told(self, server: Running) -> None:
        fields = {"logit_bias": {str(ord("x") - 33): 100}}
        assert ask(server, stop="xxx", **fields).choices[0].stop_reason == "xxx"
        assert ask(server, stop_token_ids=[ord("x") - 33], **fields).choices[0].stop_reason == ord("x") - 33

    def test_special_tokens_are_shown_when_asked_for(self, server: Running) -> None:
        fields: dict[str, Any] = {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 2}
        assert ask(server, **fields).choices[0].text == ""
        assert ask(server, skip_special_tokens=False, **fields).choices[0].text == "<eos><eos>"


class TestLogprobs:
    def test_each_token_has_its_own_and_the_likeliest(self, server: Running) -> None:
        (choice,) = ask(server, logprobs=3, logit_bias=letters(server)).choices
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 12
        assert found.text_offset == list(range(12))
        assert all(3 <= len(top) <= 4 for top in found.top_logprobs)
        assert all(logprob < 0 for logprob in found.token_logprobs)

    def test_streamed_ones_are_the_same(self, server: Running) -> None:
        fields: dict[str, Any] = {"logprobs": 2, "logit_bias": letters(server)}
        whole = ask(server, **fields).choices[0].logprobs
        parts = [c.choices[0].logprobs for c in ask(server, stream=True, **fields) if c.choices[0].logprobs]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)

    def test_echo_scores_the_prompt(self, server: Running) -> None:
        plain = ask(server).choices[0].text
        (echoed,) = ask(server, echo=True, logprobs=1).choices
        assert echoed.text == "Hello" + plain
        assert len(echoed.logprobs.tokens) == 6 + 12
        assert echoed.logprobs.tokens[:6] == ["<bos>", *"Hello"]
        assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.token_logprobs[1] < 0
        streamed = list(ask(server, echo=True, stream=True))
        assert "".join(c.choices[0].text for c in streamed) == "Hello" + plain
        assert streamed[0].choices[0].text.startswith("Hello")

    def test_a_prompt_can_be_scored_without_going_on(self, server: Running) -> None:
        answer = ask(server, echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer.choices
        assert (choice.text, len(choice.logprobs.tokens)) == ("Hello", 6)
        assert (answer.usage.completion_tokens, choice.finish_reason) == (0, "length")
        (streamed,) = list(ask(server, echo=True, max_tokens=0, stream=True))
        assert streamed.choices[0].text == "Hello"


class TestTheWire:
    def test_events_are_what_the_standard_says(self, server: Running) -> None:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}
        ) as got:
            assert got.headers["content-type"].startswith("text/event-stream")
            assert got.headers["cache-control"] == "no-cache"
            text = got.read().decode()
        events = text.split("\n\n")
        assert events[-1] == "" and events[-2] == "data: [DONE]"
        for event in events[:-2]:
            assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"

    def test_fields_that_ask_for_nothing_may_be_sent(self, server: Running) -> None:
        fields = {"store": False, "suffix": None, "best_of": None, "use_beam_search": False, "user": "me"}
        assert server.complete(prompt="a", max_tokens=1, **fields).status_code == 200

    def test_no_model_is_the_served_one(self, server: Running) -> None:
        assert server.complete(prompt="a", max_tokens=1).json()["model"] == "tiny"


class TestTokens:
    def test_there_and_back(self, server: Running) -> None:
        answer = server.http.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
        most = server.service.max_model_len
        assert (answer["count"], answer["max_model_len"], answer["token_strs"][:2]) == (4, most, ["<bos>", "H"])
        back = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": "<bos>Hé"}
        bare = server.http.post("/tokenize", json={"prompt": "Hé", "add_special_tokens": False}).json()
        assert bare["tokens"] == answer["tokens"][1:]

    def test_a_chat_becomes_what_the_engine_is_given(self, server: Running) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        answer = server.http.post("/tokenize", json={"messages": messages}).json()
        tokenizer = server.service.tokenizer
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.decode(answer["tokens"], skip_special_tokens=False) == "<bos>user: Hi\nassistant:"
