"""/api/… through Ollama's own client, and what else clients look for: /ping, /load, /tokenizer_info."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from tests.server.harness import Running, prompts, running
from tests.tiny_model import BOS, make_model
from windowpane import FinishReason, SamplingParams, __version__
from windowpane.server.job import Job, Piece, Times
from windowpane.server.ollama_writer import OllamaWriter
from windowpane.server.reader import Reader
from windowpane.text.answer import Answer
from windowpane.text.parsers import OutputParser, tool_parser

USER = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


class TestChat:
    def test_an_answer_is_that_of_a_chat(self, server: Running, client: ollama.Client) -> None:
        answer = client.chat("tiny:latest", USER, options=GREEDY)
        chat = server.chat(temperature=0, max_tokens=12).json()
        assert answer.message.content == chat["choices"][0]["message"]["content"]
        assert (answer.done, answer.done_reason, answer.model) == (True, "length", "tiny:latest")
        assert (answer.prompt_eval_count, answer.eval_count) == (chat["usage"]["prompt_tokens"], 12)
        assert answer.total_duration >= answer.eval_duration > 0
        streamed = list(client.chat("tiny", USER, options=GREEDY, stream=True))
        assert "".join(part.message.content for part in streamed) == answer.message.content
        assert [part.done for part in streamed] == [False] * (len(streamed) - 1) + [True]

    def test_formats_and_logprobs(self, server: Running, client: ollama.Client) -> None:
        schema = {"enum": ["yes"]}
        assert client.chat("tiny", USER, format=schema).message.content == '"yes"'
        answer = client.chat("tiny", USER, options=GREEDY, logprobs=True, top_logprobs=2)
        assert len(answer.logprobs) == 12 and len(answer.logprobs[0].top_logprobs) == 2

    def test_tools_and_calls_reach_the_template(self, calling: Running) -> None:
        with ollama.Client(calling.url) as client:
            seen = prompts(calling)
            call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
            messages = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
            client.chat("tiny", messages, tools=[WEATHER], options={"num_predict": 1})
            assert seen[0].endswith("user: Hi|assistant: weather(Rome)|tool: sunny|assistant:")
            assert json.loads(seen[0].partition("\n")[0])[0]["function"]["name"] == "weather"

    def test_calls_are_told_when_they_are_whole(self, server: Running) -> None:
        """A random model calls nothing unless it must, which this API cannot ask for: its words are put in here."""
        request = server.service.request("x", np.array([1]), SamplingParams(), "prompt")
        job = Job("x", [Answer(request, server.service.tokenizer)], True, times=[Times(0.0)])
        reader = Reader(OutputParser(None, tool_parser("hermes")([WEATHER])))
        writer = OllamaWriter(server.service, "tiny", True, job, [reader])
        text = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        pieces = [Piece(0, character, 1, None, None) for character in text]
        lines = b"".join(writer.encode([piece]) for piece in [*pieces, Piece(0, "", 1, None, FinishReason.STOP)])
        parts = [json.loads(line)["message"] for line in (lines + writer.last()).splitlines()]
        assert "".join(part["content"] for part in parts).strip() == "Look:"
        called = {"name": "weather", "arguments": {"city": "Rome"}}
        assert [c["function"] for part in parts for c in part.get("tool_calls", [])] == [called]

    def test_a_thought_is_told_apart(self, thinking: Running) -> None:
        with ollama.Client(thinking.url) as client:
            answer = client.chat("tiny", USER, think=True, options=GREEDY)
            assert answer.message.thinking and not answer.message.content
            parts = client.chat("tiny", USER, think=True, options=GREEDY, stream=True)
            assert "".join(part.message.thinking or "" for part in parts) == answer.message.thinking
            assert client.chat("tiny", USER, think=False, options=GREEDY).message.thinking is None


class TestGenerate:
    def test_a_prompt_is_a_chat_of_one_message(self, server: Running, client: ollama.Client) -> None:
        seen = prompts(server)
        client.generate("tiny", "Hi", system="Be kind.", options=GREEDY, keep_alive=-1)
        assert seen == ["system: Be kind.\nuser: Hi\nassistant:"]

    def test_unless_it_is_raw(self, server: Running, client: ollama.Client) -> None:
        answer = client.generate("tiny", "Hi", raw=True, options=GREEDY)
        plain = server.complete(prompt="Hi", temperature=0, max_tokens=12).json()["choices"][0]["text"]
        assert answer.response == plain
        parts = client.generate("tiny", "Hi", raw=True, options=GREEDY, stream=True)
        assert "".join(part.response for part in parts) == plain
        longest = client.generate("tiny", "Hi", raw=True, options={"num_predict": -1, "seed": 1})
        assert longest.done_reason in ("stop", "length") and longest.eval_count > 12

    def test_a_base_model_goes_on(self, tmp_path: Path) -> None:
        with (
            running(make_model(tmp_path / "base", chat_template=None)) as server,
            ollama.Client(server.url) as client,
        ):
            assert client.generate("base", "Hi", options=GREEDY).eval_count == 12

    def test_an_empty_prompt_asks_whether_it_is_loaded(self, client: ollama.Client) -> None:
        assert client.generate("tiny", "").done_reason == "load"


def test_models_are_listed(server: Running, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    assert server.http.get("/api/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "other"}, "not served here"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"num_ctx": 10**6}}, "--max-model-len"),
        ({"keep_alive": 0}, "unload"),
        ({"think": True}, "--reasoning-parser"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_in_its_form(server: Running, fields: dict[str, Any], message: str) -> None:
    answer = server.http.post("/api/chat", json={"model": "tiny", "messages": USER, **fields})
    assert answer.status_code == (404 if "model" in fields else 400)
    assert message in answer.json()["error"]


def test_places_that_others_look_at(server: Running) -> None:
    assert server.http.get("/ping").json() == server.http.post("/ping").json() == {"status": "ok"}
    assert server.http.get("/load").json() == {"server_load": 0}
    info = server.http.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["special_tokens"]["bos_token"]) == (BOS + 2, "<bos>")
    assert "assistant:" in info["chat_template"]
