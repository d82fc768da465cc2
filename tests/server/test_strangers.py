"""What strangers may send: grammars that crash their compiler, numbers, names and depths that break what reads them.

Each is answered in its own right, and a stream beside it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running, running
from tests.server.test_refusals import error_of
from tests.text.test_hostile_grammars import chain, deep_rules, nested
from windowpane.server.parsing import Parsers

ANSWER = {"max_tokens": 4}


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    with running(model, parsers=Parsers(tools="hermes")) as server:
        yield server


def forced_call(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize("schema", [chain(3000), nested(300), {"type": "integer", "minimum": -(2**63) - 1}])
@pytest.mark.parametrize(
    "fields",
    [
        lambda s: {"guided_json": s},
        lambda s: {"response_format": {"type": "json_schema", "json_schema": {"schema": s}}},
        lambda s: {"structured_outputs": {"json": s}},
        lambda s: forced_call({"type": "object", "properties": {"a": s}, "required": ["a"]}),
    ],
    ids=["guided_json", "response_format", "structured_outputs", "tools"],
)
def test_schemas_that_crash_their_compiler_are_refused(server: Running, fields: Any, schema: Any) -> None:
    error = error_of(server.chat(**ANSWER, **fields(schema)), 400)
    assert any(reason in error["message"] for reason in ("cannot be used", "deep", "not exact")), error
    answer = server.chat(guided_choice=["yes", "no"], **ANSWER).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_so_are_grammars(server: Running) -> None:
    for text in (deep_rules(5000), "start: " + "(" * 3000 + '"a"' + ")" * 3000, "root ::= " + "[" * 10_000):
        assert "the grammar cannot be used" in error_of(server.chat(guided_grammar=text, **ANSWER), 400)["message"]
    assert server.chat(guided_regex="[ab]", **ANSWER).json()["choices"][0]["message"]["content"] in ("a", "b")


def test_a_choice_may_be_large(server: Running) -> None:
    texts = [f"{i:05}" for i in range(20_000)]
    answer = server.chat(guided_choice=texts, max_tokens=6).json()
    assert answer["choices"][0]["message"]["content"] in texts


def test_literals_spelled_like_special_tokens_are_text(server: Running) -> None:
    answer = server.chat(guided_json={"const": "<eos>"}, max_tokens=20).json()["choices"][0]
    assert (json.loads(answer["message"]["content"]), answer["finish_reason"]) == ("<eos>", "stop")
