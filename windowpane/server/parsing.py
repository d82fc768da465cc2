"""Reasoning and tool calls: what a chat asks for, and which parsers read the answer."""

from __future__ import annotations

from typing import Any, Literal

from windowpane.server.errors import bad_request
from windowpane.server.protocol import AllowedTools, ChatBody, NamedTool
from windowpane.server.sampling import constraint_of, grammar_of
from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars
from windowpane.text.parsers import OutputParser, Parsers, tool_grammar
from windowpane.text.rules import ThoughtBudget

ToolChoice = Literal["none", "auto", "required"] | NamedTool


def with_allowed_tools(body: ChatBody) -> ChatBody:
    """A chat in which only some tools may be called is one that has no others: the model is not even told of them."""
    if not isinstance(body.tool_choice, AllowedTools):
        return body
    allowed = body.tool_choice.allowed_tools
    there_is = {tool.function.name: tool for tool in body.tools or ()}
    names = [tool.function.name for tool in allowed.tools]
    if unknown := [name for name in names if name not in there_is]:
        raise bad_request(
            f"tool_choice allows {unknown[0][:64]!r}, which is not among the tools: {', '.join(there_is) or 'none'}",
            "tool_choice",
        )
    tools = [tool for name, tool in there_is.items() if name in names]
    return body.model_copy(update={"tools": tools, "tool_choice": allowed.mode})


def tool_choice(body: ChatBody, parsers: Parsers) -> ToolChoice:
    """How tools are to be used, refused where the server cannot tell calls from text."""
    assert not isinstance(body.tool_choice, AllowedTools)
    choice: ToolChoice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice not in ("none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        return "none"
    if choice == "none":
        return choice
    if parsers.tools is None or (choice == "auto" and not parsers.auto_tools):
        raise bad_request(
            "tools need a server started with --tool-call-parser"
            + (" and --enable-auto-tool-choice" if choice == "auto" else "")
            + '; or set tool_choice to "none"',
            "tool_choice" if body.tool_choice else "tools",
        )
    return choice


def output_parser(parsers: Parsers, choice: ToolChoice, body: ChatBody, prompt: str) -> OutputParser | None:
    """Reads one answer to `prompt`; None where it is all text."""
    return parsers.reading(prompt, None if choice == "none" else _declared(body))


def thought_budget(parsers: Parsers, body: ChatBody, prompt: str) -> ThoughtBudget | None:
    """How long the model may think about `prompt`, where that is limited."""
    if body.thinking_token_budget is None:
        return None
    make_reasoning = parsers.make_reasoning()
    if make_reasoning is None:
        raise bad_request(
            "thinking_token_budget needs a server started with --reasoning-parser", "thinking_token_budget"
        )
    thought = make_reasoning(prompt).thought
    return None if thought is None else ThoughtBudget(thought, body.thinking_token_budget)


def _declared(body: ChatBody) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def chat_grammar(
    body: ChatBody, choice: ToolChoice, parsers: Parsers, grammars: Grammars | None, prompt: str
) -> CompiledGrammar | None:
    """What the answer must look like: by its format, or calls where they are required. A thought may come first."""
    by_format = constraint_of(body) is not None
    if by_format and choice != "none":
        raise bad_request(
            'an answer by a format cannot also be a call; set tool_choice to "none", or leave the format out', "tools"
        )
    if not by_format and choice in ("none", "auto"):
        return None
    make_reasoning = parsers.make_reasoning()
    if grammars is not None and make_reasoning is not None:
        grammars = grammars.after(make_reasoning(prompt).thought)
    if by_format:
        return grammar_of(body, grammars)
    assert grammars is not None and parsers.tools is not None and body.tools is not None
    function = choice.function.name if isinstance(choice, NamedTool) else None
    parallel = body.parallel_tool_calls is not False
    try:
        return tool_grammar(grammars, parsers.tools, _declared(body), function=function, parallel=parallel)
    except GrammarError as error:
        raise bad_request(str(error), "tools", "invalid_value") from None
