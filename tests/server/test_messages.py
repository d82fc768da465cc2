"""/v1/messages through Anthropic's own client: blocks, events, tools, system, stop sequences, thinking, counting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.server.harness import PATIENCE_S, Running, no_thoughts, prompts, running
from tests.tiny_model import make_model

USER: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

ANY_ONE = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, anthropic.Anthropic]]:
    made: dict[str, anthropic.Anthropic] = {}
    yield made
    for client in made.values():
        client.close()


@pytest.fixture
def client(clients: dict[str, anthropic.Anthropic]) -> Any:
    def of(server: Running, key: str = "none") -> anthropic.Anthropic:
        if server.url + key not in clients:
            clients[server.url + key] = anthropic.Anthropic(
                base_url=server.url, api_key=key, max_retries=0, timeout=PATIENCE_S
            )
        return clients[server.url + key]

    return of


def fields(*, drawn: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Greedy unless `drawn` otherwise; newer clients send these fields as they are and know nothing of them."""
    body = drawn or {"temperature": 0}
    return {"model": "tiny", "messages": USER, "max_tokens": 12, "extra_body": body, **more}


def seeded(server: Running) -> dict[str, Any]:
    return {"logit_bias": no_thoughts(server), "seed": 1}


class TestAnswers:
    def test_an_answer_is_that_of_a_chat(self, server: Running, client: Any) -> None:
        answer = client(server).messages.create(**fields())
        chat = server.chat(temperature=0, max_tokens=12).json()
        (block,) = answer.content
        assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
        assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "max_tokens", "tiny")
        read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        assert (read, answer.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)

    def test_events_tell_of_the_same_answer(self, server: Running, client: Any) -> None:
        whole = client(server).messages.create(**fields())
        with client(server).messages.stream(**fields()) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert streamed.content[0].text == whole.content[0].text
        assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 12)
        assert (kinds[0], kinds[1], kinds[-1]) == ("message_start", "content_block_start", "message_stop")

    def test_a_stop_sequence_is_named(self, server: Running, client: Any) -> None:
        text = client(server).messages.create(**fields()).content[0].text
        stop = text[4:6]
        answer = client(server).messages.create(**fields(stop_sequences=[stop]))
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert answer.content[0].text == text[: text.index(stop)]
        with client(server).messages.stream(**fields(stop_sequences=[stop])) as stream:
            assert stream.get_final_message().stop_sequence == stop

    def test_the_system_prompt_and_a_conversation(self, server: Running, client: Any) -> None:
        seen = prompts(server)
        turns = [
            *USER,
            {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        ]
        system = [{"type": "text", "text": "Be kind."}]
        client(server).messages.create(**fields(messages=turns, system=system, metadata={"user_id": "me"}))
        assert seen == ["system: Be kind.\nuser: Hi\nassistant: Yes?\nuser: x\nassistant:"]
        counted = client(server).messages.count_tokens(model="tiny", messages=turns, system=system)
        assert counted.input_tokens == len(seen[0]) + 1  # BOS; a token to a character

    def test_a_format_holds(self, server: Running, client: Any) -> None:
        schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
        schema |= {"additionalProperties": False}
        form = {"format": {"type": "json_schema", "schema": schema}}
        answer = client(server).messages.create(**fields(output_config=form, max_tokens=99, drawn=seeded(server)))
        assert (answer.content[0].text.replace(" ", ""), answer.stop_reason) == ('{"a":"x"}', "end_turn")


class TestTools:
    def test_a_call_and_its_result_go_round(self, calling: Running, client: Any) -> None:
        asked = fields(tools=[WEATHER], tool_choice=ANY_ONE, max_tokens=400, drawn=seeded(calling))
        answer = client(calling).messages.create(**asked)
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        with client(calling).messages.stream(**asked) as stream:
            assert stream.get_final_message().content[0].input == call.input
        seen = prompts(calling)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": True}
        turns = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        client(calling).messages.create(**fields(messages=turns, max_tokens=1))
        assert seen == [f"user: Hi|assistant: weather({call.input['city']})|tool: Error: rain|assistant:"]

    def test_one_tool_may_be_asked_for_and_none(self, calling: Running, client: Any) -> None:
        asked = fields(
            tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=400, drawn=seeded(calling)
        )
        assert client(calling).messages.create(**asked).content[0].name == "weather"
        plain = client(calling).messages.count_tokens(model="tiny", messages=USER).input_tokens
        none = client(calling).messages.create(**fields(tools=[WEATHER], tool_choice={"type": "none"}))
        assert none.usage.input_tokens + none.usage.cache_read_input_tokens == plain


class TestThinking:
    def test_a_thought_is_a_block_of_its_own(self, thinking: Running, client: Any) -> None:
        answer = client(thinking).messages.create(**fields(thinking={"type": "adaptive"}))
        (block,) = answer.content
        assert block.type == "thinking" and block.thinking
        with client(thinking).messages.stream(**fields(thinking={"type": "adaptive"})) as stream:
            assert stream.get_final_message().content[0].thinking == block.thinking
        assert client(thinking).messages.create(**fields()).content == [], "nobody asked for it"

    def test_a_budget_ends_it(self, thinking: Running, client: Any) -> None:
        budget = {"type": "enabled", "budget_tokens": 5}
        drawn = {"ignore_eos": True, "temperature": 0}
        answer = client(thinking).messages.create(**fields(max_tokens=20, thinking=budget, drawn=drawn))
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert 0 < len(answer.content[0].thinking) <= 5

    def test_it_goes_back_into_the_chat(self, thinking: Running, client: Any) -> None:
        seen = prompts(thinking)
        blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes"}]
        turns = [*USER, {"role": "assistant", "content": blocks}, *USER]
        client(thinking).messages.create(**fields(messages=turns, max_tokens=1))
        assert seen == ["user: Hi|assistant: (Hm.) Yes|user: Hi|assistant:"]

    def test_a_template_that_knows_is_told_whether_to(self, tmp_path: Path, client: Any) -> None:
        template = "{% if enable_thinking %}T{% else %}N{% endif %}"
        model = make_model(tmp_path / "tiny", chat_template=template)
        with running(model, template_variables={"enable_thinking": True}) as server:
            seen = prompts(server)
            client(server).messages.create(**fields(max_tokens=1))
            server.chat(max_tokens=1)
            server.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": False})
            assert seen == ["N", "T", "N"], "requests win over --default-chat-template-kwargs"
            with pytest.raises(anthropic.BadRequestError, match="--reasoning-parser"):
                client(server).messages.create(**fields(thinking={"type": "enabled", "budget_tokens": 1}))

    def test_what_coding_agents_send_and_asks_for_nothing_may_be_sent(self, server: Running) -> None:
        """Of Claude Code 2.1.197, to a model that neither thinks nor knows of effort."""
        keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        body = {"model": "tiny", "messages": USER, "max_tokens": 2, "thinking": {"type": "adaptive"}}
        body |= {"context_management": keep, "output_config": {"effort": "high"}}
        assert server.http.post("/v1/messages?beta=true", json=body).status_code == 200
        for field, asks in (
            ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "x"}]}),
            ("output_config", {"effort": "low"}),
        ):
            refused = server.http.post("/v1/messages", json={**body, field: asks})
            assert refused.status_code == 400, field
        assert server.http.head("/").status_code == 200


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image parts cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "no thinking blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no type 'web_search_20250305'"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_in_its_form(server: Running, more: dict[str, Any], message: str) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 12, **more}
    answer = server.http.post("/v1/messages", json=body)
    document = answer.json()
    assert (answer.status_code, document["type"], document["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in document["error"]["message"]


def test_keys_come_in_its_header(model: Path, client: Any) -> None:
    with running(model, api_keys=("secret",)) as server:
        assert client(server, "secret").messages.create(**fields()).usage.output_tokens == 12
        with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"):
            client(server, "wrong").messages.create(**fields())
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            client(server, "secret").messages.create(**fields(model="other"))
