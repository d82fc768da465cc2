"""The forms of Qwen3-Coder, GLM-4.5 and Llama 4: their values, what models make of them, and what must not break."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.text.pieces import Parts, parts
from windowpane.text.parsers import OutputParser, reasoning_parser, tool_parser


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "$defs": {"note": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool(
        "f",
        text=TEXT,
        number=NUMBER,
        ratio={"type": "number"},
        flag={"type": "boolean"},
        maybe={"anyOf": [TEXT, {"type": "null"}]},
        either={"type": ["string", "integer"]},
        things={"type": "array"},
        choice={"enum": ["a", 3]},
        note={"$ref": "#/$defs/note"},
        loop={"$ref": "#/$defs/loop"},
    ),
    tool("g"),
]


def read(name: str, text: str, tools: Any = (), reasoning: str | None = None, prompt: str = "") -> Parts:
    """What is found in the text, which is the same for every way to cut it in two and for single characters."""

    def run(*cut: str) -> Parts:
        parser = OutputParser(
            None if reasoning is None else reasoning_parser(reasoning)(prompt), tool_parser(name)(tools)
        )
        return parts([*(delta for piece in cut for delta in parser.push(piece)), *parser.finish()])

    found = run(text)
    assert run(*text) == found
    for at in range(len(text)):
        assert run(text[:at], text[at:]) == found
    return found


def qwen(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    return f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "3", "3"),
        ("text", "null", "null"),
        ("text", ' "quoted" ', ' "quoted" '),
        ("text", "", ""),
        ("text", "two\n\nlines", "two\n\nlines"),
        ("text", "</b> & \\n é 世界 🎉", "</b> & \\n é 世界 🎉"),
        ("number", "3", 3),
        ("number", " 3 ", 3),
        ("number", "3.0", 3),
        ("number", "three", "three"),
        ("number", "null", "null"),
        ("ratio", "3", 3),
        ("ratio", "NaN", "NaN"),
        ("ratio", "1e999", "1e999"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "nobody", "nobody"),
        ("either", "3", 3),
        ("either", "3.5", "3.5"),
        ("things", '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ("things", "[1,", "[1,"),
        ("things", '["\\ud800"]', '["\\ud800"]'),
        ("things", "[" * 2000, "[" * 2000),
        ("choice", "a", "a"),
        ("choice", "3", 3),
        ("note", "3", "3"),
        ("loop", "3", 3),
        ("undeclared", "3", 3),
        ("undeclared", "None", "None"),
        ("undeclared", "some text", "some text"),
    ],
)
def test_values_are_read_by_the_schema(name: str, key: str, text: str, value: Any) -> None:
    call = qwen(key, text) if name == "qwen3_coder" else glm(key, text)
    parser = tool_parser(name)(TOOLS)
    found = parts([*parser.push(call), *parser.finish()])
    assert (found.calls, found.content) == ([("f", {key: value})], "")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        # A value may hold anything but its last tag with another tag behind it.
        (qwen("text", "<parameter=x> </parameter> </b>"), [("f", {"text": "<parameter=x> </parameter> </b>"})], ""),
        (qwen("text", "</function></tool_call>"), [("f", {"text": "</function></tool_call>"})], ""),
        (qwen("text", "<tool_call>"), [("f", {"text": "<tool_call>"})], ""),
        # Tags that models forget: the first one, and any of the last.
        (qwen("number", "1").removeprefix("<tool_call>\n"), [("f", {"number": 1})], ""),
        (qwen("number", "1").removesuffix("\n</tool_call>"), [("f", {"number": 1})], ""),
        (qwen("number", "1").replace("</function>\n", ""), [("f", {"number": 1})], ""),
        ("<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>", [("f", {}), ("g", {})], ""),
        ("<function=f></function>and", [("f", {})], "and"),
        # What is no call is text in full.
        ("Write <tool_call> or <function=f> here.", [], "Write <tool_call> or <function=f> here."),
        ("<function=f", [], "<function=f"),
        ("<function=></function>", [], "<function=></function>"),
        (f"<function={'f' * 300}></function>", [], f"<function={'f' * 300}></function>"),
        (f"<function=f><parameter={'k' * 300}>", [], f"<function=f><parameter={'k' * 300}>"),
        (f"A {qwen('text', 'x')[:-40]} B", [], f"A {qwen('text', 'x')[:-40]} B"),
        ("<function=f><parameter=a>\nx", [], "<function=f><parameter=a>\nx"),
        ("<tool_call>" * 3 + "<function=f>" * 2 + "</function>", [("f", {})], "<tool_call>" * 3 + "<function=f>"),
    ],
)
def test_qwen3_coder(text: str, calls: list[Any], content: str) -> None:
    found = read("qwen3_coder", text, TOOLS)
    assert (found.calls, found.content) == (calls, content)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (glm("text", "a</arg_value>b"), [("f", {"text": "a</arg_value>b"})], ""),
        (glm("text", "</tool_call>"), [("f", {"text": "</tool_call>"})], ""),
        (glm("number", "1").replace("\n", ""), [("f", {"number": 1})], ""),
        ("<tool_call>g</tool_call>", [("g", {})], ""),
        ("<tool_call>g\n</tool_call>\n\n<tool_call> g</tool_call>", [("g", {}), ("g", {})], ""),
        ("<tool_call></tool_call>", [], "<tool_call></tool_call>"),
        ("<tool_call>f g</tool_call>", [], "<tool_call>f g</tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call>', [], '<tool_call>{"name": "f"}</tool_call>'),
        (glm("text", "x")[:-5], [], glm("text", "x")[:-5]),
        ("<tool_call>f<arg_key></arg_key>", [], "<tool_call>f<arg_key></arg_key>"),
        ("<tool_call>f<arg_key>a</arg_key>x", [], "<tool_call>f<arg_key>a</arg_key>x"),
    ],
)
def test_glm45(text: str, calls: list[Any], content: str) -> None:
    found = read("glm45", text, TOOLS)
    assert (found.calls, found.content) == (calls, content)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("[f(number=1), g()]", [("f", {"number": 1}), ("g", {})], ""),
        ("Let me see.\n\n[g()]", [("g", {})], "Let me see."),
        ("<|python_start|>[g()]<|python_end|>", [("g", {})], ""),
        ("<|python_start|> [g()] ", [("g", {})], ""),
        ("<|python_start|>[other(x=1)]", [("other", {"x": 1})], ""),
        (
            r"[f(text='it\'s', note='a \"b\" \n \u00e9 \ud83c\udf89 \q')]",
            [("f", {"text": "it's", "note": 'a "b" \n é 🎉 \\q'})],
            "",
        ),
        ('[f(text="a ) ] \' b")]', [("f", {"text": "a ) ] ' b"})], ""),
        ("[f(text='two\nlines')]", [("f", {"text": "two\nlines"})], ""),
        (
            "[f(things=[1, -2.5, {'a': True, \"b\": None}], flag=false, maybe=null,)]",
            [],
            "[f(things=[1, -2.5, {'a': True, \"b\": None}], flag=false, maybe=null,)]",
        ),
        (
            "[f(things=[1, -2.5, {'a': True, \"b\": None}], flag=false, maybe=null)]",
            [("f", {"things": [1, -2.5, {"a": True, "b": None}], "flag": False, "maybe": None})],
            "",
        ),
        ('{"name": "f", "parameters": {"number": 1}}', [("f", {"number": 1})], ""),
        ('{"type": "function", "name": "g", "parameters": {}}', [("g", {})], ""),
        ('{"type": "function", "function": {"name": "g", "arguments": {}}}', [("g", {})], ""),
        ('[{"name": "g"}, {"name": "f", "arguments": {"text": "]"}}]', [("g", {}), ("f", {"text": "]"})], ""),
        ('<|python_start|>{"name": "g", "parameters": {}}<|python_end|>', [("g", {})], ""),
        # The form alone does not make a call: these name no tool, or are code, links and lists.
        ("[other(x=1)]", [], "[other(x=1)]"),
        ('{"name": "Bob", "parameters": {}}', [], '{"name": "Bob", "parameters": {}}'),
        ("[link](a), [1, 2], {}, {x}, [f(a)], [f], f(x=1)", [], "[link](a), [1, 2], {}, {x}, [f(a)], [f], f(x=1)"),
        ("<|python_start|>import os<|python_end|>", [], "<|python_start|>import os<|python_end|>"),
        ("[f(number=1", [], "[f(number=1"),
        ("[f(text='it's')]", [], "[f(text='it's')]"),
        ("[f(number=1, number=2)]", [], "[f(number=1, number=2)]"),
        ("[f(number=1e999)]", [], "[f(number=1e999)]"),
        ("[f(text='\\ud800')]", [], "[f(text='\\ud800')]"),
        ("[f(number=1}", [], "[f(number=1}"),
        ('{"name": "f", "parameters": {"number": 1}', [], '{"name": "f", "parameters": {"number": 1}'),
        ("[f(things=" + "[" * 300 + ")]", [], "[f(things=" + "[" * 300 + ")]"),
    ],
)
def test_llama4(text: str, calls: list[Any], content: str) -> None:
    found = read("llama4_pythonic", text, TOOLS)
    assert (found.calls, found.content) == (calls, content)


def test_a_nesting_that_is_too_deep_is_text() -> None:
    text = "[f(things=" + "[" * 100_000 + "]" * 100_000 + ")]"
    parser = tool_parser("llama4_pythonic")(TOOLS)
    found = parts([*parser.push(text), *parser.finish()])
    assert (found.calls, found.content) == ([], text)


# -- sizes -----------------------------------------------------------------------------------------------------------

BIG = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {"text": "', '"}}</tool_call>'),
    "gemma4": ('<|tool_call>call:f{text:<|"|>', '<|"|>}<tool_call|>'),
    "qwen3_coder": ("<tool_call><function=f><parameter=text>", "</parameter></function></tool_call>"),
    "glm45": ("<tool_call>f<arg_key>text</arg_key><arg_value>", "</arg_value></tool_call>"),
    "llama4_pythonic": ("[f(text='", "')]"),
    "llama4_json": ('{"name": "f", "parameters": {"text": "', '"}}'),
    "openai": ('<|channel|>commentary to=functions.f<|message|>{"text": "', '"}<|call|>'),
}


@pytest.mark.parametrize("name", BIG)
def test_a_large_argument_takes_linear_time(name: str) -> None:
    """Four times as much text takes about four times as long; read over and over it would take sixteen."""
    before, behind = BIG[name]

    def seconds(count: int) -> float:
        parser = tool_parser(name)(TOOLS)
        begun = time.process_time()
        deltas = parser.push(before)
        for _ in range(count):
            deltas += parser.push("word ")
        deltas += [*parser.push(behind), *parser.finish()]
        spent = time.process_time() - begun
        assert parts(deltas).calls == [("f", {"text": "word " * count})]
        return spent

    small, large = min(seconds(20_000) for _ in range(3)), min(seconds(80_000) for _ in range(3))
    assert large < 9 * small


@pytest.mark.parametrize("name", BIG)
def test_two_hundred_calls(name: str) -> None:
    before, behind = BIG[name]
    text = "\n".join(f"{before}{i} é{behind}" for i in range(200))
    parser = tool_parser(name)(TOOLS)
    deltas = [delta for at in range(0, len(text), 7) for delta in parser.push(text[at : at + 7])]
    found = parts([*deltas, *parser.finish()])
    assert (found.calls, found.content) == ([("f", {"text": f"{i} é"}) for i in range(200)], "")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "llama4_pythonic", "openai"])
@pytest.mark.parametrize(
    "word", ["<tool_call>", "<function=f>", "</parameter>", "[", "{", "[f(", "<|message|>", "<|start|>"]
)
def test_markers_without_end_take_no_time(name: str, word: str) -> None:
    text = BIG[name][0] + word * 20_000
    begun = time.process_time()
    parser = tool_parser(name)(TOOLS)
    found = parts([*parser.push(text), *parser.finish()])
    assert time.process_time() - begun < 5 and not found.calls


# -- what models wrote -----------------------------------------------------------------------------------------------

DIRECTORY = tool("list_directory", path=TEXT)
WRITTEN: list[tuple[str, str, str | None, str, list[Any], str]] = [
    # github.com/vllm-project/vllm/issues/22975 (Qwen3-Coder-480B)
    (
        "qwen3_coder",
        "Let me check if there might be a base.py file.\n\n<tool_call>\n<function=GrepTool>\n<parameter=pattern>\n"
        "class BaseService\\(\n</parameter>\n<parameter=path>\n.\n</parameter>\n</function>\n</tool_call>",
        None,
        "",
        [("GrepTool", {"pattern": "class BaseService\\(", "path": "."})],
        "Let me check if there might be a base.py file.",
    ),
    # github.com/ollama/ollama/issues/16686 (qwen3-coder:30b forgets the first tag)
    (
        "qwen3_coder",
        "<function=Read>\n<parameter=file_path>\n/path/to/the/file.md\n</parameter>\n</function>\n</tool_call>",
        None,
        "",
        [("Read", {"file_path": "/path/to/the/file.md"})],
        "",
    ),
    # github.com/vitali87/code-graph-rag/issues/236 (qwen3-coder:30b, on one line)
    (
        "qwen3_coder",
        "<function=list_directory><parameter=path>/tmp</parameter></function></tool_call>",
        None,
        "",
        [("list_directory", {"path": "/tmp"})],
        "",
    ),
    # github.com/pwilkin/llama.cpp/issues/9 (Qwen3-Coder-Next, two calls)
    (
        "qwen3_coder",
        '<tool_call>\n<function=bash>\n<parameter=command>\ntest -d .planning && echo "exists" || echo "missing"\n'
        "</parameter>\n<parameter=description>\nCheck if planning directory exists\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=read>\n<parameter=filePath>\n.planning/STATE.md\n</parameter>\n"
        "</function>\n</tool_call>",
        None,
        "",
        [
            (
                "bash",
                {
                    "command": 'test -d .planning && echo "exists" || echo "missing"',
                    "description": "Check if planning directory exists",
                },
            ),
            ("read", {"filePath": ".planning/STATE.md"}),
        ],
        "",
    ),
    # github.com/vllm-project/vllm/issues/39056 (Qwen3.5-35B-A3B calls inside a thought)
    (
        "qwen3_coder",
        "So it is.\n<tool_call>\n<function=Finish>\n<parameter=answer>\n204\n</parameter>\n</function>\n</tool_call>\n"
        "</think>\n",
        "qwen3",
        "So it is.",
        [("Finish", {"answer": 204})],
        "",
    ),
    # github.com/alibaba/rtp-llm/pull/525 (GLM-4.6)
    (
        "glm45",
        "<tool_call>get_current_weather\n<arg_key>location</arg_key>\n<arg_value>杭州</arg_value>\n</tool_call>",
        None,
        "",
        [("get_current_weather", {"location": "杭州"})],
        "",
    ),
    # github.com/vllm-project/vllm/issues/44326 (GLM-4.7, no arguments)
    ("glm45", "<tool_call>get_current_time</tool_call>", None, "", [("get_current_time", {})], ""),
    # github.com/zai-org/GLM-5/issues/84 (on one line)
    (
        "glm45",
        "<tool_call>read<arg_key>filePath</arg_key><arg_value>/home/linj/wk/ebay_exam</arg_value></tool_call>",
        None,
        "",
        [("read", {"filePath": "/home/linj/wk/ebay_exam"})],
        "",
    ),
    # github.com/vllm-project/vllm/issues/22917 (Llama 4, calls at once)
    (
        "llama4_pythonic",
        '[get_todays_date(), get_weather(location="Dublin, Ireland", date="2025-04-14")]',
        None,
        "",
        [("get_todays_date", {}), ("get_weather", {"location": "Dublin, Ireland", "date": "2025-04-14"})],
        "",
    ),
    # github.com/vllm-project/vllm/issues/16214 (Llama 4, JSON between markers)
    (
        "llama4_json",
        '<|python_start|>{"name": "brave_web_search", "parameters": {"query": "latest news"}}<|python_end|>',
        None,
        "",
        [("brave_web_search", {"query": "latest news"})],
        "",
    ),
    # github.com/vllm-project/vllm/issues/46863 (Llama-4-Scout, JSON alone)
    (
        "llama4_pythonic",
        '{"type": "function", "name": "Bash", "parameters": {"command": "echo hello", "timeout": 120000}}',
        None,
        "",
        [("Bash", {"command": "echo hello", "timeout": 120000})],
        "",
    ),
    # The form that github.com/ROCm/ATOM/pull/1427 describes (Qwen3-8B), behind a thought
    (
        "hermes",
        '<think>\nA tool.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        "qwen3",
        "A tool.",
        [("get_weather", {"city": "Oslo"})],
        "",
    ),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "thought", "calls", "content"), WRITTEN)
def test_what_models_wrote_is_read(
    name: str, text: str, reasoning: str | None, thought: str, calls: list[Any], content: str
) -> None:
    prompt = "<think>\n" if reasoning and not text.startswith("<think>") else ""
    found = read(name, text, (), reasoning, prompt)
    assert (found.reasoning, found.calls, found.content) == (thought, calls, content)


def test_glm45_thinks_after_a_line_break() -> None:
    text = f"\n<think>Where?</think>\n{glm('text', 'x')}"
    found = read("glm45", text, TOOLS, "glm45")
    assert (found.reasoning, found.calls, found.content) == ("Where?", [("f", {"text": "x"})], "")
