"""Values that are written as plain text, read by what a function's schema says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windowpane.text.parsers.literals import refuse_constant, to_json

ANYTHING = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_PYTHON_WORDS = {"True": True, "False": False, "None": None}  # as templates write earlier calls
MAX_REFERENCES = 16


def read_value(text: str, schema: Any, root: Mapping[str, Any]) -> object:
    """The value of a parameter. A string stays as it is; what is no JSON of an allowed type is a string too."""
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        return _json_value(text.strip(), types)
    except (ValueError, RecursionError):
        return text


def types_of(schema: Any, root: Mapping[str, Any], references: int = 0) -> frozenset[str]:
    """The types that a schema allows, or all of them where it does not say."""
    if not isinstance(schema, Mapping) or references > MAX_REFERENCES:
        return ANYTHING
    if isinstance(schema.get("$ref"), str):
        return types_of(referenced(schema["$ref"], root), root, references + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        named = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
        return frozenset(named | ({"null"} if schema.get("nullable") is True else set()))
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    parts = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(parts, list) and parts:
        return frozenset().union(*(types_of(part, root, references + 1) for part in parts))
    return ANYTHING


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema leads to; None if it leads nowhere."""
    target: Any = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _json_value(text: str, types: frozenset[str]) -> object:
    """The value that this is the JSON of; ValueError if it is none, or its type is not allowed."""
    word = _PYTHON_WORDS.get(text, ...)
    if word is not ... and types != ANYTHING and _type_of(word) in types:
        return word
    value: object = json.loads(text, parse_constant=refuse_constant)
    to_json(value)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if _type_of(value) not in (types | {"integer"} if "number" in types else types):
        raise ValueError(f"{text!r} is none of {', '.join(sorted(types))}")
    return value


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"
