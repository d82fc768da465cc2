"""What parsers give: pieces of an answer, each of its own kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins. `index` counts the calls of an answer, `id` is unique, and arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a call's arguments: all of them, joined, are the text of one JSON object."""

    index: int
    json: str


Delta = Content | Reasoning | ToolStart | ToolArguments


class Parser(Protocol):
    """Reads one answer as it comes. `markers` are the special tokens that it has to see."""

    @property
    def markers(self) -> tuple[str, ...]: ...

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbouring pieces of content in one, as each is sent on its own."""
    result: list[Delta] = []
    for is_content, group in groupby(deltas, lambda delta: isinstance(delta, Content)):
        pieces = list(group)
        result += [Content("".join(getattr(piece, "text", "") for piece in pieces))] if is_content else pieces
    return result


def first_open(text: str, marker: str) -> int:
    """Where a marker begins that the end of `text` cuts off; the length of `text` if there is none."""
    for at in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[at:]):
            return at
    return len(text)
