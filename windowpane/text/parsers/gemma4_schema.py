"""JSON schemas as grammar rules for Gemma 4's own way to write values: bare keys, and quotes that are tokens.

The rules may allow less than a schema does, never more: members come in the order in which templates sort them, and no
others than those declared. A keyword that cannot be enforced is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from windowpane.text.grammar import GrammarError, json_rules

# Say nothing about what is allowed, or widen it. `format` is an annotation unless a validator opts in.
ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "format"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties", "nullable", "x-guidance"),
}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": _LIMITS,
    "number": _LIMITS,
    "boolean": (),
    "null": (),
}
_KEY = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]*")
_ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}


class Gemma4Rules:
    """Grows a set of rules. `add` names the rule for a schema; `quote` is the quote token as grammars write it."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._rules: dict[str, str] = {}
        self._of_reference: dict[str, str] = {}

    @property
    def rules(self) -> list[str]:
        return [f"{name}: {body}" for name, body in self._rules.items()]

    def add(self, schema: Mapping[str, Any], what: str) -> str:
        """The rule for values by this schema, and all rules it needs. `what` names it in errors."""
        self._of_reference = {}
        return self._value(schema, schema, what)

    def _value(self, schema: Any, root: Mapping[str, Any], what: str) -> str:
        if schema is True or schema == {}:
            schema = _ANYTHING
        if not isinstance(schema, Mapping):
            raise GrammarError(f"{what}: a schema is an object, not {schema!r}")
        if "$ref" in schema:
            return self._reference(schema["$ref"], root, what)
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._rule(" | ".join(self._literal(value, what) for value in values))
        if "anyOf" in schema:
            _refuse_others(schema, ("anyOf",), what)
            return self._rule(" | ".join(self._value(part, root, what) for part in schema["anyOf"]))
        kinds = schema.get("type", _ANYTHING["type"])
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if unknown := [kind for kind in kinds if kind not in _KEYWORDS]:
            raise GrammarError(f"{what}: there is no type {unknown[0]!r}")
        _refuse_others(schema, ("type", *(keyword for kind in kinds for keyword in _KEYWORDS[kind])), what)
        if schema.get("nullable") is True and "null" not in kinds:
            kinds.append("null")
        return self._rule(" | ".join(self._kind(kind, schema, root, what) for kind in kinds))

    def _kind(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], what: str) -> str:
        if kind == "object":
            return self._object(schema, root, what)
        if kind == "array":
            return self._array(schema, root, what)
        if kind == "string":
            return self._string(schema)
        # Numbers and words are written as in JSON, whose rules know their limits.
        return (
            f"%json {json.dumps(json_rules({'type': kind} | {k: schema[k] for k in _KEYWORDS[kind] if k in schema}))}"
        )

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], what: str) -> str:
        members = schema.get("properties") or {}
        required = set(schema.get("required", ()))
        if unknown := required - set(members):
            raise GrammarError(f"{what}: {min(unknown)!r} is required but not declared")
        if odd := [name for name in members if not _KEY.fullmatch(name)]:
            raise GrammarError(f"{what}: {odd[0]!r} cannot be written without quotes, as Gemma 4 writes names")
        if not members:
            return '"{}"' if schema.get("additionalProperties") is False else self._any_object(root, what)
        names = sorted(members, key=str.lower)
        pairs = [f"{json.dumps(name + ':')} {self._value(members[name], root, f'{what}.{name}')}" for name in names]
        rest = self._rule('""')  # what may follow each member, from the last one backwards
        firsts: list[str] = []
        for name, pair in zip(reversed(names), reversed(pairs), strict=True):
            firsts = [f"{pair} {rest}"] if name in required else [f"{pair} {rest}", *firsts]
            more = f'"," {pair}' if name in required else f'("," {pair})?'
            rest = self._rule(f"{more} {rest}")
        none = "" if required else ' | "{}"'
        return f'"{{" ({" | ".join(firsts)}) "}}"{none}'

    def _any_object(self, root: Mapping[str, Any], what: str) -> str:
        pair = f"/[A-Za-z_][A-Za-z0-9_]*:/ {self._anything(root, what)}"
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _anything(self, root: Mapping[str, Any], what: str) -> str:
        if "anything" not in self._rules:
            self._rules["anything"] = ""  # it contains itself
            kinds = [self._kind(kind, {}, root, what) for kind in _ANYTHING["type"]]
            self._rules["anything"] = " | ".join(kinds)
        return "anything"

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any], what: str) -> str:
        items = schema.get("items", True)
        item = self._anything(root, what) if items in (True, {}) else self._value(items, root, f"{what}[]")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        text = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        if self._quote.startswith("<"):
            return f"{self._quote} {text} {self._quote}"
        return f"{self._quote} {self._rule(text, f'[suffix={self._quote}]')}"

    def _literal(self, value: Any, what: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, int | float | None):
            return json.dumps(json.dumps(value))
        raise GrammarError(f"{what}: {value!r} cannot be one of its values; texts, numbers, booleans and null can")

    def _reference(self, reference: Any, root: Mapping[str, Any], what: str) -> str:
        if reference in self._of_reference:
            return self._of_reference[reference]
        target: Any = root
        for part in str(reference).removeprefix("#").split("/")[1:]:
            target = target.get(part) if isinstance(target, Mapping) else None
        if not str(reference).startswith("#") or target is None:
            raise GrammarError(f"{what}: {reference!r} leads nowhere in this schema")
        name = self._of_reference[reference] = self._rule("")  # it may contain itself
        self._rules[name] = self._value(target, root, what)
        return name

    def _rule(self, body: str, options: str = "") -> str:
        name = f"value_{len(self._rules)}"
        self._rules[name + options] = body
        return name


def _refuse_others(schema: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    others = set(schema) - set(known) - ANNOTATIONS
    if others:
        raise GrammarError(f"{what}: {min(others)!r} cannot be enforced in Gemma 4's form of a call; leave it out")
