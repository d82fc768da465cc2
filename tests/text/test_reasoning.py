"""Reasoning is told from the answer, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.pieces import parts, pieces
from windowpane.text.parsers import REASONING_PARSERS, reasoning_parser

THINK = ["<think>", "</think>", "<", "</", " ", "\n", "a", "thought", "<think", ">", "<tool_call>", "<function="]
CHANNEL = ["<|channel>", "<channel|>", "thought", "thoughtful", "\n", " ", "a", "<|", "<|tool_call>", "<channel"]


def split(name: str, prompt: str, text: str) -> tuple[str, str]:
    parser = reasoning_parser(name)(prompt)
    found = parts([*parser.push(text), *parser.finish()])
    assert not found.calls
    return found.reasoning, found.content


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nhm </b>\n</think>\n\nYes. ", "hm </b>", "Yes. "),
        ("qwen3", "", "Yes.", "", "Yes."),
        ("qwen3", "", "  Yes, in <think> tags", "", "  Yes, in <think> tags"),
        ("qwen3", "", "<think></think>Yes.", "", "Yes."),
        ("qwen3", "", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("qwen3", "", "<think>cut of", "cut of", ""),
        ("qwen3", "", "<thin", "", "<thin"),
        ("qwen3", "", "<think>a</thin", "a</thin", ""),
        ("qwen3", "…assistant\n<think>\n", "hm</think>Yes.", "hm", "Yes."),
        ("qwen3", "…assistant\n<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("qwen3", "", "<think>a <tool_call> b</think>c", "a <tool_call> b", "c"),
        ("qwen3", "<think>\n", "a\n<tool_call>\n<function=f>x</think>y", "a", "<tool_call>\n<function=f>xy"),
        ("qwen3", "<think>\n", 'a\n<tool_call>\n{"name": 1}</think>', "a", '<tool_call>\n{"name": 1}'),
        ("qwen3", "<think>\n", "a\n<tool_call>\n<function=f></thin", "a", "<tool_call>\n<function=f></thin"),
        ("glm45", "<|assistant|>", "\n<think>hm</think>\nYes.", "hm", "Yes."),
        ("glm45", "<|assistant|>\n<think></think>", "\nYes.", "", "\nYes."),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>hm<|end|>", "hm", ""),
        ("deepseek_r1", "", "hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "", "<think>\nhm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "", "never ends", "never ends", ""),
        ("gemma4", "", "<|channel>thought\nhm\n<channel|>Yes.", "hm", "Yes."),
        ("gemma4", "", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("gemma4", "", "<|channel>thoughtful<channel|>Yes.", "thoughtful", "Yes."),
        ("gemma4", "", "A<|channel>thought\nhm<channel|>B<|channel>thought\nmm<channel|>", "hmmm", "AB"),
        ("gemma4", "", "<|channel>thought\nhm\n<|tool_call>call:f{}", "hm", "<|tool_call>call:f{}"),
        ("gemma4", "", "stray<channel|> end", "", "stray end"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "hm<channel|>Yes.", "hm", "Yes."),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    ],
)
def test_thoughts_are_found(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert split(name, prompt, text) == (reasoning, content)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(data=st.data())
def test_pieces_do_not_matter(name: str, data: st.DataObject) -> None:
    text, cut = data.draw(pieces(CHANNEL if name == "gemma4" else THINK))
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<|channel>thought\n"]))
    parser = reasoning_parser(name)(prompt)
    deltas = [delta for piece in cut for delta in parser.push(piece)]
    found = parts([*deltas, *parser.finish()])
    assert (found.reasoning, found.content) == split(name, prompt, text)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parser = reasoning_parser("qwen3")("")
    assert parser.push("<think>one two") and parser.push(" three")
    assert not parser.push("</thi")
    assert not parser.push("nk>\n\n")
    assert parser.push("Y") and parser.push("es")


def test_an_unknown_name_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="no reasoning parser 'r2'; there are qwen3, deepseek_r1, glm45, gemma4"):
        reasoning_parser("r2")
