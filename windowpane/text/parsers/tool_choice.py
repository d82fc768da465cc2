"""Tool parsers by name, and grammars that force a call in their form: `tool_choice` "required" or a function's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars, json_rules
from windowpane.text.parsers.deltas import Parser
from windowpane.text.parsers.gemma4_schema import Gemma4Rules
from windowpane.text.parsers.harmony import CHANNEL, CONSTRAIN, MESSAGE, HarmonyParser
from windowpane.text.parsers.llama4 import Llama4ToolParser
from windowpane.text.parsers.tagged import Glm45ToolParser, Qwen3CoderToolParser
from windowpane.text.parsers.tagged_schema import TaggedRules, keyword_arguments
from windowpane.text.parsers.tools import Gemma4ToolParser, HermesToolParser, Tool

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
Schemas = Mapping[str, Mapping[str, Any]]


class MakesParser(Protocol):
    def __call__(self, tools: Sequence[Tool] = ...) -> Parser: ...


def tool_parser(name: str) -> MakesParser:
    """Makes parsers of this name (one of `TOOL_PARSERS`, or another that vLLM has for it), each for one answer."""
    return _form(name).parser


def tool_grammar(
    grammars: Grammars, parser: str, tools: Sequence[Tool], *, function: str | None = None, parallel: bool = True
) -> CompiledGrammar:
    """An answer that is nothing but calls in the form of `parser`, with arguments by the tools' schemas.

    `tools` are the OpenAI API's (`{"type": "function", "function": {"name": …, "parameters": …}}`). With a `function`
    it is one call to that; else one or more to any, or exactly one unless `parallel`.
    """
    form = _form(parser)
    schemas = dict(map(_declared, tools))
    if function is not None:
        if function not in schemas:
            raise GrammarError(f"tool_choice names {function!r}, which is not among the tools: {', '.join(schemas)}")
        schemas = {function: schemas[function]}
    if not schemas:
        raise GrammarError("a call is required, but there are no tools")
    start = form.several if parallel and function is None else form.one
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    rules = [f"start: {start}", f"call: {any_call}", *form.rules(grammars, schemas)]
    return grammars.from_rules("\n".join(rules), "the tools' schemas")


# -- rules: `call_0`, `call_1`, … for each function, and what else these need ---------------------------------------


def _hermes_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    """As chat templates write calls: on lines of their own, the name first."""
    opening, closing = grammars.markup(HermesToolParser.start + "\n"), grammars.markup("\n" + HermesToolParser.end)
    return [f"{rule[0]}: {opening} {rule[1]} {closing}" for rule in _json_calls(schemas, "arguments")]


def _llama4_json_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    return [f"{name}: {body}" for name, body in _json_calls(schemas, "parameters")]


def _json_calls(schemas: Schemas, arguments: str) -> list[tuple[str, str]]:
    calls = []
    for index, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{arguments}": ')
        calls.append((f"call_{index}", f'{head} %json {json.dumps(json_rules(schema))} "}}"'))
    return calls


def _gemma4_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    opening, closing = grammars.markup(Gemma4ToolParser.start), grammars.markup(Gemma4ToolParser.end)
    values = Gemma4Rules(grammars.markup(Gemma4ToolParser.quote))
    rules = []
    for index, (name, schema) in enumerate(schemas.items()):
        value = values.add(schema, f"the parameters of {name}")
        rules.append(f"call_{index}: {opening} {json.dumps('call:' + name)} {value} {closing}")
    return rules + values.rules


def _qwen3_coder_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    values = TaggedRules(grammars.markup, ("<parameter=", ">\n"), Qwen3CoderToolParser.value_end, "\n")
    ends = (f"{Qwen3CoderToolParser.start}\n<function=%s>\n", f"</function>\n{Qwen3CoderToolParser.end}")
    return _tagged_rules(grammars, schemas, values, ends)


def _glm45_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    values = TaggedRules(grammars.markup, ("<arg_key>", "</arg_key>\n<arg_value>"), Glm45ToolParser.value_end)
    return _tagged_rules(grammars, schemas, values, (f"{Glm45ToolParser.start}%s\n", Glm45ToolParser.end))


def _tagged_rules(grammars: Grammars, schemas: Schemas, values: TaggedRules, ends: tuple[str, str]) -> list[str]:
    rules = []
    for index, (name, schema) in enumerate(schemas.items()):
        opening, closing = grammars.markup(ends[0] % name), grammars.markup(ends[1])
        rules.append(f"call_{index}: {opening} {values.members(schema, f'the parameters of {name}')} {closing}")
    return rules + values.rules


def _llama4_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    return [
        f'call_{index}: {json.dumps(name + "(")} {keyword_arguments(schema, f"the parameters of {name}")} ")"'
        for index, (name, schema) in enumerate(schemas.items())
    ]


def _harmony_rules(grammars: Grammars, schemas: Schemas) -> list[str]:
    header = f"{CHANNEL}commentary to=functions.%s {CONSTRAIN}json{MESSAGE}"
    return [
        f"call_{index}: {grammars.markup(header % name)} %json {json.dumps(json_rules(schema))}"
        for index, (name, schema) in enumerate(schemas.items())
    ]


@dataclass(frozen=True, slots=True)
class _Form:
    """A parser, the rules for its calls, and how one call or `several` make an answer."""

    parser: MakesParser
    rules: Callable[[Grammars, Schemas], list[str]]
    one: str = "call"
    several: str = "call (call)*"


HARMONY_TOOLS = "openai"
_FORMS = {
    "hermes": _Form(HermesToolParser, _hermes_rules, several='call ("\\n"? call)*'),
    "gemma4": _Form(Gemma4ToolParser, _gemma4_rules),
    "qwen3_coder": _Form(Qwen3CoderToolParser, _qwen3_coder_rules, several='call ("\\n"? call)*'),
    "glm45": _Form(Glm45ToolParser, _glm45_rules, several='call ("\\n"? call)*'),
    "llama4_pythonic": _Form(Llama4ToolParser, _llama4_rules, '"[" call "]"', '"[" call (", " call)* "]"'),
    "llama4_json": _Form(Llama4ToolParser, _llama4_json_rules, several='call ("\\n" call)*'),
    HARMONY_TOOLS: _Form(HarmonyParser, _harmony_rules, several="call"),  # a call ends the answer
}
_ALSO = {"qwen3_xml": "qwen3_coder", "glm47": "glm45", "pythonic": "llama4_pythonic"}  # vLLM's other names
TOOL_PARSERS = tuple(_FORMS)


def _form(name: str) -> _Form:
    form = _FORMS.get(_ALSO.get(name, name))
    if form is None:
        raise ValueError(f"there is no tool call parser {name!r}; there are {', '.join(TOOL_PARSERS)}")
    return form


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
