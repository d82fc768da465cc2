"""Reasoning: what a model writes for itself between two markers, told apart from its answer.

Two forms. Qwen3, GLM-4.5, DeepSeek R1 and many others write `<think>…</think>` once, in front of the answer; Qwen3.5
sometimes calls a tool before it has ended a thought (vllm-project/vllm#39056). Gemma 4 writes
`<|channel>thought\\n…<channel|>`, in front of the answer and of tool calls; the markers are special tokens, and a tool
call also ends a thought (Google's "Gemma 4 Prompt Formatting", ai.google.dev/gemma/docs/core/prompt-formatting-gemma4;
the chat template of google/gemma-4-31B-it; vLLM's gemma4 parser). gpt-oss has channels: see `harmony`.

Templates may write the first marker into the prompt. So a parser is given the prompt, and looks how it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from windowpane.text.grammar import Thought
from windowpane.text.parsers.deltas import Content, Delta, Parser, Reasoning, first_open
from windowpane.text.parsers.harmony import HarmonyParser


@dataclass(frozen=True, slots=True)
class Form:
    """How a family marks its thoughts.

    `label` may follow `start` and is no part of the thought. `in_front`: only what an answer begins with is a thought.
    `always_open`: answers begin in the middle of one, whatever the prompt says. `also_ends` is what calls begin with,
    which end a thought too.
    """

    start: str
    end: str
    label: str = ""
    in_front: bool = True
    always_open: bool = False
    also_ends: tuple[str, ...] = ()

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside a thought."""
        begun = prompt.rstrip().removesuffix(self.label) if self.label else prompt.rstrip()
        return self.always_open or begun.endswith(self.start)


# As templates write calls, to the letter: a thought may well speak of the tag.
_QWEN_CALLS = ("<tool_call>\n<function=", '<tool_call>\n{"name"')
_FORMS = {
    "qwen3": Form("<think>", "</think>", also_ends=_QWEN_CALLS),
    "deepseek_r1": Form("<think>", "</think>", always_open=True),
    "glm45": Form("<think>", "</think>"),
    "gemma4": Form("<|channel>", "<channel|>", label="thought", in_front=False, also_ends=("<|tool_call>",)),
}
HARMONY_REASONING = "openai_gptoss"
REASONING_PARSERS = (*_FORMS, HARMONY_REASONING)


class ThoughtParser(Parser, Protocol):
    """A parser that also knows what thought may stand in front of a constrained answer."""

    thought: Thought | None


def reasoning_parser(name: str) -> Callable[[str], ThoughtParser]:
    """Makes parsers of this name (one of `REASONING_PARSERS`), each for one answer, from the prompt it answers."""
    if name == HARMONY_REASONING:
        return lambda prompt: HarmonyParser(prompt=prompt, find_calls=False)
    form = _FORMS.get(name)
    if form is None:
        raise ValueError(f"there is no reasoning parser {name!r}; there are {', '.join(REASONING_PARSERS)}")
    return lambda prompt: ReasoningParser(form, prompt)


class ReasoningParser:
    """Splits one answer to `prompt`. White space around a thought belongs to neither side and is left out."""

    def __init__(self, form: Form, prompt: str) -> None:
        self.form = form
        is_open = form.is_open_after(prompt)
        self.thought: Thought | None = Thought(form.start, form.end, is_open)
        self.markers = (form.start, form.end)
        self._text = ""  # what cannot be told yet
        self._step: Callable[[list[Delta], bool], bool] = self._opened if is_open else self._outside
        self._content_begun = False
        self._after_space = False  # white space that comes next is left out
        self._end_is_due = False  # a call came before the end of a thought, which means nothing any more

    def push(self, text: str) -> list[Delta]:
        self._text += text
        return self._run(is_last=False)

    def finish(self) -> list[Delta]:
        """What was held back when the answer ended. A thought that was not ended is one all the same."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._step(deltas, is_last):
            pass
        return deltas

    # -- states: each takes what it can off the text, and says whether the next one may go on ------------------------

    def _outside(self, deltas: list[Delta], is_last: bool) -> bool:
        if self.form.in_front:
            return self._front(deltas, is_last)
        at, marker = _find(self._text, self.markers)
        if marker is None:
            self._show(deltas, Content, len(self._text) if is_last else at)
            return False
        self._show(deltas, Content, at)
        self._text = self._text[len(marker) :]
        if marker == self.form.start:
            self._step = self._label  # an end without a beginning is dropped: it is a token, and no text
        return True

    def _front(self, deltas: list[Delta], is_last: bool) -> bool:
        """Only an answer's first word can begin a thought."""
        if self._end_is_due:
            return self._due(deltas, is_last)
        stripped = self._text.lstrip()
        if not self._content_begun and stripped.startswith(self.form.start):
            self._text = stripped[len(self.form.start) :]
            self._step = self._label
            return True
        if is_last or self._content_begun or not self.form.start.startswith(stripped):
            self._content_begun = True
            self._show(deltas, Content, len(self._text))
        return False

    def _due(self, deltas: list[Delta], is_last: bool) -> bool:
        at, marker = _find(self._text, (self.form.end,))
        self._show(deltas, Content, len(self._text) if is_last and marker is None else at)
        if marker is not None:
            self._text = self._text[len(marker) :]
            self._end_is_due = False
        return marker is not None

    def _opened(self, deltas: list[Delta], is_last: bool) -> bool:
        """At the beginning of an answer inside a thought. Some models write the marker all the same."""
        stripped = self._text.lstrip()
        if not is_last and stripped != self.form.start and self.form.start.startswith(stripped):
            return False
        if stripped.startswith(self.form.start):
            self._text = stripped[len(self.form.start) :]
        self._step = self._label
        return True

    def _label(self, deltas: list[Delta], is_last: bool) -> bool:
        label, text = self.form.label, self._text
        if label and not is_last and (label.startswith(text) or text == label):
            return False  # wait for what comes after it
        if label and text.startswith(label) and text[len(label) : len(label) + 1] in ("", "\n", " ", "<"):
            self._text = text[len(label) :]
        self._after_space = True
        self._step = self._inside
        return True

    def _inside(self, deltas: list[Delta], is_last: bool) -> bool:
        at, marker = _find(self._text, (self.form.end, *self.form.also_ends))
        if marker is None:
            sure = len(self._text) if is_last else at
            self._show(deltas, Reasoning, len(self._text[:sure].rstrip()))
            return False
        self._show(deltas, Reasoning, len(self._text[:at].rstrip()))
        self._text = self._text.lstrip()
        if marker == self.form.end:
            self._text = self._text[len(marker) :]
        else:
            self._end_is_due = self.form.in_front
        self._content_begun = True
        self._after_space = True
        self._step = self._outside
        return True

    def _show(self, deltas: list[Delta], kind: type[Content] | type[Reasoning], count: int) -> None:
        """Take `count` characters off the text and give them out."""
        shown, self._text = self._text[:count], self._text[count:]
        if self._after_space:
            shown = shown.lstrip()
        if shown:
            self._after_space = False
            deltas.append(kind(shown))


def _find(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """The first of these markers and where it is; or None, and up to where there is surely none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        return min(found)
    return min(first_open(text, marker) for marker in markers), None
