"""Schemas that need no trial: small ones, of keywords whose grammar grows with their number and nothing else.

An ordinary schema of an ordinary client is plain: objects, arrays, texts, numbers, enums of texts. It has no reference,
pattern, bound or alternative, and nothing in it can contradict the rest, so it compiles, in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHARACTERS = 4096
MAX_SCHEMAS = 64  # one inside another; 128 optional properties take 7 ms, and 64 take 2.5

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


def is_plain(schema: Mapping[str, Any], text: str) -> bool:
    """`text` is the schema as JSON in ASCII. Half a surrogate pair would be an error, so none is let through."""
    return len(text) <= MAX_CHARACTERS and "\\ud" not in text and _count(schema) <= MAX_SCHEMAS


def _count(schema: Mapping[str, Any]) -> int:
    """How many schemas this one is made of, itself included; more than are taken where one of them is not plain."""
    waiting: list[Any] = [schema]
    for count in range(1, MAX_SCHEMAS + 1):
        one = waiting.pop()
        if not isinstance(one, dict) or not all(_is_plain_keyword(name, one) for name in one):
            break
        waiting.extend(_inner(one))
        if not waiting:
            return count
    return MAX_SCHEMAS + 1


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    yield from schema.get("properties", {}).values()
    if "items" in schema:
        yield schema["items"]


def _is_plain_keyword(name: str, schema: dict[str, Any]) -> bool:
    value = schema[name]
    match name:
        case "title" | "description":
            return isinstance(value, str)
        case "type":
            return isinstance(value, str) and value in _TYPES
        case "properties":
            return isinstance(value, dict)
        case "items":
            return True  # looked at by itself
        case "required":
            named = schema.get("properties")
            return isinstance(named, dict) and _are_texts(value) and set(value) <= named.keys()
        case "additionalProperties":
            return isinstance(value, bool)
        case "enum":
            return schema.get("type", "string") == "string" and bool(value) and _are_texts(value)
        case _:
            return False


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
