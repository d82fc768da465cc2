"""Harmony, the form in which gpt-oss answers: messages on channels, with headers (openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>…<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                    content: what it is about to do
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                      content

The prompt ends with `<|start|>assistant`, so that an answer begins in the middle of a header. The recipient may also
stand in front of the channel. `<|return|>` and `<|call|>` end an answer and are not seen here.

Models spoil headers (openai/harmony#38, ggml-org/llama.cpp#27720). A recipient or a channel is taken from wherever it
stands, words that are neither are reasoning, and an answer without any markup is content: nothing fails or is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windowpane.text.grammar import Thought
from windowpane.text.parsers.deltas import Content, Delta, Reasoning, first_open
from windowpane.text.parsers.literals import refuse_constant
from windowpane.text.parsers.tools import Tool, call_deltas

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
NEXT_MESSAGE = f"{END}{START}assistant"
# A header that is longer is none.
MAX_HEADER_CHARACTERS = 1024

_ENDS_BODY = (START, CHANNEL, END, RETURN, CALL)
_BODY_END = re.compile("|".join(map(re.escape, _ENDS_BODY)))
_HEADER_END = re.compile("|".join(map(re.escape, (START, MESSAGE, END, RETURN, CALL))))
_ROLE = re.compile(r"\s*(?:(assistant)|system|developer|user|tool|functions\.[^\s<]+)+(?![A-Za-z])\s*")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CONTENT_TYPE = re.compile(re.escape(CONSTRAIN) + r"\s*[^\s<]*|(?<!\S)(?:json|code)(?!\S)")
_CHANNEL = re.compile(r"(?<![A-Za-z])(analysis|commentary|final)(?![A-Za-z])")
_NOBODY = ("assistant", "user", "all")  # recipients that are no functions


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. `rest` are the words that mean nothing."""

    kind: type[Content] | type[Reasoning]
    recipient: str | None
    rest: str


def read_header(text: str) -> Header:
    is_assistant = True
    if text.startswith(START):
        text = text.removeprefix(START)
        role = _ROLE.match(text)
        if role is not None:
            is_assistant, text = role[1] is not None, text[role.end() :]
    recipients = _RECIPIENT.findall(text)
    text = _CONTENT_TYPE.sub(" ", _RECIPIENT.sub(" ", text).replace(CHANNEL, f" {CHANNEL} "))
    channels = _CHANNEL.findall(text)
    rest = " ".join(_CHANNEL.sub(" ", text.replace(CHANNEL, " ").replace(CONSTRAIN, " ")).split())
    is_reasoning = channels[-1:] == ["analysis"] or not is_assistant
    recipient = next((name for name in recipients if name not in _NOBODY), None)
    has_words = any(character.isalnum() for character in rest)
    return Header(Reasoning if is_reasoning else Content, recipient, rest if has_words else "")


class HarmonyParser:
    """Reads one answer to `prompt`. Without `find_calls` the text of a call is text like other."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)

    def __init__(self, tools: Sequence[Tool] = (), *, prompt: str = "", find_calls: bool = True) -> None:
        self._find_calls = find_calls
        self._calls = 0
        self._text = ""  # what cannot be told yet
        self._looked_at = 0
        self._kind: type[Content] | type[Reasoning] = Content
        self._name = ""
        self._step: Callable[[list[Delta], bool], bool] = self._outside
        self._shown: set[type[Content] | type[Reasoning]] = set()
        self._is_new_message = True
        self._continue(prompt)

    def _continue(self, prompt: str) -> None:
        """Go to where the prompt ends: usually behind the first words of a header."""
        begun_at = prompt.rfind(START)
        self.push(prompt[begun_at:] if begun_at >= 0 else "")
        if self._step == self._header and _ROLE.fullmatch(self._text.removeprefix(START)):
            self._text, self._step = "", self._outside
        in_thought = self._step == self._body and self._kind is Reasoning
        in_answer = self._step == self._body and self._kind is Content
        self.thought = None if in_answer else Thought(ANALYSIS, NEXT_MESSAGE, in_thought, FINAL)
        self._shown, self._is_new_message, self._calls = set(), True, 0

    def push(self, text: str) -> list[Delta]:
        held, self._text = self._text, ""  # a text with one owner grows in place
        held += text
        self._text = held
        return self._run(is_last=False)

    def finish(self) -> list[Delta]:
        """What was held back when the answer ended. The message that it ended in is whole: its end was a stop."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._step(deltas, is_last):
            pass
        return deltas

    # -- states: each takes what it can off the text, and says whether the next one may go on ----------------------

    def _outside(self, deltas: list[Delta], is_last: bool) -> bool:
        """Between messages, where white space means nothing."""
        self._text = text = self._text.lstrip()
        if not text:
            return False
        if not is_last and any(word != text and word.startswith(text) for word in (*self.markers, "to=")):
            return False
        if text.startswith((END, RETURN, CALL)):
            self._text = text[text.index(">") + 1 :]
        elif text.startswith((START, CHANNEL, CONSTRAIN, "to=")):
            self._step = self._header
        else:
            self._text = text.removeprefix(MESSAGE)
            self._open(Content)
        return True

    def _header(self, deltas: list[Delta], is_last: bool) -> bool:
        found = _HEADER_END.search(self._text, 1, MAX_HEADER_CHARACTERS)
        if found is None:
            is_too_long = len(self._text) >= MAX_HEADER_CHARACTERS
            if not is_last and not is_too_long:
                return False
            self._spoiled(deltas, self._text[:MAX_HEADER_CHARACTERS])
            self._text = self._text[MAX_HEADER_CHARACTERS:]
            self._step = self._body if is_too_long else self._outside
            return is_too_long
        header = read_header(self._text[: found.start()])
        if found[0] == MESSAGE:
            self._show(deltas, Reasoning, header.rest)
            self._open(header.kind, header.recipient)
        else:
            self._spoiled(deltas, self._text[: found.start()])
            self._step = self._outside
        self._text = self._text[found.start() if found[0] == START else found.end() :]
        return True

    def _spoiled(self, deltas: list[Delta], header: str) -> None:
        """A header without a message. If it has no markup either, it was text."""
        is_text = not any(marker in header for marker in self.markers)
        self._open(Content if is_text else Reasoning)
        self._show(deltas, self._kind, header if is_text else read_header(header).rest)

    def _open(self, kind: type[Content] | type[Reasoning], recipient: str | None = None) -> None:
        self._kind = kind
        self._is_new_message = True
        self._looked_at = 0
        self._step = self._body
        if recipient is not None and self._find_calls:
            self._name = recipient.removeprefix("functions.")
            self._step = self._call

    def _body(self, deltas: list[Delta], is_last: bool) -> bool:
        found = _BODY_END.search(self._text)
        if found is None:
            sure = len(self._text) if is_last else min(first_open(self._text, marker) for marker in _ENDS_BODY)
            self._show(deltas, self._kind, self._text[:sure])
            self._text = self._text[sure:]
            return False
        self._show(deltas, self._kind, self._text[: found.start()])
        self._text = self._text[found.start() :]
        self._step = self._outside
        return True

    def _call(self, deltas: list[Delta], is_last: bool) -> bool:
        """Arguments are given out once they are whole; what is no JSON object is text on its channel."""
        found = _BODY_END.search(self._text, self._looked_at)
        if found is None and not is_last:
            self._looked_at = max(0, len(self._text) - max(map(len, _ENDS_BODY)) + 1)
            return False
        end = len(self._text) if found is None else found.start()
        arguments = self._text[:end].strip()
        if self._name and _is_object(arguments):
            deltas += call_deltas(self._calls, (self._name, arguments))
            self._calls += 1
        else:
            self._show(deltas, self._kind, self._text[:end])
        self._text = self._text[end:]
        self._step = self._outside
        return True

    def _show(self, deltas: list[Delta], kind: type[Content] | type[Reasoning], text: str) -> None:
        """Give text out. Messages of one kind are told apart by a line break."""
        if text:
            is_next = self._is_new_message and kind in self._shown
            deltas.append(kind("\n" + text if is_next else text))
            self._is_new_message = False
            self._shown.add(kind)


def _is_object(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
        text.encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
