"""Reasoning and tool calls in a model's text, taken out as it comes. See `docs/tools.md`.

    text ─► reasoning parser ─ content ─► tool parser ─► deltas: Content, Reasoning, ToolStart, ToolArguments

Parsers are chosen by name; gpt-oss's reads reasoning and calls at once. What comes out depends on the text alone, never
on how it was cut into pieces, and text that turns out to be no call is content: nothing is lost.
"""

from windowpane.text.parsers.chosen import Parsers
from windowpane.text.parsers.deltas import Content, Delta, Parser, Reasoning, ToolArguments, ToolStart
from windowpane.text.parsers.harmony import HarmonyParser
from windowpane.text.parsers.output import OutputParser, ReadAnswer, kept_special_ids
from windowpane.text.parsers.reasoning import (
    HARMONY_REASONING,
    REASONING_PARSERS,
    ThoughtParser,
    reasoning_parser,
)
from windowpane.text.parsers.tool_choice import HARMONY_TOOLS, TOOL_PARSERS, MakesParser, tool_grammar, tool_parser

__all__ = [
    "HARMONY_REASONING",
    "HARMONY_TOOLS",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Content",
    "Delta",
    "HarmonyParser",
    "MakesParser",
    "OutputParser",
    "Parser",
    "Parsers",
    "ReadAnswer",
    "Reasoning",
    "ThoughtParser",
    "ToolArguments",
    "ToolStart",
    "kept_special_ids",
    "reasoning_parser",
    "tool_grammar",
    "tool_parser",
]
