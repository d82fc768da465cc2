"""Reads the text of a chat's answers: what of it is reasoning, what is said, and what is called."""

from __future__ import annotations

from collections.abc import Iterable

from windowpane.schedule.request import FinishReason
from windowpane.text.parsers import Content, Delta, OutputParser, Reasoning, ToolArguments, ToolStart


class Reader:
    """One answer's text as deltas, less what was not asked for: reasoning, or calls beyond the first."""

    def __init__(
        self, parser: OutputParser | None, *, wants_reasoning: bool = True, wants_one_call: bool = False
    ) -> None:
        self._parser = parser
        self._wants_reasoning = wants_reasoning
        self._one_call = wants_one_call
        self._called = False

    @property
    def reads(self) -> bool:
        """Whether an answer may be anything but text."""
        return self._parser is not None

    def push(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._wanted(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return [] if self._parser is None else self._wanted(self._parser.finish())

    def ended_in_calls(self, reason: FinishReason | None) -> bool:
        """Whether the answer ended by itself and called something."""
        return self._called and reason is FinishReason.STOP

    def _wanted(self, deltas: Iterable[Delta]) -> list[Delta]:
        wanted: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolStart):
                self._called = True
            is_further_call = isinstance(delta, ToolStart | ToolArguments) and delta.index > 0
            is_reasoning = isinstance(delta, Reasoning)
            if not (is_further_call and self._one_call) and not (is_reasoning and not self._wants_reasoning):
                wanted.append(delta)
        return wanted
