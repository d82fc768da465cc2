"""/v1/chat/completions through the real client: messages, streams, logprobs, formats, tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running, no_thoughts, running
from tests.tiny_model import make_model
from windowpane.text import chat_prompt
from windowpane.text.parsers import HarmonyParser, Parsers

USER = [{"role": "user", "content": "Hi"}]
SYSTEM = {"role": "system", "content": "Answer in as few words as you can, and never in verse."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def ask(server: Running, messages: Any = USER, **fields: Any) -> Any:
    return server.openai.chat.completions.create(
        model="tiny", messages=messages, **{"temperature": 0, "max_completion_tokens": 12, **fields}
    )


class TestPrefixes:
    """What earlier chats computed is found again, by the same tenant only."""

    def chat(self, server: Running, salt: str, *messages: dict[str, str]) -> Any:
        return ask(server, [SYSTEM, *messages], extra_body={"cache_salt": salt})

    def test_a_shared_system_prompt_is_computed_once(self, server: Running) -> None:
        first = self.chat(server, "a", {"role": "user", "content": "Where is Rome?"})
        second = self.chat(server, "a", {"role": "user", "content": "And what of Oslo?"})
        system_tokens = len("system: " + SYSTEM["content"] + "\n") + 1
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details.cached_tokens >= system_tokens
        alone = self.chat(server, "b", {"role": "user", "content": "And what of Oslo?"})
        assert alone.usage.prompt_tokens_details.cached_tokens == 0, "another tenant's pages"
        assert alone.choices[0].message.content == second.choices[0].message.content

    def test_the_same_chat_again_needs_the_output_layer_alone(self, server: Running) -> None:
        turn = {"role": "user", "content": "Once more, please."}
        first, again = (self.chat(server, "c", turn) for _ in range(2))
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
        assert again.choices[0].message.content == first.choices[0].message.content


class TestAnswers:
    def test_an_answer_is_a_message(self, server: Running) -> None:
        answer = ask(server)
        (choice,) = answer.choices
        assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
        assert answer.usage.prompt_tokens == len("user: Hi\nassistant:") + 1
        prompt = "user: Hi\nassistant:"
        assert (
            choice.message.content
            == server.complete(prompt=prompt, max_tokens=12, temperature=0).json()["choices"][0]["text"]
        )

    def test_a_stream_says_first_who_speaks(self, server: Running) -> None:
        chunks = list(ask(server, stream=True))
        assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
        assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == ask(server).choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_usage_comes_last_when_asked_for(self, server: Running) -> None:
        *_, last = ask(server, stream=True, stream_options={"include_usage": True})
        assert (last.choices, last.usage.completion_tokens) == ([], 12)

    def test_without_a_limit_the_answer_may_fill_the_context(self, server: Running) -> None:
        answer = ask(server, max_completion_tokens=None, extra_body={"ignore_eos": True})
        assert answer.usage.total_tokens == server.service.max_model_len + 1  # the last token need not be kept
        assert answer.choices[0].finish_reason == "length"

    def test_logprobs_name_every_token(self, server: Running) -> None:
        (choice,) = ask(server, logprobs=True, top_logprobs=2).choices
        entries = choice.logprobs.content
        assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
        assert all(entry.top_logprobs[0].token == entry.token for entry in entries)  # greedy
        joined = b"".join(bytes(entry.bytes) for entry in entries)
        assert joined.decode(errors="replace") == choice.message.content
        streamed = [c.choices[0].logprobs for c in ask(server, stream=True, logprobs=True, top_logprobs=2)]
        assert [entry for part in streamed if part for entry in part.content] == entries

    def test_content_may_come_in_parts(self, server: Running) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
        joined = [{"role": "user", "content": "H\ni"}]
        assert ask(server, parts).choices[0].message == ask(server, joined).choices[0].message

    def test_several_choices_stream_side_by_side(self, server: Running) -> None:
        fields: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 9}
        texts = ["", ""]
        for chunk in ask(server, stream=True, **fields):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [choice.message.content for choice in ask(server, **fields).choices]
        assert texts[0] != texts[1]


class TestPrompts:
    def test_messages_end_where_a_longer_chat_would_branch_off(self, server: Running) -> None:
        tokenizer, template = server.service.tokenizer, server.service.template
        assert tokenizer is not None and template is not None
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
        ends = [1 + len("system: S\n"), 1 + len("system: S\nuser: Hi\n")]  # after BOS; a token to a character
        assert chat_prompt(template, tokenizer, messages).message_ends == tuple(ends)

    def test_and_the_engine_is_told(self, tmp_path: Path) -> None:
        template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        with running(make_model(tmp_path / "tiny", chat_template=template)) as server:
            seen = []
            queue = server.service.engine.queue
            server.service.engine.queue = lambda request: (seen.append(request), queue(request))[1]  # type: ignore
            messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
            fields = {"extra_body": {"cache_salt": "pepper", "priority": -2}}
            ask(server, messages, **fields)
            (request,) = seen
            assert request.message_ends == (len("system: S\n"), len("system: S\nuser: Hi\n"))
            assert (request.cache_salt, request.priority) == ("pepper", -2)

    def test_a_base_model_says_that_it_cannot_chat(self, tmp_path: Path) -> None:
        with running(make_model(tmp_path / "base", chat_template=None)) as server:
            answer = server.chat()
            assert answer.status_code == 400
            assert "no chat template" in answer.json()["error"]["message"]
            assert "/v1/completions" in answer.json()["error"]["message"]

    def test_unless_it_is_given_one(self, tmp_path: Path) -> None:
        mine = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ reasoning_effort or '' }}"
        with running(make_model(tmp_path / "base", chat_template=None), chat_template=mine) as server:
            answer = server.http.post("/tokenize", json={"messages": USER, "return_token_strs": True}).json()
            assert "".join(answer["token_strs"]) == "[Hi]"
            assert server.chat(max_tokens=1, reasoning_effort="low").json()["usage"]["prompt_tokens"] == 7


class TestFormats:
    """Whatever a random model is asked for, it can say nothing else."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_json_by_a_schema(self, server: Running, stream: bool) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        # Spaces are allowed between the parts; a random model would write nothing else.
        bias = {"logit_bias": {str(server.service.tokenizer.encode(" ")[1]): -100}}  # type: ignore[union-attr]
        answer = ask(
            server, response_format=form, temperature=1, seed=2, max_completion_tokens=300, stream=stream, **bias
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            assert answer.choices[0].finish_reason == "stop"
            text = answer.choices[0].message.content
        person = json.loads(text)
        assert person["name"] in ("Ada", "Bob") and 0 <= person["age"] <= 99

    @pytest.mark.parametrize(
        ("fields", "allowed"),
        [
            ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
            ({"structured_outputs": {"regex": "(ab)+c"}}, None),
            ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
            ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, ("yes", "no")),
        ],
    )
    def test_other_constraints(self, server: Running, fields: dict[str, Any], allowed: tuple[str, ...] | None) -> None:
        (choice,) = ask(server, extra_body=fields, temperature=1, seed=4, max_completion_tokens=200).choices
        text = choice.message.content
        assert text in allowed if allowed else text.startswith("abab"[:2])
        completed = server.complete(prompt="a", max_tokens=200, seed=4, **fields).json()["choices"][0]["text"]
        assert completed in allowed if allowed else completed.startswith("ab")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"response_format": {"type": "json_schema"}}, "schema"),
            ({"structured_outputs": {"regex": "("}}, "regex"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
            ({"structured_outputs": {}}, "exactly one"),
            ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "give one"),
            ({"guided_json": {"type": "nonsense"}}, "nonsense"),
        ],
    )
    def test_a_constraint_that_cannot_be_kept_is_refused(
        self, server: Running, fields: dict[str, Any], message: str
    ) -> None:
        answer = server.chat(**fields)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}|"
        "{% endfor %}assistant:"
    )
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=template, max_position_embeddings=1024)
    parsers = Parsers(reasoning="qwen3", tools="hermes", auto_tools=True)
    with running(model, parsers=parsers) as server:
        yield server
        server.wait_until_idle()


class TestTools:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_a_call_that_is_required_is_made(self, calling: Running, choice: Any) -> None:
        fields = {"tools": [WEATHER], "tool_choice": choice, "temperature": 1, "seed": 1, "parallel_tool_calls": False}
        bias = {"logit_bias": no_thoughts(calling)}
        (made,) = ask(calling, max_completion_tokens=400, **fields, **bias).choices
        (call,) = made.message.tool_calls
        assert (made.finish_reason, made.message.content, call.function.name) == ("tool_calls", None, "weather")
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 5
        streamed = ask(calling, max_completion_tokens=400, stream=True, **fields, **bias)
        name, text, reasons = None, "", []
        for chunk in streamed:
            delta = chunk.choices[0].delta
            reasons.append(chunk.choices[0].finish_reason)
            for part in delta.tool_calls or []:
                name = part.function.name or name
                text += part.function.arguments or ""
        assert (name, json.loads(text), reasons[-1]) == ("weather", arguments, "tool_calls")

    def test_only_allowed_tools_are_told_and_called(self, calling: Running) -> None:
        other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
        named = {"type": "function", "function": {"name": "weather"}}

        def allowed(mode: str) -> Any:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}

        alone = ask(calling, tools=[WEATHER]).usage.prompt_tokens
        assert ask(calling, tools=[other, WEATHER], tool_choice=allowed("auto")).usage.prompt_tokens == alone
        fields: Any = {"tools": [other, WEATHER], "tool_choice": allowed("required"), "parallel_tool_calls": False}
        (made,) = ask(
            calling, max_completion_tokens=400, temperature=1, seed=1, logit_bias=no_thoughts(calling), **fields
        ).choices
        assert [call.function.name for call in made.message.tool_calls] == ["weather"]

    def test_a_model_that_calls_nothing_answers(self, calling: Running) -> None:
        (choice,) = ask(calling, tools=[WEATHER]).choices
        assert choice.message.tool_calls is None and choice.finish_reason == "length"

    def test_none_leaves_the_tools_out(self, calling: Running) -> None:
        plain = ask(calling).usage.prompt_tokens
        assert ask(calling, tools=[WEATHER], tool_choice="none").usage.prompt_tokens == plain
        assert ask(calling, tools=[WEATHER]).usage.prompt_tokens > plain

    def test_calls_and_results_go_back_into_the_chat(self, calling: Running) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
        answer = calling.http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
        text = "".join(answer["token_strs"])
        assert text == "user: Hi|assistant: weather(Rome)|tool: sunny|assistant:"

    def test_thoughts_are_told_apart(self, calling: Running) -> None:
        fields = {"structured_outputs": {"regex": "yes"}}
        # The reply is constrained, a thought before it is not; this one is closed at once.
        prompt = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "seed": 1, **fields}
        answer = calling.http.post("/v1/chat/completions", json={**prompt, "logit_bias": no_thoughts(calling)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "yes"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"tool_choice": "required"}, "no tools"),
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among"),
            ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "format"),
            (
                {
                    "tools": [WEATHER],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                    },
                },
                "not among",
            ),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"functions": [{"name": "f"}]}, "use tools instead"),
        ],
    )
    def test_what_cannot_be_called_is_refused(self, calling: Running, fields: dict[str, Any], message: str) -> None:
        answer = calling.chat(**fields)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]

    def test_a_server_without_parsers_says_what_it_needs(self, server: Running) -> None:
        for choice, flag in (("auto", "--enable-auto-tool-choice"), ("required", "--tool-call-parser")):
            answer = server.chat(tools=[WEATHER], tool_choice=choice)
            assert answer.status_code == 400 and flag in answer.json()["error"]["message"]


HARMONY_TEMPLATE = (  # in short what gpt-oss's own does
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}"
    "{% if tools %} {{ tools | tojson }}{% endif %}<|end|>{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}<|start|>assistant"
)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_model(
        tmp_path_factory.mktemp("models") / "tiny",
        chat_template=HARMONY_TEMPLATE,
        special_tokens=HarmonyParser.markers,
        max_position_embeddings=1024,
    )
    with running(model, parsers=Parsers(reasoning="openai_gptoss", tools="openai", auto_tools=True)) as server:
        yield server
        server.wait_until_idle()


class TestHarmony:
    def test_a_call_that_is_required_is_made(self, gpt_oss: Running) -> None:
        fields = {"tools": [WEATHER], "tool_choice": "required", "temperature": 1, "seed": 1}
        bias = {"logit_bias": self._no_thoughts(gpt_oss)}
        (made,) = ask(gpt_oss, max_completion_tokens=400, **fields, **bias).choices
        (call,) = made.message.tool_calls
        assert (made.finish_reason, made.message.content, call.function.name) == ("tool_calls", None, "weather")
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo")
        text, reasons, content = "", [], ""
        for chunk in ask(gpt_oss, max_completion_tokens=400, stream=True, **fields, **bias):
            reasons.append(chunk.choices[0].finish_reason)
            content += chunk.choices[0].delta.content or ""
            for part in chunk.choices[0].delta.tool_calls or []:
                text += part.function.arguments or ""
        assert (json.loads(text), reasons[-1], content) == (arguments, "tool_calls", "")

    def test_a_format_holds_for_the_final_message(self, gpt_oss: Running) -> None:
        bias = self._no_thoughts(gpt_oss)
        answer = gpt_oss.chat(max_tokens=60, seed=1, structured_outputs={"regex": "yes"}, logit_bias=bias).json()
        assert answer["choices"][0]["message"]["content"] == "yes"
        assert answer["choices"][0]["finish_reason"] == "stop"

    def test_what_the_model_thinks_is_reasoning(self, gpt_oss: Running) -> None:
        """Told to think and never to end it, all that comes is reasoning."""
        tokenizer = gpt_oss.service.tokenizer
        assert tokenizer is not None
        bias = {str(tokenizer.token_id("<|end|>")): -100, str(tokenizer.encode("f", add_special_tokens=False)[0]): -100}
        answer = gpt_oss.chat(max_tokens=60, seed=1, structured_outputs={"regex": "yes"}, logit_bias=bias).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] and message["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_calls_and_reasoning_go_back_into_the_chat(self, gpt_oss: Running) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        said = {"role": "assistant", "content": "I look.", "reasoning_content": "Where?", "tool_calls": [call]}
        messages = [{"role": "user", "content": "<|end|>"}, said]
        body = {"messages": messages, "return_token_strs": True, "chat_template_kwargs": {"reasoning_effort": "high"}}
        answer = gpt_oss.http.post("/tokenize", json=body).json()
        assert "".join(answer["token_strs"]) == (
            "<|start|>system<|message|>Reasoning: high<|end|><|start|>user<|message|><|end|><|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>Where?\nI look.<|end|>"
            '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
            "<|start|>assistant"
        )
        assert answer["token_strs"].count("<|end|>") == 3  # what the user wrote is text

    def test_the_effort_reaches_the_template(self, gpt_oss: Running) -> None:
        medium, high = (
            gpt_oss.chat(max_tokens=1, reasoning_effort=effort).json()["usage"]["prompt_tokens"]
            for effort in ("medium", "high")
        )
        assert medium - high == len("medium") - len("high")

    @pytest.mark.parametrize(("reasoning", "tools"), [("qwen3", "openai"), ("openai_gptoss", "hermes")])
    def test_parsers_of_other_models_do_not_go_with_it(self, reasoning: str, tools: str) -> None:
        with pytest.raises(ValueError, match="do not go together"):
            Parsers(reasoning, tools)

    @staticmethod
    def _no_thoughts(server: Running) -> dict[str, float]:
        """Against `analysis`, and against spaces without end."""
        tokenizer = server.service.tokenizer
        assert tokenizer is not None
        return {str(tokenizer.encode(text, add_special_tokens=False)[0]): -100 for text in "a \n\t\r"}
