"""Tool calls are found and checked however the text is cut; what is none stays text; and calls can be forced."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.models import SMOLLM2, embedded_tokenizer
from tests.text.pieces import Parts, parts, pieces
from tests.text.test_grammar import allowed, fits
from tests.tiny_model import make_model
from windowpane.text import Detokenizer, Tokenizer, load_tokenizer
from windowpane.text.grammar import GrammarError, Grammars
from windowpane.text.parsers import (
    TOOL_PARSERS,
    OutputParser,
    kept_special_ids,
    reasoning_parser,
    tool_grammar,
    tool_parser,
)

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GEMMA4 = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
PARIS = ("get_weather", {"city": "Paris"})
GEMMA4_TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")

QWEN3 = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM45 = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
LLAMA4 = '[get_weather(city="Paris")]'
LLAMA4_JSON = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
HARMONY = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'

HERMES_WORDS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_call",
        "</",
        '{"name": "f", "arguments": {',
        '"a": "x',
        '"',
        "}}",
        "}",
        "{",
    ),
    *(" ", "\n", "text", "\\", '\\"', '{"name": "g"}', HERMES),
]
GEMMA4_WORDS = [
    *(
        "<|tool_call>",
        "<tool_call|>",
        "<|tool",
        "call:f{",
        'a:<|"|>',
        '<|"|>',
        ",b:[1,true]",
        "}",
        "<",
        " ",
        "\n",
        "text",
    ),
    *("call:g{}", GEMMA4),
]
QWEN3_WORDS = [
    *("<tool_call>", "</tool_call>", "<tool_call", "</", "<function=f>", "<function=", "</function>", "<parameter=a>"),
    *("</parameter>", "<", " ", "\n", "text", "3", "<tool_call>\n<function=g>", QWEN3),
]
GLM45_WORDS = [
    *("<tool_call>", "</tool_call>", "<tool_call", "</", "f", "<arg_key>a</arg_key>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<", " ", "\n", "text", "{", "3", GLM45),
]
LLAMA4_WORDS = [
    *("<|python_start|>", "<|python_end|>", "[", "]", "[f(", ")", "a=", "'", '"', "\\", ", ", "g()", "{", "}", "<|"),
    *(" ", "\n", "text", "3", '{"name": ', '"f"', LLAMA4, LLAMA4_JSON),
]
HARMONY_WORDS = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>", "assistant"),
    *("analysis", "commentary", "final", " to=functions.f", "to=", "json", "{}", '{"a": ', "<|", "<", " ", "\n", "x y"),
    HARMONY,
]
WORDS = {
    "hermes": HERMES_WORDS,
    "gemma4": GEMMA4_WORDS,
    "qwen3_coder": QWEN3_WORDS,
    "glm45": GLM45_WORDS,
    "llama4_pythonic": LLAMA4_WORDS,
    "llama4_json": LLAMA4_WORDS,
    "openai": HARMONY_WORDS,
}
CALLS = {
    "hermes": HERMES,
    "gemma4": GEMMA4,
    "qwen3_coder": QWEN3,
    "glm45": GLM45,
    "llama4_pythonic": LLAMA4,
    "llama4_json": LLAMA4_JSON,
    "openai": HARMONY,
}


def parse(name: str, text: str) -> Parts:
    parser = tool_parser(name)()
    return parts([*parser.push(text), *parser.finish()])


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", HERMES, [PARIS], ""),
        ("hermes", f"Let me see.\n{HERMES}\n{HERMES}\n", [PARIS, PARIS], "Let me see."),
        ("hermes", f"{HERMES} Done.", [PARIS], "Done."),
        ("hermes", '<tool_call>{"arguments": {"n": 1e5}, "name": "f"}</tool_call>', [("f", {"n": 1e5})], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})], ""),
        (
            "hermes",
            '<tool_call>{"name": "say", "arguments": {"t": "</tool_call> \\" <tool_call>"}}</tool_call>',
            [("say", {"t": '</tool_call> " <tool_call>'})],
            "",
        ),
        ("hermes", "Use the <tool_call> tag.", [], "Use the <tool_call> tag."),
        ("hermes", f"<tool_call>{HERMES}", [PARIS], "<tool_call>"),
        ("gemma4", GEMMA4, [PARIS], ""),
        ("gemma4", f"Look:\n{GEMMA4}{GEMMA4}", [PARIS, PARIS], "Look:"),
        (
            "gemma4",
            '<|tool_call>call:f{a:{b:[1,-2.5,<|"|>x,}"<|"|>],c:true},d:null,e:None}<tool_call|>',
            [("f", {"a": {"b": [1, -2.5, 'x,}"'], "c": True}, "d": None, "e": None})],
            "",
        ),
        ("gemma4", '<|tool_call>call:f{t:<|"|><tool_call|><|"|>}<tool_call|>', [("f", {"t": "<tool_call|>"})], ""),
        ("gemma4", '<|tool_call>call:a.b-c{"k": "v\\n"}<tool_call|>', [("a.b-c", {"k": "v\n"})], ""),
        ("gemma4", f"<|tool_call>{GEMMA4}", [PARIS], "<|tool_call>"),
    ],
)
def test_calls_are_found(name: str, text: str, calls: list[Any], content: str) -> None:
    found = parse(name, text)
    assert (found.calls, found.content) == (calls, content)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("hermes", body) for body in ("", "{", "{}", "[]", '{"name": 3}', '{"name": ""}', '{"name": "\\ud800"}')),
        *(("hermes", body) for body in ('{"name": "f", "arguments": []}', '{"name": "f", "arguments": {"a": NaN}}')),
        *(("hermes", body) for body in ('{"name": "f", "arguments": {}} and', '{"name": "f' + "[" * 100_000)),
        ("hermes", '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}"),
        *(("gemma4", body) for body in ("", "call:", "call:f", "call:{}", "call:f{a}", "call:f{a:}", "call:f{a:b}")),
        *(
            ("gemma4", body)
            for body in ("call:f{a:1}x", "call:f{a:1", "call:f[1]", "call:f{a:1 b:2}", "call:f{a:1e999}")
        ),
        *(
            ("gemma4", body)
            for body in ('call:f{a:<|"|>x}', 'call:f{"a":"\\ud800"}', "call:f{a:" + "[" * 100_000 + "}")
        ),
    ],
)
@pytest.mark.parametrize("is_closed", [True, False])
def test_what_is_no_call_is_text_in_full(name: str, body: str, is_closed: bool) -> None:
    start, end = {"hermes": ("<tool_call>", "</tool_call>"), "gemma4": ("<|tool_call>", "<tool_call|>")}[name]
    text = f"A {start}{body}{end if is_closed else ''}\n B"
    found = parse(name, text)
    assert (found.calls, found.content) == ([], text)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(data=st.data())
def test_pieces_do_not_matter(name: str, data: st.DataObject) -> None:
    text, cut = data.draw(pieces(WORDS[name]))
    parser = tool_parser(name)()
    deltas = [delta for piece in cut for delta in parser.push(piece)]
    assert parts([*deltas, *parser.finish()]) == parse(name, text)


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "openai"])
@given(data=st.data())
def test_nothing_is_lost(name: str, data: st.DataObject) -> None:
    """Without a call all text is content, as it was."""
    text, _ = data.draw(pieces(WORDS[name]))
    found = parse(name, text)
    if not found.calls:
        assert found.content == text


def test_reasoning_and_calls_together() -> None:
    parser = OutputParser(reasoning_parser("gemma4")(""), tool_parser("gemma4")())
    text = f"<|channel>thought\nhm<channel|>Let me see.{GEMMA4}<|channel>thought\nmm{GEMMA4}"
    deltas = [delta for character in text for delta in parser.push(character)]
    found = parts([*deltas, *parser.finish()])
    assert (found.reasoning, found.content, found.calls) == ("hmmm", "Let me see.", [PARIS, PARIS])
    call = ["ToolStart", "ToolArguments"]
    assert found.order == ["Reasoning", "Content", *call, "Reasoning", *call]


def test_text_passes_where_there_is_no_parser() -> None:
    parser = OutputParser(None, None)
    assert parts([*parser.push(""), *parser.push(HERMES), *parser.finish()]).content == HERMES


def test_an_unknown_name_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="no tool call parser 'x'; there are hermes, gemma4, qwen3_coder"):
        tool_parser("x")


# -- special tokens --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma4_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Single bytes, and Gemma 4's markers as special tokens."""
    return load_tokenizer(make_model(tmp_path_factory.mktemp("models") / "tiny", special_tokens=GEMMA4_TOKENS))


@pytest.fixture(scope="module")
def others_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Single bytes, and the markers of all other forms as special tokens."""
    markers = [marker for name in WORDS if name != "gemma4" for marker in tool_parser(name)().markers]
    tokens = tuple(dict.fromkeys(markers))
    return load_tokenizer(make_model(tmp_path_factory.mktemp("models") / "tiny", special_tokens=tokens))


def test_markers_are_shown_to_parsers_and_other_special_tokens_are_not(gemma4_like: Tokenizer) -> None:
    parser = OutputParser(None, tool_parser("gemma4")())
    detokenizer = Detokenizer(gemma4_like, kept_special_ids=kept_special_ids(gemma4_like, parser.markers))
    tokens = gemma4_like.encode(f"<bos><|channel>{GEMMA4}<eos>", add_special_tokens=False)
    assert len(tokens) < len(GEMMA4)
    deltas = [delta for token in tokens for delta in parser.push(detokenizer.push(token))]
    found = parts([*deltas, *parser.finish()])
    assert (found.calls, found.content) == ([PARIS], "")


grammars_of = cache(Grammars)  # each starts processes of its own


# -- forced calls ----------------------------------------------------------------------------------------------------

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "minLength": 1, "maxLength": 8, "description": "Where"},
                    "unit": {"enum": ["celsius", "fahrenheit", 3, None]},
                    "days": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
                    "node": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"node": NODE},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(params=[(name, kind) for name in WORDS for kind in ("text", "tokens")], ids="-".join)
def form(request: pytest.FixtureRequest, gemma4_like: Tokenizer, others_like: Tokenizer) -> tuple[str, Tokenizer]:
    name, markers = request.param
    if markers == "text":
        return name, embedded_tokenizer(SMOLLM2)
    return name, gemma4_like if name == "gemma4" else others_like


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_drawn_is_a_call_by_the_schema(seed: int, form: tuple[str, Tokenizer]) -> None:
    name, tokenizer = form
    draw = random.Random(seed)
    matcher = tool_grammar(grammars_of(tokenizer), name, TOOLS).matcher()
    parser = tool_parser(name)(TOOLS)
    detokenizer = Detokenizer(tokenizer, kept_special_ids=kept_special_ids(tokenizer, parser.markers))
    deltas, token = [], -1
    for _ in range(3000):
        choices = allowed(matcher.allowed(may_stop=True))
        token = min(choices & tokenizer.stop_ids, default=-1)
        if token >= 0:
            break
        token = draw.choice(sorted(choices))
        matcher.accept(token)
        deltas += parser.push(detokenizer.push(token))
    assert token >= 0
    found = parts([*deltas, *parser.finish()])
    assert found.calls and not found.content
    for call in found.calls:
        check_call(*call)


def check_call(name: str, arguments: dict[str, Any]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert name == "get_weather" and {"city"} <= set(arguments) <= {"city", "unit", "days", "node"}
    assert 1 <= len(arguments["city"]) <= 8
    assert arguments.get("unit") in ("celsius", "fahrenheit", 3, None)
    assert all(isinstance(day, bool) for day in arguments.get("days", [])) and 1 <= len(arguments.get("days", [0])) <= 3
    node = arguments.get("node")
    while node is not None:
        assert {"value"} <= set(node) <= {"value", "next"} and 0 <= node["value"] <= 9
        node = node.get("next")


NOW_AND_PARIS = {
    "hermes": ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', HERMES, ""),
    "gemma4": ("<|tool_call>call:now{}<tool_call|>", GEMMA4, ""),
    "qwen3_coder": ("<tool_call>\n<function=now>\n</function>\n</tool_call>", QWEN3, ""),
    "glm45": ("<tool_call>now\n</tool_call>", GLM45, ""),
    "llama4_pythonic": ("[now()]", LLAMA4, '[get_weather(city="Paris"), now()]'),
    "llama4_json": ('{"name": "now", "parameters": {}}', LLAMA4_JSON, ""),
    "openai": ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", HARMONY, ""),
}
NOW_AND_PARIS = {name: (now, paris, both or f"{paris}\n{now}") for name, (now, paris, both) in NOW_AND_PARIS.items()}
NOW_AND_PARIS["gemma4"] = (*NOW_AND_PARIS["gemma4"][:2], GEMMA4 + NOW_AND_PARIS["gemma4"][0])


def test_required_allows_any_function_several_times(form: tuple[str, Tokenizer]) -> None:
    name, tokenizer = form
    grammars = grammars_of(tokenizer)
    one, other, both = NOW_AND_PARIS[name]
    required = tool_grammar(grammars, name, TOOLS)
    assert fits(required, one, tokenizer) and fits(required, both, tokenizer) == (name != "openai")
    assert not fits(required, "Let me see." + one, tokenizer) and not fits(required, "", tokenizer)
    single = tool_grammar(grammars, name, TOOLS, parallel=False)
    assert fits(single, one, tokenizer) and not fits(single, both, tokenizer)
    named = tool_grammar(grammars, name, TOOLS, function="now")
    assert fits(named, one, tokenizer) and not fits(named, other, tokenizer) and not fits(named, both, tokenizer)


def function(**schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], None, "no tools"),
        (TOOLS, "then", "'then', which is not among the tools: get_weather, now"),
        ([{"type": "function"}], None, "needs a function with a name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "'a b'"),
        ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], None, "parameters of f"),
        (function(properties={"a": {"type": "array", "uniqueItems": True}}), None, "uniqueItems"),
        (function(properties={"a": {"type": "strin"}}), None, "strin"),
        (function(properties={"a": {"$ref": "#/$defs/no"}}), None, "/no"),
    ],
)
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_what_cannot_be_forced_is_refused(name: str, tools: Any, choice: str | None, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        tool_grammar(grammars_of(embedded_tokenizer(SMOLLM2)), name, tools, function=choice)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": ["string", "null"], "pattern": "x"}}}, "f.a: 'pattern' cannot be enforced"),
        ({"properties": {"a b": {"type": "string"}}}, "'a b' cannot be written without quotes"),
        ({"properties": {"a": {"enum": [{}]}}}, "cannot be one of its values"),
        ({"required": ["a"]}, "'a' is required but not declared"),
        ({"properties": {"a": {"oneOf": [{}]}}}, "oneOf"),
    ],
)
def test_gemma4s_form_names_what_it_cannot_keep(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        tool_grammar(grammars_of(embedded_tokenizer(SMOLLM2)), "gemma4", function(**schema))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "string", "pattern": "x"}, "f.a: 'pattern' cannot be enforced"),
        ({"type": ["string", "null"], "pattern": "x"}, "f.a: 'pattern' cannot be enforced"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "f.a: 'oneOf' cannot be enforced"),
        ({"enum": ["b", {}]}, "cannot be one of its values"),
    ],
)
def test_plain_text_cannot_keep_every_keyword(name: str, value: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        tool_grammar(grammars_of(embedded_tokenizer(SMOLLM2)), name, function(properties={"a": value}))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "llama4_pythonic"])
def test_names_of_arguments_are_checked(name: str) -> None:
    grammars = grammars_of(embedded_tokenizer(SMOLLM2))
    with pytest.raises(GrammarError, match="'a b' cannot be the name of an argument"):
        tool_grammar(grammars, name, function(properties={"a b": {"type": "string"}}))
    with pytest.raises(GrammarError, match="'a' is required but not declared"):
        tool_grammar(grammars, name, function(required=["a"], properties={"b": {}}))


def test_arguments_of_any_kind(form: tuple[str, Tokenizer]) -> None:
    """A schema that says nothing allows everything."""
    name, tokenizer = form
    grammar = tool_grammar(grammars_of(tokenizer), name, function(additionalProperties=True))
    assert fits(grammar, ANY_ARGUMENTS[name], tokenizer)
    found = parse(name, ANY_ARGUMENTS[name])
    assert found.calls == [("f", {"a": {"b": [1, "x", None]}, "c": True})]


JSON_ARGUMENTS = '{"a": {"b": [1, "x", null]}, "c": true}'
ANY_ARGUMENTS = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {JSON_ARGUMENTS}}}\n</tool_call>',
    "gemma4": '<|tool_call>call:f{a:{b:[1,<|"|>x<|"|>,null]},c:true}<tool_call|>',
    "qwen3_coder": '<tool_call>\n<function=f>\n<parameter=a>\n{"b": [1, "x", null]}\n</parameter>\n'
    "<parameter=c>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "glm45": '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{"b": [1, "x", null]}</arg_value>\n'
    "<arg_key>c</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "llama4_pythonic": '[f(a={"b": [1, "x", null]}, c=true)]',
    "llama4_json": f'{{"name": "f", "parameters": {JSON_ARGUMENTS}}}',
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{JSON_ARGUMENTS}",
}
