"""The parsers of one model: how it marks its thoughts, and how it writes calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windowpane.text.parsers.harmony import HarmonyParser
from windowpane.text.parsers.output import OutputParser
from windowpane.text.parsers.reasoning import HARMONY_REASONING, ThoughtParser, reasoning_parser
from windowpane.text.parsers.tool_choice import HARMONY_TOOLS, MakesParser, tool_parser
from windowpane.text.parsers.tools import Tool


@dataclass(frozen=True, slots=True)
class Parsers:
    """Which forms a model writes, by name; None where nobody said."""

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

    def reading(self, prompt: str, tools: Sequence[Tool] | None) -> OutputParser | None:
        """Reads one answer to `prompt`; None where it is all text. Without `tools` there are no calls to look for."""
        make_reasoning, make_tools = self.make_reasoning(), None if tools is None else self.make_tools()
        if make_reasoning is None and make_tools is None:
            return None
        if self.is_harmony:
            return OutputParser(None, HarmonyParser(prompt=prompt, find_calls=make_tools is not None))
        return OutputParser(
            None if make_reasoning is None else make_reasoning(prompt),
            None if make_tools is None else make_tools(tools or ()),
        )
