"""Tool calls whose arguments stand between tags, as plain text: Qwen3-Coder's form and GLM-4.5's.

Qwen3-Coder and Qwen3.5 (by their chat templates): `<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n
</parameter>\\n</function>\\n</tool_call>`. Models forget `<tool_call>` after a sentence, and sometimes one of the last
tags; such calls are read too.

GLM-4.5 to 4.7 (by their chat templates): `<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n
</tool_call>`; the line breaks may be missing, and so may the arguments.

Nothing is escaped in a value, so the tag that ends it counts only where another tag follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from windowpane.text.parsers.literals import NotACall, skip_space, to_json
from windowpane.text.parsers.tools import Call, ToolParser
from windowpane.text.parsers.typed import read_value

MAX_NAME_CHARACTERS = 256
_NAME = re.compile(r"[^\s<>{}\[\]\"'=]*")


class MoreNeeded(Exception):
    """The text so far does not say what comes next."""


class TaggedToolParser(ToolParser):
    key_start: ClassVar[str]
    key_end: ClassVar[str]
    value_start: ClassVar[str]
    value_end: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]

    def _begin(self) -> None:
        self._step: Callable[[], None] | None = self._read_function
        self._members: dict[str, str] = {}
        self._name = self._key = ""

    def _take(self, start_at: int, start: str, is_last: bool) -> tuple[list[Call], int] | None:
        try:
            while self._step is not None:
                self._step()
            end = self._end(is_last)
        except MoreNeeded:
            return None
        return [(self._name, self._arguments())], end

    def _arguments(self) -> str:
        root = self._parameters.get(self._name, {})
        properties = root.get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        return to_json({key: read_value(text, schemas.get(key), root) for key, text in self._members.items()})

    # -- steps: each takes what it can, names the next one, or raises MoreNeeded and is tried again ----------------

    def _read_function(self) -> None:
        """The function's name, and what else stands before the first argument."""
        raise NotImplementedError

    def _between(self) -> None:
        self._go_on(self._tag(self.key_start, *self.call_ends))

    def _go_on(self, tag: str) -> None:
        self._step = self._read_key if tag == self.key_start else None

    def _read_key(self) -> None:
        most = self._looked_at + MAX_NAME_CHARACTERS
        end = self._text.find(self.key_end, self._looked_at, most)
        if end < 0 and len(self._text) < most:
            raise MoreNeeded
        self._key = self._text[self._looked_at : end].strip()
        if end < 0 or not self._key:
            raise NotACall
        self._looked_at = end + len(self.key_end)
        self._step = self._open_value

    def _open_value(self) -> None:
        if self.value_start:
            self._tag(self.value_start)
        self._value_from = self._looked_at - self._call_at
        self._step = self._read_value

    def _read_value(self) -> None:
        end = self._text.find(self.value_end, self._looked_at)
        if end < 0:
            self._looked_at = max(self._looked_at, len(self._text) - len(self.value_end) + 1)
            raise MoreNeeded
        self._value_to = end - self._call_at
        self._looked_at = end + len(self.value_end)
        self._step = self._closed

    def _closed(self) -> None:
        try:
            tag = self._tag(self.key_start, *self.call_ends)
        except NotACall:
            self._step = self._read_value  # the tag belonged to the value
            return
        value = self._text[self._call_at + self._value_from : self._call_at + self._value_to]
        self._members[self._key] = self._trim(value)
        self._go_on(tag)

    def _tag(self, *tags: str) -> str:
        """Which of these tags comes next, after white space."""
        self._looked_at = at = skip_space(self._text, self._looked_at)
        for tag in tags:
            if self._text.startswith(tag, at):
                self._looked_at += len(tag)
                return tag
        if any(tag.startswith(self._text[at : at + len(tag)]) for tag in tags):
            raise MoreNeeded
        raise NotACall

    def _read_name(self, ends: str) -> None:
        """A name, and one of these characters behind it."""
        found = _NAME.match(self._text, self._looked_at, self._looked_at + MAX_NAME_CHARACTERS)
        assert found is not None  # it may be empty
        if found.end() == len(self._text):
            raise MoreNeeded
        if not found[0] or self._text[found.end()] not in ends:
            raise NotACall
        self._name, self._looked_at = found[0], found.end()

    @property
    def _call_at(self) -> int:
        """Where this call begins; other places are kept relative to it, as text before it goes."""
        assert self._start is not None
        return self._start[0]

    def _trim(self, value: str) -> str:
        return value

    def _end(self, is_last: bool) -> int:
        """Where the call ends, all of its last tags included."""
        return self._looked_at


class Qwen3CoderToolParser(TaggedToolParser):
    start, end = "<tool_call>", "</tool_call>"
    function_start, function_end = "<function=", "</function>"
    starts = (start, function_start)
    markers = (start, end)
    key_start, key_end, value_start, value_end = "<parameter=", ">", "", "</parameter>"
    call_ends = (function_end, end)

    def _begin(self) -> None:
        super()._begin()
        assert self._start is not None
        if self._start[1] == self.start:
            self._step = self._open_function

    def _open_function(self) -> None:
        self._tag(self.function_start)
        self._step = self._read_function

    def _read_function(self) -> None:
        self._read_name(">")
        self._looked_at += 1
        self._step = self._between

    def _trim(self, value: str) -> str:
        """Tags stand on lines of their own."""
        return value.removeprefix("\n").removesuffix("\n")

    def _end(self, is_last: bool) -> int:
        if self._text.startswith(self.end, self._looked_at - len(self.end)):
            return self._looked_at
        end = self._past(self._looked_at, self.end, is_last)
        if end is None:
            raise MoreNeeded
        return end


class Glm45ToolParser(TaggedToolParser):
    start, end = "<tool_call>", "</tool_call>"
    starts = (start,)
    markers = (start, end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_start, key_end, value_start, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    call_ends = (end,)

    def _read_function(self) -> None:
        self._looked_at = skip_space(self._text, self._looked_at)
        self._read_name(" \n\r\t<")
        self._step = self._between
