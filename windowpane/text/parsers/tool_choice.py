"""Tool parsers by name, and grammars that force a call in their form: `tool_choice` "required" or a function's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars, json_rules
from windowpane.text.parsers.gemma4_schema import Gemma4Rules
from windowpane.text.parsers.tools import Gemma4ToolParser, HermesToolParser, ToolParser

_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesToolParser, "gemma4": Gemma4ToolParser}
TOOL_PARSERS = tuple(_PARSERS)
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Tool = Mapping[str, Any]


def tool_parser(name: str) -> Callable[[], ToolParser]:
    """Makes parsers of this name (one of `TOOL_PARSERS`), each for one answer."""
    _check_parser(name)
    return _PARSERS[name]


def tool_grammar(
    grammars: Grammars, parser: str, tools: Sequence[Tool], *, function: str | None = None, parallel: bool = True
) -> CompiledGrammar:
    """An answer that is nothing but calls in the form of `parser`, with arguments by the tools' schemas.

    `tools` are the OpenAI API's (`{"type": "function", "function": {"name": …, "parameters": …}}`). With a `function`
    it is one call to that; else one or more to any, or exactly one unless `parallel`.
    """
    _check_parser(parser)
    schemas = dict(map(_declared, tools))
    if function is not None:
        if function not in schemas:
            raise GrammarError(f"tool_choice names {function!r}, which is not among the tools: {', '.join(schemas)}")
        schemas = {function: schemas[function]}
    if not schemas:
        raise GrammarError("a call is required, but there are no tools")
    several = parallel and function is None
    rules = _hermes_rules(grammars, schemas) if parser == "hermes" else _gemma4_rules(grammars, schemas)
    gap = '"\\n"?' if parser == "hermes" else ""
    start = f"start: call ({gap} call)*" if several else "start: call"
    return grammars.from_rules("\n".join([start, *rules]), "the tools' schemas")


def _hermes_rules(grammars: Grammars, schemas: Mapping[str, Any]) -> list[str]:
    """As chat templates write calls: on lines of their own, the name first."""
    opening, closing = grammars.marker(HermesToolParser.start), grammars.marker(HermesToolParser.end)
    rules = [f'call: {opening} "\\n" ({_any_of("call", schemas)}) "\\n" {closing}']
    for index, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{index}: {head} %json {json.dumps(json_rules(schema))} "}}"')
    return rules


def _gemma4_rules(grammars: Grammars, schemas: Mapping[str, Any]) -> list[str]:
    opening, closing = grammars.marker(Gemma4ToolParser.start), grammars.marker(Gemma4ToolParser.end)
    values = Gemma4Rules(grammars.marker(Gemma4ToolParser.quote))
    rules = [f"call: {opening} ({_any_of('call', schemas)}) {closing}"]
    for index, (name, schema) in enumerate(schemas.items()):
        rules.append(f"call_{index}: {json.dumps('call:' + name)} {values.add(schema, f'the parameters of {name}')}")
    return rules + values.rules


def _any_of(prefix: str, schemas: Mapping[str, Any]) -> str:
    return " | ".join(f"{prefix}_{index}" for index in range(len(schemas)))


def _declared(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GrammarError(f"a tool needs a function with a name of letters, digits, '_', '-' and '.', not {name!r}")
    # A function without parameters takes none.
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise GrammarError(f"the parameters of {name} are a JSON schema, not {type(parameters).__name__}")
    return name, {"type": "object", **parameters}


def _check_parser(name: str) -> None:
    if name not in _PARSERS:
        raise ValueError(f"there is no tool call parser {name!r}; there are {', '.join(TOOL_PARSERS)}")
