"""Windowpane: an inference engine for hybrid-attention models. A layer pays only for the tokens it can still see."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windowpane.engine.adapters import LoRARequest
    from windowpane.engine.llm import LLM, Stream
    from windowpane.schedule.request import FinishReason, SamplingParams, TokenLogprobs
    from windowpane.text.answer import Completion, RequestFailed, ToolCall

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "FinishReason",
    "LoRARequest",
    "RequestFailed",
    "SamplingParams",
    "Stream",
    "TokenLogprobs",
    "ToolCall",
]

_HOMES = dict.fromkeys(("LLM", "Stream"), "windowpane.engine.llm")
_HOMES["LoRARequest"] = "windowpane.engine.adapters"
_HOMES |= dict.fromkeys(("Completion", "RequestFailed", "ToolCall"), "windowpane.text.answer")
_HOMES |= dict.fromkeys(("FinishReason", "SamplingParams", "TokenLogprobs"), "windowpane.schedule.request")


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import windowpane` costs no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
