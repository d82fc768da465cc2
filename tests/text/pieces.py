"""Texts in pieces, and what parsers made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from windowpane.text.parsers import Content, Delta, Reasoning, ToolArguments, ToolStart


@dataclass
class Parts:
    """Deltas joined. `calls` are names and arguments; `order` says what came when."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def parts(deltas: Iterable[Delta]) -> Parts:
    found = Parts()
    ids: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        kind = type(delta).__name__
        found.order += [] if found.order[-1:] == [kind] and kind != "ToolStart" else [kind]
        match delta:
            case Content(text):
                assert text
                found.content += text
            case Reasoning(text):
                assert text
                found.reasoning += text
            case ToolStart(index, call_id, name):
                assert index == len(ids)
                ids.append(call_id)
                arguments.append("")
                found.calls.append((name, None))
            case ToolArguments(index, text):
                assert index == len(ids) - 1
                arguments[index] += text
    assert len(set(ids)) == len(ids)
    found.calls = [(name, json.loads(text)) for (name, _), text in zip(found.calls, arguments, strict=True)]
    return found


@st.composite
def pieces(draw: st.DrawFn, words: Sequence[str]) -> tuple[str, list[str]]:
    """A text made of these words, and the same cut anywhere."""
    text = "".join(draw(st.lists(st.sampled_from(words), max_size=14)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
