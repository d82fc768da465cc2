"""Reasoning and tool calls in a model's text, taken out as it comes. See `docs/tools.md`.

    text ─► reasoning parser ─ content ─► tool parser ─► deltas: Content, Reasoning, ToolStart, ToolArguments

Parsers are chosen by name. What comes out depends on the text alone, never on how it was cut into pieces, and text that
turns out to be no call is content: nothing is lost.
"""

from windowpane.text.parsers.deltas import Content, Delta, Reasoning, ToolArguments, ToolStart
from windowpane.text.parsers.output import OutputParser, kept_special_ids
from windowpane.text.parsers.reasoning import REASONING_PARSERS, ReasoningParser, reasoning_parser
from windowpane.text.parsers.tool_choice import TOOL_PARSERS, tool_grammar, tool_parser
from windowpane.text.parsers.tools import ToolParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Content",
    "Delta",
    "OutputParser",
    "Reasoning",
    "ReasoningParser",
    "ToolArguments",
    "ToolParser",
    "ToolStart",
    "kept_special_ids",
    "reasoning_parser",
    "tool_grammar",
    "tool_parser",
]
