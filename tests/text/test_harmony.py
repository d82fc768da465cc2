"""gpt-oss's messages: reasoning, content and calls are told apart, and no header is spoiled enough to lose text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.pieces import Parts, parts
from tests.text.test_grammar import fits
from tests.tiny_model import EOS, make_model
from windowpane.text import Detokenizer, Tokenizer, load_tokenizer
from windowpane.text.grammar import Grammars
from windowpane.text.parsers import HarmonyParser, kept_special_ids, reasoning_parser, tool_grammar

PROMPT = "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"
WEATHER = ("get_weather", {"location": "San Francisco"})


def read(text: str, prompt: str = PROMPT, *, find_calls: bool = True) -> Parts:
    """What is found in the text, which is the same for every way to cut it in two and for single characters."""

    def run(*cut: str) -> Parts:
        parser = HarmonyParser(prompt=prompt, find_calls=find_calls)
        return parts([*(delta for piece in cut for delta in parser.push(piece)), *parser.finish()])

    found = run(text)
    assert run(*text) == found
    for at in range(len(text)):
        assert run(text[:at], text[at:]) == found
    return found


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        # As openai/harmony's docs/format.md has them; the stop token at the end is not seen.
        (
            "<|channel|>analysis<|message|>Simple arithmetic.<|end|>\n"
            "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.",
            "Simple arithmetic.",
            "2 + 2 = 4.",
            [],
        ),
        (
            "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}',
            "Need to use function get_weather.",
            "",
            [WEATHER],
        ),
        (
            "<|channel|>analysis<|message|>A plan.<|end|><|start|>assistant<|channel|>commentary<|message|>**Action "
            "plan**:\n1. Generate an HTML file<|end|><|start|>assistant<|channel|>commentary to=functions.generate_file"
            '<|constrain|>json<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
            "A plan.",
            "**Action plan**:\n1. Generate an HTML file",
            [("generate_file", {"template": "basic_html", "path": "index.html"})],
        ),
        # The recipient in the role's part of the header, at the beginning and later.
        (
            ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"location": "San Francisco"}',
            "",
            "",
            [WEATHER],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
            'json<|message|>{"location": "San Francisco"}<|call|>',
            "Hm.",
            "",
            [WEATHER],
        ),
        # Several messages of a kind, and calls to what is no function of ours.
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\nb", "", []),
        (
            '<|channel|>analysis to=browser.search<|message|>{"query": "x"}',
            "",
            "",
            [("browser.search", {"query": "x"})],
        ),
        ("<|channel|>analysis to=python<|message|>print(1)", "print(1)", "", []),
        ('<|channel|>commentary to=functions.f<|message|>{"a": ', "", '{"a": ', []),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "", "[1]", []),
        ("<|channel|>commentary to=assistant<|message|>I will look.<|end|>", "", "I will look.", []),
        ('<|start|>functions.f to=assistant<|channel|>commentary<|message|>{"sunny": true}', '{"sunny": true}', "", []),
        # Text that has no markup, or not enough.
        ("Hello there.", "", "Hello there.", []),
        ("to=the point", "", "to=the point", []),
        ("<|message|>Hello.", "", "Hello.", []),
        (
            "<|channel|>final<|message|>Write <|message|> or <|constrain|>.",
            "",
            "Write <|message|> or <|constrain|>.",
            [],
        ),
        ("<|channel|>final<|message|>a <|st", "", "a <|st", []),
        ("<|channel|>final<|message|>a<|end|> b<|return|>", "", "a\nb", []),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
        ("<|channel|>anal", "anal", "", []),
        ("<|channel|>", "", "", []),
        ("<|start|>assistant", "", "", []),
        ("", "", "", []),
    ],
)
def test_messages_are_told_apart(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    found = read(text)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        # github.com/vllm-project/vllm/issues/28262
        (
            "<|channel|>analysis<|message|>We'll call get_weather.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"latitude":48.8566,"longitude":2.3522}<|call|>',
            "We'll call get_weather.",
            "",
            [("get_weather", {"latitude": 48.8566, "longitude": 2.3522})],
        ),
        # github.com/RooCodeInc/Roo-Code/issues/6739 (gpt-oss-20b: a recipient without a namespace)
        (
            "<|start|>assistant<|channel|>commentary to=read_file <|constrain|>json<|message|>"
            '{"args":[{"file":{"path":"documentation/program_analysis.md"}}]}',
            "",
            "",
            [("read_file", {"args": [{"file": {"path": "documentation/program_analysis.md"}}]})],
        ),
        # github.com/johnbean393/Sidekick/issues/75
        (
            '<|channel|>analysis<|message|>User says "hi". We should reply politely.<|end|><|start|>assistant'
            "<|channel|>final<|message|>Hello Armando! How can I help you today?",
            'User says "hi". We should reply politely.',
            "Hello Armando! How can I help you today?",
            [],
        ),
        # github.com/ggml-org/llama.cpp/issues/27720 (gpt-oss-20b: headers that are none)
        ("<|channel|>??<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.", "Hm.", "", []),
        ("<|channel|>commentary 2?<|message|>Text.", "2?", "Text.", []),
        ("<|channel|>commentary to=assistant<|channel|>commentary?commentary?<|message|>Text.", "", "Text.", []),
        # github.com/openai/harmony/issues/38
        ("<|channel|>––commentary<|message|>Text.", "", "Text.", []),
        # github.com/openai/harmony/pull/114 (gpt-oss-120b)
        (
            "<|start|>assistant<|channel|>bash<|channel|>commentary to=functions.bash<|message|>{}<|call|>",
            "bash",
            "",
            [("bash", {})],
        ),
        ("<|channel|>analysis<|constrain|>commentary to=functions.bash<|message|>{}", "", "", [("bash", {})]),
        (
            "<|channel|>commentary<|constrain|>control<|end|><|start|>assistant<|channel|>final<|message|>Done.",
            "",
            "Done.",
            [],
        ),
        # github.com/tenstorrent/vllm/issues/386
        ("<|start|>assistantassistant<|channel|>final<|message|>Yes.", "", "Yes.", []),
        ("<|start|><|start|>assistant<|channel|>final<|message|>Yes.", "", "Yes.", []),
        # github.com/avalan-ai/avalan, README: it goes on after a call
        (
            "<|channel|>analysis<|message|>Use memory.read.<|end|><|start|>assistant<|channel|>commentary to=functions."
            'memory.read <|constrain|>json<|message|>{"namespace":"games"}<|call|>'
            "<|channel|>analysis<|message|>We have it.",
            "Use memory.read.\nWe have it.",
            "",
            [("memory.read", {"namespace": "games"})],
        ),
    ],
)
def test_what_gpt_oss_wrote_is_read(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    found = read(text)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


def test_without_tools_the_text_of_a_call_is_text() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    found = read(text, find_calls=False)
    assert (found.reasoning, found.content, found.calls) == ("Hm.", "{}", [])
    parser = reasoning_parser("openai_gptoss")(PROMPT)
    assert parts([*parser.push(text), *parser.finish()]) == found


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<|channel|>final<|message|>Yes.", "", "Yes."),
        (
            PROMPT + "<|channel|>analysis<|message|>We",
            " see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            " see.",
            "Yes.",
        ),
        (PROMPT + "<|channel|>final<|message|>It", " is.", "", " is."),
        (PROMPT + "<|channel|>", "final<|message|>Yes.", "", "Yes."),
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>assistant<|channel|>final<|message|>Yes.", "", "Yes."),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, text: str, reasoning: str, content: str) -> None:
    found = read(text, prompt)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parser = HarmonyParser(prompt=PROMPT)
    assert not parser.push("<|channel|>analysis") and not parser.push("<|message|>")
    assert parser.push("one") and parser.push(" two")
    assert not parser.push("<|e") and parser.push("x")
    assert parser.push("<|end|><|start|>assistant<|channel|>final<|message|>Yes")


def test_a_header_without_end_is_given_up() -> None:
    parser = HarmonyParser(prompt=PROMPT)
    deltas = [delta for _ in range(400) for delta in parser.push("cosmos ")]
    assert deltas and parser.push("more")
    spoiled = "<|channel|>" + "cosmos " * 400
    found = parts([*HarmonyParser(prompt=PROMPT).push(spoiled)])
    assert found.reasoning.count("cosmos") >= 398


MARKUP = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    " to=functions.f",
]


@given(st.lists(st.sampled_from([*MARKUP, "assistant", "analysis", "final", " w1 ", "w2", "{}", "\n"]), max_size=14))
def test_no_word_is_lost(words: list[str]) -> None:
    """Whatever the markup, a word that means nothing in it is given out; but for what `<|constrain|>` announces."""
    text = "".join(words)
    for announced in ("<|constrain|>w2", "<|constrain|> w1", "functions.fw2", "functions.f{}"):
        text = text.replace(announced, "")
    parser = HarmonyParser(prompt=PROMPT)
    found = parts([*parser.push(text), *parser.finish()])
    shown = found.reasoning + found.content
    for word in ("w1", "w2"):
        assert shown.count(word) == text.count(word)


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Single bytes, and Harmony's markers as special tokens. The config names `<|end|>` as its only stop."""
    end_id = EOS + 1 + HarmonyParser.markers.index("<|end|>")
    path = tmp_path_factory.mktemp("models") / "tiny"
    return load_tokenizer(make_model(path, special_tokens=HarmonyParser.markers, eos_token_id=end_id))


def test_return_and_call_stop_and_the_end_of_a_message_does_not(tokenizer: Tokenizer) -> None:
    stops = {tokenizer.token_id(token) for token in ("<eos>", "<|return|>", "<|call|>")}
    assert tokenizer.stop_ids == stops


def test_markers_are_seen_by_the_parser_and_by_nobody_else(tokenizer: Tokenizer) -> None:
    parser = HarmonyParser(prompt=PROMPT)
    detokenizer = Detokenizer(tokenizer, kept_special_ids=kept_special_ids(tokenizer, parser.markers))
    text = "<|channel|>analysis<|message|>é<|end|><|start|>assistant<bos><|channel|>final<|message|>世界<eos>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    deltas = [delta for token in tokens for delta in parser.push(detokenizer.push(token))]
    found = parts([*deltas, *parser.finish()])
    assert (found.reasoning, found.content) == ("é", "世界")


def test_a_format_holds_for_the_final_message(tokenizer: Tokenizer) -> None:
    grammar = Grammars(tokenizer).after(HarmonyParser(prompt=PROMPT).thought).choice(["yes", "no"])
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert fits(grammar, f"{thought}<|channel|>final<|message|>yes", tokenizer)
    assert fits(grammar, "<|channel|>final<|message|>no", tokenizer)
    for wrong in ("yes", f"{thought}yes", "<|channel|>final<|message|>Hm", "<|channel|>analysis<|message|>yes"):
        assert not fits(grammar, wrong, tokenizer)


def test_a_call_that_is_forced_may_follow_a_thought(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    grammars = Grammars(tokenizer).after(HarmonyParser(prompt=PROMPT).thought)
    grammar = tool_grammar(grammars, "openai", tools, function="now")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert fits(grammar, call, tokenizer) and fits(grammar, thought + call, tokenizer)
    assert not fits(grammar, thought + "<|channel|>final<|message|>{}", tokenizer)
    assert read(thought + call).calls == [("now", {})]
