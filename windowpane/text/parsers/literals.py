"""Values as models write them: JSON-like objects and lists, with the strings and words of their own form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

_SPACE = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """The text after a call's first marker is none."""


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def refuse_constant(name: str) -> None:
    """For `json.loads`: NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is no JSON")


def to_json(value: object) -> str:
    """The JSON of a value that was read; half a character, by an escape, is a ValueError."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


class LiteralReader:
    """Reads one value of `text` from `at` on. Subclasses know how strings, keys and words are written."""

    words: ClassVar[Mapping[str, object]] = {"true": True, "false": False, "null": None}
    bare: ClassVar[re.Pattern[str]] = re.compile(r"[^\s,{}\[\]()<>\"']+")

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def value(self) -> object:
        if self.take("{"):
            return self._object()
        if self.take("["):
            return self._list()
        string = self.string()
        return self._bare() if string is None else string

    def string(self) -> str | None:
        """The string that begins here, if one does."""
        raise NotImplementedError

    def key(self) -> str:
        key = self.string()
        if key is None:
            raise NotACall
        return key

    def take(self, text: str) -> bool:
        self.at = skip_space(self.text, self.at)
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise NotACall
        self.at = found.end()
        return found[0]

    def _object(self) -> dict[str, object]:
        members: dict[str, object] = {}
        while not self.take("}"):
            if members and not self.take(","):
                raise NotACall
            self.at = skip_space(self.text, self.at)
            key = self.key()
            if not self.take(":"):
                raise NotACall
            members[key] = self.value()
        return members

    def _list(self) -> list[object]:
        items: list[object] = []
        while not self.take("]"):
            if items and not self.take(","):
                raise NotACall
            items.append(self.value())
        return items

    def _bare(self) -> object:
        word = self.match(self.bare)
        if word in self.words:
            return self.words[word]
        number: object = json.loads(word, parse_constant=refuse_constant)
        if isinstance(number, float) and number in (float("inf"), float("-inf")):
            raise NotACall
        return number
