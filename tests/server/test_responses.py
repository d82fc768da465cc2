"""/v1/responses through the real client: items, events, tools, reasoning, formats, and going on from a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import Running, no_thoughts, prompts, running
from tests.server.test_refusals import error_of
from windowpane.server.protocol import Message
from windowpane.server.responses import ResponseStore, Stored

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(server: Running, given: Any = "Hi", **fields: Any) -> Any:
    return server.openai.responses.create(
        model="tiny", input=given, **{"temperature": 0, "max_output_tokens": 12, **fields}
    )


class TestAnswers:
    def test_an_answer_is_that_of_a_chat(self, server: Running) -> None:
        answer = ask(server)
        chat = server.chat(temperature=0, max_tokens=12).json()
        assert answer.output_text == chat["choices"][0]["message"]["content"]
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
        assert answer.usage.output_tokens_details.reasoning_tokens == 0
        assert (answer.object, answer.model, answer.temperature) == ("response", "tiny", 0.0)

    def test_events_tell_of_the_same_answer(self, server: Running) -> None:
        events = list(ask(server, stream=True))
        assert [event.type for event in events[:4]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last = events[-1]
        assert last.type == "response.incomplete"
        assert text == last.response.output_text == ask(server).output_text
        assert events[-2].item == last.response.output[0]

    def test_the_clients_own_stream_follows(self, server: Running) -> None:
        with server.openai.responses.stream(
            model="tiny", input="Hi", extra_body={"structured_outputs": {"regex": "yes"}}
        ) as stream:
            assert stream.get_final_response().output_text == "yes"

    def test_logprobs_name_every_token(self, server: Running) -> None:
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        entries = ask(server, **fields).output[0].content[0].logprobs
        assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
        *_, last = ask(server, stream=True, **fields)
        assert last.response.output[0].content[0].logprobs == entries

    def test_instructions_are_the_system_message(self, server: Running) -> None:
        seen = prompts(server)
        ask(server, [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], instructions="Be kind.")
        assert seen == ["system: Be kind.\nuser: Hi\nassistant:"]

    def test_a_format_holds(self, server: Running) -> None:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema |= {"additionalProperties": False}
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        answer = ask(server, text={"format": form}, max_output_tokens=200, extra_body=quiet(server))
        assert json.loads(answer.output_text)["a"] in (1, 2)
        assert (answer.status, answer.text.format.name) == ("completed", "x")


def quiet(server: Running) -> dict[str, Any]:
    return {"logit_bias": no_thoughts(server), "seed": 1}


class TestGoingOn:
    def test_a_response_is_gone_on_from_without_its_instructions(self, server: Running) -> None:
        seen = prompts(server)
        first = ask(server, instructions="Be kind.")
        second = ask(server, "More", previous_response_id=first.id)
        assert seen[1] == f"user: Hi\nassistant: {first.output_text}\nuser: More\nassistant:"
        assert second.previous_response_id == first.id
        *_, third = ask(server, "Yet more", previous_response_id=second.id, stream=True)
        ask(server, "The end", previous_response_id=third.response.id)
        assert seen[3].endswith(f"assistant: {third.response.output_text}\nuser: The end\nassistant:")

    def test_a_stored_one_can_be_read_and_deleted(self, server: Running) -> None:
        first = ask(server, metadata={"a": "b"})
        assert server.openai.responses.retrieve(first.id) == first
        server.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            server.openai.responses.retrieve(first.id)

    def test_unless_it_was_not_to_be_stored(self, server: Running) -> None:
        unstored = ask(server, store=False)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            ask(server, "More", previous_response_id=unstored.id)

    def test_each_key_has_its_own(self, model: Path) -> None:
        with running(model, api_keys=("one", "two")) as server:
            one, two = (server.openai.with_options(api_key=key) for key in ("one", "two"))
            id = one.responses.create(model="tiny", input="Hi", max_output_tokens=2).id
            assert one.responses.retrieve(id).id == id
            with pytest.raises(openai.NotFoundError):
                two.responses.create(model="tiny", input="More", previous_response_id=id)

    def test_the_oldest_give_way(self) -> None:
        store = ResponseStore(max_bytes=10_000)
        for id in "abc":
            store.keep("", Stored({"id": id}, (Message(role="user", content="x" * 2000),)))
        assert store.find("", "c").document == {"id": "c"}
        with pytest.raises(Exception, match="gave way to newer ones"):
            store.find("", "a")

    def test_however_little_they_say(self) -> None:
        """A response holds its tools and its schema, and objects where others have characters."""
        store = ResponseStore(max_bytes=2**20)
        for number in range(2000):
            document = {"id": str(number), "tools": [{"type": "function", "parameters": {"enum": list("abcdefgh")}}]}
            store.keep("", Stored(document, (Message(role="user", content="Hi"),)))
        assert 100 < sum(1 for _ in store._kept) < 500


class TestTools:
    def test_a_call_and_its_result_go_round(self, calling: Running) -> None:
        fields: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 400, "extra_body": quiet(calling)}
        fields["extra_body"]["temperature"] = 1
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
        answer = ask(calling, tool_choice=allowed, parallel_tool_calls=False, **fields)
        (call,) = answer.output
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "weather")
        city = json.loads(call.arguments)["city"]
        seen = prompts(calling)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        ask(calling, [result], previous_response_id=answer.id, max_output_tokens=1)
        ask(calling, [{"role": "user", "content": "Hi"}, call.model_dump(), result], max_output_tokens=1)
        assert seen == [f"user: Hi|assistant: weather({city})|tool: sunny|assistant:"] * 2

    def test_events_of_a_call(self, calling: Running) -> None:
        fields: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 400, "extra_body": quiet(calling)}
        fields["extra_body"]["temperature"] = 1
        fields |= {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
        events = list(ask(calling, stream=True, **fields))
        text = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
        assert done.arguments == text == events[-1].response.output[0].arguments
        assert events[-1].type == "response.completed"


class TestReasoning:
    """The parser is one for which answers begin in a thought, and a random model never ends it."""

    def test_it_is_an_item_of_its_own(self, thinking: Running) -> None:
        answer = ask(thinking, include=["reasoning.encrypted_content"], extra_body={"ignore_eos": True})
        (item,) = answer.output
        assert (item.type, answer.output_text) == ("reasoning", "")
        assert item.content[0].text
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        events = list(ask(thinking, stream=True, extra_body={"ignore_eos": True}))
        text = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
        assert text == item.content[0].text == events[-1].response.output[0].content[0].text

    def test_it_goes_back_into_the_chat(self, thinking: Running) -> None:
        answer = ask(thinking)
        thought = answer.output[0].content[0].text
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
        seen = prompts(thinking)
        ask(thinking, [answer.output[0].model_dump(), said, {"role": "user", "content": "x"}], max_output_tokens=1)
        ask(thinking, "x", previous_response_id=answer.id, max_output_tokens=1)
        assert seen == [
            f"assistant: ({thought}) Yes.|user: x|assistant:",
            f"user: Hi|assistant: ({thought}) |user: x|assistant:",
        ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image parts"),
        ({"input": [{"type": "web_search_call"}]}, "no type 'web_search_call'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "no type 'web_search'"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "top_logprobs": 2}, "include"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "arguments"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Running, fields: dict[str, Any], message: str) -> None:
    assert message in error_of(server.http.post("/v1/responses", json=fields), 400)["message"]
