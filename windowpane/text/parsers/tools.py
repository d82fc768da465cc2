"""Tool calls in a model's text: found between their markers, checked, and given out as JSON.

Two forms. Hermes, which Qwen and many others learned: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Gemma 4:
`<|tool_call>call:name{key:<|"|>text<|"|>,count:3}<tool_call|>`, where markers and quotes are special tokens (Google's
"Gemma 4 Prompt Formatting", ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, and the chat template of
google/gemma-4-31B-it, which writes earlier calls so).

A call is given out once it is whole: only then is it known to be one. Text that is none is content, with its markers.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar
from uuid import uuid4

from windowpane.text.parsers.deltas import Content, Delta, ToolArguments, ToolStart, first_open


class NotACall(Exception):
    """The text after a call's first marker is none."""


class ToolParser:
    """Finds the calls in one answer. White space around a call is left out.

    Subclasses know one form. `_body_end` is told the text after the first marker as it grows, and remembers in
    `_looked_at` how far it has read, so that long calls are not read over and over.
    """

    start: ClassVar[str]
    end: ClassVar[str]
    quote: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.markers = (self.start, self.end) if self.quote is None else (self.start, self.end, self.quote)
        self._calls = 0
        self._text = ""  # what cannot be told yet
        self._in_call = False
        self._after_call = False  # white space that comes next is left out
        self._looked_at = 0
        self._in_quotes = False

    def push(self, text: str) -> list[Delta]:
        self._text += text
        return self._run(is_last=False)

    def finish(self) -> list[Delta]:
        """What was held back when the answer ended: a call that is cut off is content."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._call(deltas, is_last) if self._in_call else self._content(deltas, is_last):
            pass
        return deltas

    def _content(self, deltas: list[Delta], is_last: bool) -> bool:
        """Text before a call. Space at its end is held back: it is left out if a call follows."""
        at = self._text.find(self.start)
        if at >= 0:
            sure = len(self._text[:at].rstrip())
            self._show(deltas, sure)
            self._in_call = True
            self._looked_at = self._text.index(self.start) + len(self.start)
            self._in_quotes = False
            return True
        sure = len(self._text) if is_last else len(self._text[: first_open(self._text, self.start)].rstrip())
        self._show(deltas, sure)
        return False

    def _call(self, deltas: list[Delta], is_last: bool) -> bool:
        body_at = self._text.index(self.start) + len(self.start)
        try:
            end_at = self._body_end(body_at)
            if end_at is None:
                if not is_last:
                    return False
                raise NotACall
            name, arguments = self._read(self._text[body_at:end_at])
        except (NotACall, ValueError, RecursionError):
            self._show(deltas, body_at)  # the marker was text; what follows may hold another
        else:
            deltas += [ToolStart(self._calls, f"call_{uuid4().hex}", name), ToolArguments(self._calls, arguments)]
            self._calls += 1
            self._after_call = True
            self._text = self._text[end_at + len(self.end) :]
        self._in_call = False
        return True

    def _show(self, deltas: list[Delta], count: int) -> None:
        """Take `count` characters off the text and give them out as content."""
        shown, self._text = self._text[:count], self._text[count:]
        if self._after_call:
            shown = shown.lstrip()
        if shown:
            self._after_call = False
            deltas.append(Content(shown))

    def _body_end(self, body_at: int) -> int | None:
        """Where a call's last marker begins; None if it has not come yet. Raises NotACall once that is certain."""
        raise NotImplementedError

    def _read(self, body: str) -> tuple[str, str]:
        """A call's name, and its arguments as JSON. Raises NotACall or ValueError."""
        raise NotImplementedError


class HermesToolParser(ToolParser):
    start = "<tool_call>"
    end = "</tool_call>"

    def _body_end(self, body_at: int) -> int | None:
        text = self._text
        begun_at = _skip_space(text, body_at)
        if text[begun_at : begun_at + 1] not in ("", "{"):
            raise NotACall
        while True:
            match = (_IN_STRING if self._in_quotes else _OUT_OF_STRING).match(text, self._looked_at)
            self._looked_at = match.end() if match else self._looked_at
            rest = text[self._looked_at : self._looked_at + len(self.end)]
            if rest.startswith('"'):
                self._in_quotes = not self._in_quotes
                self._looked_at += 1
            elif self._in_quotes or self.end.startswith(rest):  # so is an empty rest
                return self._looked_at if rest == self.end and not self._in_quotes else None
            else:
                raise NotACall

    def _read(self, body: str) -> tuple[str, str]:
        body = body.strip()
        call = json.loads(body, parse_constant=_refuse_constant)
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else ("", None)
        if not (isinstance(name, str) and name and name.isprintable() and isinstance(arguments, dict)):
            raise NotACall
        return name, _member(body, "arguments") or "{}"


# JSON has no "<" outside of its strings, so the first one is the last marker or the end of all hope.
_OUT_OF_STRING = re.compile(r'[^"<]*')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _member(text: str, wanted: str) -> str | None:
    """The value of a member of a JSON object, as it is written. The object is known to be valid."""
    decoder = json.JSONDecoder()
    found = None
    at = _skip_space(text, 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        value_at = _skip_space(text, _skip_space(text, at) + 1)
        _, at = decoder.raw_decode(text, value_at)
        if key == wanted:
            found = text[value_at:at]  # of several the last counts, as everywhere
        at = _skip_space(text, at)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return found


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class Gemma4ToolParser(ToolParser):
    start = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'

    def _body_end(self, body_at: int) -> int | None:
        text = self._text
        if not _CALL.startswith(text[body_at : body_at + len(_CALL)]):
            raise NotACall
        while True:
            if self._in_quotes:
                at = text.find(_QUOTE, self._looked_at)
                if at < 0:
                    self._looked_at = max(self._looked_at, first_open(text, _QUOTE))
                    return None
                self._in_quotes, self._looked_at = False, at + len(_QUOTE)
                continue
            found = _GEMMA4_MARKER.search(text, self._looked_at)
            if found is None:
                opens = (first_open(text, marker) for marker in self.markers)
                self._looked_at = max(self._looked_at, min(opens))
                return None
            if found[0] == self.end:
                return found.start()
            if found[0] == self.start:
                raise NotACall
            self._in_quotes, self._looked_at = True, found.end()

    def _read(self, body: str) -> tuple[str, str]:
        name = _GEMMA4_NAME.match(body)
        if name is None:
            raise NotACall
        reader = _Gemma4Reader(body, name.end())
        arguments = reader.value()
        if reader.at != len(body.rstrip()) or not isinstance(arguments, dict):
            raise NotACall
        written = json.dumps(arguments, ensure_ascii=False)
        written.encode()  # half a character, by an escape, is a ValueError
        return name[1], written


_CALL, _QUOTE = "call:", Gemma4ToolParser.quote
_GEMMA4_MARKER = re.compile("|".join(map(re.escape, (_QUOTE, Gemma4ToolParser.end, Gemma4ToolParser.start))))
_GEMMA4_NAME = re.compile(r"call:\s*([^\s{}<>]+)\s*(?=\{)")
_GEMMA4_KEY = re.compile(r"[^\s:,{}\[\]<>\"]+")
_GEMMA4_BARE = re.compile(r"[^\s,{}\[\]<>\"]+")
_GEMMA4_WORDS = {"true": True, "false": False, "null": None, "None": None}  # templates write Python's None
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class _Gemma4Reader:
    """Reads values as Gemma 4 writes them: JSON with bare keys and quotes of its own. Plain quotes are read too."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def value(self) -> object:
        if self._take("{"):
            return self._object()
        if self._take("["):
            return self._list()
        string = self._string()
        return self._bare() if string is None else string

    def _object(self) -> dict[str, object]:
        members: dict[str, object] = {}
        while not self._take("}"):
            if members and not self._take(","):
                raise NotACall
            key = self._string()
            key = self._match(_GEMMA4_KEY) if key is None else key
            if not self._take(":"):
                raise NotACall
            members[key] = self.value()
        return members

    def _list(self) -> list[object]:
        items: list[object] = []
        while not self._take("]"):
            if items and not self._take(","):
                raise NotACall
            items.append(self.value())
        return items

    def _string(self) -> str | None:
        if self._take(_QUOTE):
            end = self.text.find(_QUOTE, self.at)
            if end < 0:
                raise NotACall
            string, self.at = self.text[self.at : end], end + len(_QUOTE)
            return string
        if self.text.startswith('"', self.at):
            return str(json.loads(self._match(_JSON_STRING), strict=False))
        return None

    def _bare(self) -> object:
        word = self._match(_GEMMA4_BARE)
        if word in _GEMMA4_WORDS:
            return _GEMMA4_WORDS[word]
        number: object = json.loads(word, parse_constant=_refuse_constant)
        if isinstance(number, float) and number in (float("inf"), float("-inf")):
            raise NotACall
        return number

    def _take(self, text: str) -> bool:
        self.at = _skip_space(self.text, self.at)
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise NotACall
        self.at = found.end()
        return found[0]
