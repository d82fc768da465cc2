"""What vLLM adds to chats and completions: token ids, words that are never said, messages that are gone on from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import Running, prompts
from tests.server.test_refusals import error_of

ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


class TestTokenIds:
    def test_of_a_completion(self, server: Running) -> None:
        tokenizer = server.service.need_tokenizer("")
        (choice,) = server.complete(prompt="Hello", **ASKED).json()["choices"]
        assert choice["prompt_token_ids"] == tokenizer.encode("Hello")
        assert (len(choice["token_ids"]), tokenizer.decode(choice["token_ids"])) == (12, choice["text"])
        streamed = [c["choices"][0] for c in chunks(server.complete(prompt="Hello", stream=True, **ASKED).text)]
        assert [token for part in streamed for token in part["token_ids"]] == choice["token_ids"]
        assert [p["prompt_token_ids"] for p in streamed if p["prompt_token_ids"]] == [choice["prompt_token_ids"]]
        assert "token_ids" not in server.complete(prompt="Hello", max_tokens=1).json()["choices"][0]

    def test_of_a_chat(self, server: Running) -> None:
        answer = server.chat(**ASKED).json()
        (choice,) = answer["choices"]
        tokenizer = server.service.need_tokenizer("")
        assert tokenizer.decode(answer["prompt_token_ids"]).endswith("user: Hi\nassistant:")
        assert tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
        streamed = chunks(server.chat(stream=True, **ASKED).text)
        tokens = [token for part in streamed for token in part["choices"][0]["token_ids"]]
        assert tokens == choice["token_ids"]
        assert [c["prompt_token_ids"] for c in streamed if "prompt_token_ids" in c] == [answer["prompt_token_ids"]]


class TestBadWords:
    def test_they_are_never_said(self, server: Running) -> None:
        (plain,) = server.complete(prompt="Hello", **ASKED).json()["choices"]
        tokenizer = server.service.need_tokenizer("")
        said = [tokenizer.decode([token]) for token in plain["token_ids"]]
        word = next(text for text in said if text.strip() and "\ufffd" not in text)
        (without,) = server.complete(prompt="Hello", bad_words=[word], **ASKED).json()["choices"]
        assert word in plain["text"] and word not in without["text"]
        said = server.chat(bad_words=["yes"], guided_choice=["yes", "yet"], max_tokens=9).json()
        assert said["choices"][0]["message"]["content"] == "yet"

    def test_too_many_or_empty_ones_are_refused(self, server: Running) -> None:
        assert "bad_words" in error_of(server.complete(prompt="a", bad_words=["x"] * 129), 400)["message"]
        assert "bad_words" in error_of(server.complete(prompt="a", bad_words=[""]), 400)["message"]


class TestContinuing:
    @pytest.mark.parametrize("begun", ["The answer is", "The answer is "])
    def test_an_answer_goes_on_from_the_last_message(self, server: Running, begun: str) -> None:
        seen = prompts(server)
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert seen == [f"user: Hi\nassistant: {begun}"]

    def test_only_from_the_assistants(self, server: Running) -> None:
        said = [{"role": "assistant", "content": "x"}]
        for fields in ({}, {"messages": said, "add_generation_prompt": True}):
            answer = server.chat(continue_final_message=True, **fields)
            assert error_of(answer, 400)["param"] == "continue_final_message"
        empty = server.chat(messages=[{"role": "assistant", "content": " "}], continue_final_message=True)
        assert "cannot be continued" in error_of(empty, 400)["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_what_is_no_text_is_named(server: Running, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    error = error_of(server.chat(messages=[{"role": "user", "content": parts}]), 400)
    assert f"{kind} parts cannot be read" in error["message"]
    assert error["param"] == "messages.0.content.1.type"


def test_the_id_of_a_request_comes_back(server: Running) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        answer = server.http.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"].endswith("-mine"), path
