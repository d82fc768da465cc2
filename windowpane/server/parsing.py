"""Reasoning and tool calls: what a chat asks for, and which parsers read the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from windowpane.server.errors import bad_request
from windowpane.server.protocol import ChatBody, NamedTool
from windowpane.server.sampling import constraint_of, grammar_of
from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars
from windowpane.text.parsers import (
    HARMONY_REASONING,
    HARMONY_TOOLS,
    HarmonyParser,
    MakesParser,
    OutputParser,
    ThoughtParser,
    reasoning_parser,
    tool_grammar,
    tool_parser,
)
from windowpane.text.rules import ThoughtBudget


@dataclass(frozen=True, slots=True)
class Parsers:
    """Which forms the served model writes, by name; None where the server was not told."""

    reasoning: str | None = None
    tools: str | None = None
    auto_tools: bool = False

    def __post_init__(self) -> None:
        if self.auto_tools and self.tools is None:
            raise ValueError("--enable-auto-tool-choice needs to know how calls are written: add --tool-call-parser")
        self.make_reasoning()
        self.make_tools()
        if self.is_harmony and not (
            self.reasoning in (None, HARMONY_REASONING) and self.tools in (None, HARMONY_TOOLS)
        ):
            raise ValueError(
                f"--reasoning-parser {self.reasoning} and --tool-call-parser {self.tools} do not go together: gpt-oss "
                f"needs {HARMONY_REASONING} and {HARMONY_TOOLS}, and other models need neither"
            )

    @property
    def is_harmony(self) -> bool:
        """Whether the model is gpt-oss, whose messages hold reasoning, calls and text alike: one parser reads them."""
        return self.reasoning == HARMONY_REASONING or self.tools == HARMONY_TOOLS

    def make_reasoning(self) -> Callable[[str], ThoughtParser] | None:
        name = HARMONY_REASONING if self.is_harmony else self.reasoning
        return None if name is None else reasoning_parser(name)

    def make_tools(self) -> MakesParser | None:
        return None if self.tools is None else tool_parser(self.tools)


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def tool_choice(body: ChatBody, parsers: Parsers) -> ToolChoice:
    """How tools are to be used, refused where the server cannot tell calls from text."""
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
    make_reasoning, make_tools = parsers.make_reasoning(), parsers.make_tools() if choice != "none" else None
    if make_reasoning is None and make_tools is None:
        return None
    if parsers.is_harmony:
        return OutputParser(None, HarmonyParser(prompt=prompt, find_calls=make_tools is not None))
    return OutputParser(
        None if make_reasoning is None else make_reasoning(prompt),
        None if make_tools is None else make_tools(_declared(body)),
    )


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
