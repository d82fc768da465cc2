"""Tool calls in a model's text: found between their markers, checked, and given out as JSON.

Here is what all forms share, and two of them. Hermes, which Qwen and many others learned: `<tool_call>{"name": …,
"arguments": {…}}</tool_call>`. Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3}<tool_call|>`, where markers
and quotes are special tokens (Google's "Gemma 4 Prompt Formatting", ai.google.dev/gemma/docs/core/
prompt-formatting-gemma4, and the chat template of google/gemma-4-31B-it, which writes earlier calls so). `tagged`,
`llama4` and `harmony` have the others.

A call is given out once it is whole: only then is it known to be one. Text that is none is content, with its markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from windowpane.text.parsers.deltas import Content, Delta, ToolArguments, ToolStart, first_open, joined
from windowpane.text.parsers.literals import LiteralReader, NotACall, refuse_constant, skip_space, to_json

Tool = Mapping[str, Any]
Call = tuple[str, str]  # a function's name, and its arguments as JSON


def call_deltas(index: int, call: Call) -> list[Delta]:
    name, arguments = call
    return [ToolStart(index, f"call_{uuid4().hex}", name), ToolArguments(index, arguments)]


def parameters_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of functions by name, as far as they are well-formed: grammars and templates judge the rest."""
    functions = [tool.get("function") for tool in tools]
    return {
        function["name"]: parameters if isinstance(parameters := function.get("parameters"), Mapping) else {}
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }


class ToolParser:
    """Finds the calls in one answer. White space around a call is left out.

    Subclasses know one form: what calls begin with (`starts`), which special tokens must be visible (`markers`) and
    how to `_take` calls. `_looked_at` remembers how far an unfinished call was read, so that long ones are not read
    over and over. `tools` are those of the request: some forms need them to tell what a value's type is.
    """

    starts: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]]
    _pattern: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "starts"):
            cls._pattern = re.compile("|".join(map(re.escape, cls.starts)))

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._parameters = parameters_of(tools)
        self._calls = 0
        self._text = ""
        self._at = 0  # what stands before it was given out
        self._start: tuple[int, str] | None = None  # where a call may have begun, and with what
        self._after_call = False  # white space that comes next is left out
        self._looked_at = 0

    def push(self, text: str) -> list[Delta]:
        held, self._text = self._text, ""  # a text with one owner grows in place: a long call takes linear time
        held += text
        self._text = held
        return self._run(is_last=False)

    def finish(self) -> list[Delta]:
        """What was held back when the answer ended: a call that is cut off is content."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._content(deltas, is_last) if self._start is None else self._call(deltas, is_last):
            pass
        self._text = self._text[self._at :]
        self._looked_at -= self._at
        if self._start is not None:
            self._start = (self._start[0] - self._at, self._start[1])
        self._at = 0
        return joined(deltas)

    def _content(self, deltas: list[Delta], is_last: bool) -> bool:
        """Text before a call. Space at its end is held back: it is left out if a call follows."""
        found = self._pattern.search(self._text, self._at)
        if found is None:
            sure = len(self._text) if is_last else min(first_open(self._text, start) for start in self.starts)
            self._show(deltas, sure if is_last else _rstrip(self._text, self._at, sure))
            return False
        self._show(deltas, _rstrip(self._text, self._at, found.start()))
        self._start = (found.start(), found[0])
        self._looked_at = found.end()
        self._begin()
        return True

    def _call(self, deltas: list[Delta], is_last: bool) -> bool:
        assert self._start is not None
        start_at, start = self._start
        try:
            taken = self._take(start_at, start, is_last)
            if taken is None:
                if not is_last:
                    return False
                raise NotACall
        except (NotACall, ValueError, RecursionError):
            self._show(deltas, start_at + len(start))  # the marker was text; what follows may hold another
        else:
            calls, self._at = taken
            for call in calls:
                deltas += call_deltas(self._calls, call)
                self._calls += 1
            self._after_call = True
        self._start = None
        return True

    def _show(self, deltas: list[Delta], end: int) -> None:
        """Give out the text up to `end` as content."""
        shown, self._at = self._text[self._at : end], max(self._at, end)
        if self._after_call:
            shown = shown.lstrip()
        if shown:
            self._after_call = False
            deltas.append(Content(shown))

    def _past(self, at: int, tag: str, is_last: bool) -> int | None:
        """Behind a tag that may follow, or `at` where it does not; None while that is not certain."""
        tag_at = skip_space(self._text, at)
        if self._text.startswith(tag, tag_at):
            return tag_at + len(tag)
        return None if tag.startswith(self._text[tag_at : tag_at + len(tag)]) and not is_last else at

    def _begin(self) -> None:
        """A call may begin: forget what was known of the last one."""

    def _take(self, start_at: int, start: str, is_last: bool) -> tuple[list[Call], int] | None:
        """The calls that begin here, and where they end; None if they are not whole yet.

        Raises NotACall or ValueError as soon as it is certain that there are none.
        """
        raise NotImplementedError


def _rstrip(text: str, start: int, end: int) -> int:
    """Where the text between these ends, less the space at its end."""
    return start + len(text[start:end].rstrip())


class DelimitedToolParser(ToolParser):
    """One call between two markers. `_body_end` is told the text after the first as it grows."""

    start: ClassVar[str]
    end: ClassVar[str]

    def _begin(self) -> None:
        self._in_quotes = False

    def _take(self, start_at: int, start: str, is_last: bool) -> tuple[list[Call], int] | None:
        body_at = start_at + len(start)
        end_at = self._body_end(body_at)
        if end_at is None:
            return None
        return [self._read(self._text[body_at:end_at])], end_at + len(self.end)

    def _body_end(self, body_at: int) -> int | None:
        """Where a call's last marker begins; None if it has not come yet. Raises NotACall once that is certain."""
        raise NotImplementedError

    def _read(self, body: str) -> Call:
        raise NotImplementedError


class HermesToolParser(DelimitedToolParser):
    start = "<tool_call>"
    end = "</tool_call>"
    starts = (start,)
    markers = (start, end)

    def _body_end(self, body_at: int) -> int | None:
        text = self._text
        begun_at = skip_space(text, body_at)
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

    def _read(self, body: str) -> Call:
        body = body.strip()
        call = json.loads(body, parse_constant=refuse_constant)
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else ("", None)
        if not (isinstance(name, str) and name and name.isprintable() and isinstance(arguments, dict)):
            raise NotACall
        return name, _member(body, "arguments") or "{}"


# JSON has no "<" outside of its strings, so the first one is the last marker or the end of all hope.
_OUT_OF_STRING = re.compile(r'[^"<]*')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def _member(text: str, wanted: str) -> str | None:
    """The value of a member of a JSON object, as it is written. The object is known to be valid."""
    decoder = json.JSONDecoder()
    found = None
    at = skip_space(text, 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        value_at = skip_space(text, skip_space(text, at) + 1)
        _, at = decoder.raw_decode(text, value_at)
        if key == wanted:
            found = text[value_at:at]  # of several the last counts, as everywhere
        at = skip_space(text, at)
        at = skip_space(text, at + 1) if text[at] == "," else at
    return found


class Gemma4ToolParser(DelimitedToolParser):
    start = "<|tool_call>"
    end = "<tool_call|>"
    quote = '<|"|>'
    starts = (start,)
    markers = (start, end, quote)

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

    def _read(self, body: str) -> Call:
        name = _GEMMA4_NAME.match(body)
        if name is None:
            raise NotACall
        reader = _Gemma4Reader(body, name.end())
        arguments = reader.value()
        if reader.at != len(body.rstrip()) or not isinstance(arguments, dict):
            raise NotACall
        return name[1], to_json(arguments)


_CALL, _QUOTE = "call:", Gemma4ToolParser.quote
_GEMMA4_MARKER = re.compile("|".join(map(re.escape, (_QUOTE, Gemma4ToolParser.end, Gemma4ToolParser.start))))
_GEMMA4_NAME = re.compile(r"call:\s*([^\s{}<>]+)\s*(?=\{)")
_GEMMA4_KEY = re.compile(r"[^\s:,{}\[\]<>\"]+")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class _Gemma4Reader(LiteralReader):
    """JSON with bare keys and quotes that are tokens. Plain quotes are read too."""

    words: ClassVar[Mapping[str, object]] = {**LiteralReader.words, "None": None}  # templates write Python's None
    bare = re.compile(r"[^\s,{}\[\]<>\"]+")

    def string(self) -> str | None:
        if self.take(_QUOTE):
            end = self.text.find(_QUOTE, self.at)
            if end < 0:
                raise NotACall
            string, self.at = self.text[self.at : end], end + len(_QUOTE)
            return string
        if self.text.startswith('"', self.at):
            return str(json.loads(self.match(_JSON_STRING), strict=False))
        return None

    def key(self) -> str:
        key = self.string()
        return self.match(_GEMMA4_KEY) if key is None else key
