"""Both parsers in a row: what the text of one answer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from windowpane.text.parsers.deltas import Content, Delta, Parser, Reasoning, ToolStart
from windowpane.text.tokenizer import Tokenizer


class OutputParser:
    """Takes reasoning out first, then calls out of what is left. Either parser may be missing."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.markers = tuple(m for parser in (reasoning, tools) if parser is not None for m in parser.markers)

    def push(self, text: str) -> list[Delta]:
        return self._find_calls([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        """What was held back when the answer ended."""
        deltas = [] if self._reasoning is None else self._find_calls(self._reasoning.finish())
        return deltas + ([] if self._tools is None else self._tools.finish())

    def _find_calls(self, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                found += [delta] if self._tools is None else self._tools.push(delta.text)
            else:
                found.append(delta)
        return [delta for delta in found if not isinstance(delta, Content) or delta.text]


def kept_special_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Special tokens that a detokenizer must show, because parsers look for them."""
    return frozenset(i for marker in markers if (i := tokenizer.token_id(marker)) is not None)


class Reads(Protocol):
    """Whatever tells the deltas of an answer."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


@dataclass(slots=True)
class ReadAnswer:
    """All deltas of an answer in one."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolStart] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, ToolStart):
                self.calls.append(delta)
            else:
                self.arguments[delta.index] = self.arguments.get(delta.index, "") + delta.json

    @classmethod
    def of(cls, reader: Reads, text: str) -> ReadAnswer:
        """A whole text, read at once."""
        answer = cls()
        answer.add([*reader.push(text), *reader.finish()])
        return answer
