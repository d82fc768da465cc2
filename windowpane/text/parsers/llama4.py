"""Llama 4's tool calls: Python's notation or JSON, with or without `<|python_start|>` and `<|python_end|>`.

`[get_weather(city="Paris"), now()]` is what Meta documents (llama.com/docs/model-cards-and-prompt-formats/llama4);
`{"name": "get_weather", "parameters": {"city": "Paris"}}` is what the chat template of the checkpoints asks for.

Without markers nothing but the form tells a call from text, so that it has to name one of the request's tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from windowpane.text.parsers.literals import LiteralReader, NotACall, refuse_constant, skip_space, to_json
from windowpane.text.parsers.tools import Call, ToolParser

_JSON_HEAD = r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:'
_HEAD = re.compile(rf"\[\s*([A-Za-z_][\w.-]*)\s*\(|(?:\[\s*)?{_JSON_HEAD}")
_JSON = re.compile(r"(?:\[\s*)?\{")
# What may still become one.
_BEGUN = re.compile(r'(?:\[\s*)?(?:[A-Za-z_][\w.-]*\s*|\{\s*(?:"[a-z]*(?:"\s*)?)?)?')
MAX_HEAD_CHARACTERS = 256
MAX_DEPTH = 64  # so that brackets without end are given up soon, each of which might begin a call
_PLAIN = {
    None: re.compile(r"[^\"'\[\](){}]*"),
    '"': re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL),
    "'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL),
}


class Llama4ToolParser(ToolParser):
    start, end = "<|python_start|>", "<|python_end|>"
    starts = (start, "[", "{")
    markers = (start, end)

    def _begin(self) -> None:
        self._depth = 0
        self._quote: str | None = None

    def _take(self, start_at: int, start: str, is_last: bool) -> tuple[list[Call], int] | None:
        is_marked = start == self.start
        body_at = skip_space(self._text, start_at + len(start)) if is_marked else start_at
        if self._depth == 0:  # not begun to read
            if not self._is_head(body_at, is_marked):
                return None
            self._looked_at = body_at
        end_at = self._closing()
        past = None if end_at is None else self._past(end_at, self.end, is_last)
        if past is None:
            return None
        calls = self._read(self._text[body_at:end_at])
        if not is_marked and any(self._is_unknown(name) for name, _ in calls):
            raise NotACall
        return calls, past

    def _is_head(self, at: int, is_marked: bool) -> bool:
        """Whether a call begins here; False while that cannot be told."""
        head = self._text[at : at + MAX_HEAD_CHARACTERS]
        found = _HEAD.match(head)
        if found is None:
            if len(head) < MAX_HEAD_CHARACTERS and _BEGUN.fullmatch(head):
                return False
            raise NotACall
        if found[1] is not None and not is_marked and self._is_unknown(found[1]):
            raise NotACall
        return True

    def _is_unknown(self, name: str) -> bool:
        return bool(self._parameters) and name not in self._parameters

    def _closing(self) -> int | None:
        """Behind the bracket that closes the first one; None if it has not come yet."""
        text = self._text
        while True:
            match = _PLAIN[self._quote].match(text, self._looked_at)
            self._looked_at = match.end() if match else self._looked_at
            character = text[self._looked_at : self._looked_at + 1]
            if not character or character == "\\":  # a string may end in half an escape
                return None
            self._looked_at += 1
            if character in "\"'":
                self._quote = None if self._quote else character
            else:
                self._depth += 1 if character in "[({" else -1
                if self._depth > MAX_DEPTH:
                    raise NotACall
                if self._depth == 0:
                    self._depth = 1  # the call has been read; a tag may follow
                    self._looked_at -= 1
                    return self._looked_at + 1

    def _read(self, body: str) -> list[Call]:
        if _JSON.match(body):
            values = json.loads(body, parse_constant=refuse_constant)
            return [_from_json(value) for value in (values if isinstance(values, list) else [values])]
        reader = PythonReader(body, 0)
        calls = reader.calls()
        if reader.at != len(body):
            raise NotACall
        return [(name, to_json(arguments)) for name, arguments in calls]


def _from_json(value: Any) -> Call:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name", value.get("function")) if isinstance(value, Mapping) else None
    if not (isinstance(name, str) and name and name.isprintable()):
        raise NotACall
    arguments = value.get("parameters", value.get("arguments", {}))
    if not isinstance(arguments, Mapping):
        raise NotACall
    return name, to_json(arguments)


_KEYWORD = re.compile(r"[^\W\d]\w*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.-]*")
_STRINGS = {
    '"': re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL),
    "'": re.compile(r"'([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_ESCAPED["/"] = "/"


class PythonReader(LiteralReader):
    """Calls with named arguments, whose values are Python's literals or JSON's."""

    words: ClassVar[Mapping[str, object]] = {**LiteralReader.words, "True": True, "False": False, "None": None}

    def calls(self) -> list[tuple[str, dict[str, object]]]:
        calls: list[tuple[str, dict[str, object]]] = []
        if not self.take("["):
            raise NotACall
        while not self.take("]"):
            if calls and not self.take(","):
                raise NotACall
            self.at = skip_space(self.text, self.at)
            name = self.match(_FUNCTION)
            if not self.take("("):
                raise NotACall
            calls.append((name, self._arguments()))
        return calls

    def _arguments(self) -> dict[str, object]:
        arguments: dict[str, object] = {}
        while not self.take(")"):
            if arguments and not self.take(","):
                raise NotACall
            self.at = skip_space(self.text, self.at)
            name = self.match(_KEYWORD)
            if not self.take("=") or name in arguments:
                raise NotACall
            arguments[name] = self.value()
        return arguments

    def string(self) -> str | None:
        quote = self.text[self.at : self.at + 1]
        if quote not in _STRINGS:
            return None
        inside = self.match(_STRINGS[quote])[1:-1]
        if "\\" not in inside:
            return inside
        # Escapes may spell a character as a pair of surrogates.
        return _ESCAPE.sub(_unescaped, inside).encode("utf-16", "surrogatepass").decode("utf-16")


def _unescaped(found: re.Match[str]) -> str:
    if found[3] is None:
        return chr(int(found[1] or found[2], 16))
    return _ESCAPED.get(found[3], found[0])
