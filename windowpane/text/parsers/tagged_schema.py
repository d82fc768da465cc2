"""JSON schemas as grammar rules for calls whose arguments stand one by one: between tags, or as `name=value`.

Between tags a string is plain text, which lasts until its tag ends it; all else is JSON. The rules may allow less than
a schema does, never more: members come in the order in which they are declared, and no others than those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from windowpane.text.grammar import GrammarError, json_rules
from windowpane.text.parsers.gemma4_schema import ANNOTATIONS
from windowpane.text.parsers.typed import ANYTHING, referenced, types_of

_TEXT_KEYWORDS = {"type", "minLength", "maxLength"}
_KEY = re.compile(r"[^\s<>\"]+")
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"


def members_of(schema: Mapping[str, Any], what: str, key: re.Pattern[str] = _KEY) -> list[tuple[str, Any, bool]]:
    """The declared members of an object, and whether each is required."""
    members = schema.get("properties") or {}
    required = set(schema.get("required", ()))
    if unknown := required - set(members):
        raise GrammarError(f"{what}: {min(unknown)!r} is required but not declared")
    if odd := [name for name in members if not key.fullmatch(name)]:
        raise GrammarError(f"{what}: {odd[0]!r} cannot be the name of an argument in this form of a call")
    return [(name, members[name], name in required) for name in members]


def takes_anything(schema: Mapping[str, Any]) -> bool:
    """Whether a function that declares no arguments takes any."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def json_value(schema: Any, root: Mapping[str, Any]) -> str:
    """A value in JSON. References lead into the schema of the whole."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    own = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps(json_rules({**definitions, **own}))}"


class TaggedRules:
    """Grows a set of rules for arguments between tags. `markup` is the grammar's way to write text and markers.

    A key stands between `key_tags`, a value behind it, and `value_end` ends that; `newline` stands before it.
    """

    def __init__(
        self, markup: Callable[[str], str], key_tags: tuple[str, str], value_end: str, newline: str = ""
    ) -> None:
        self._markup = markup
        self._key_tags = key_tags
        self._value_end = value_end
        self._newline = newline
        self._rules: dict[str, str] = {}

    @property
    def rules(self) -> list[str]:
        return [f"{name}: {body}" for name, body in self._rules.items()]

    def members(self, schema: Mapping[str, Any], what: str) -> str:
        opening, closing = self._key_tags
        if takes_anything(schema):
            return f'({self._markup(opening)} {ANY_KEY} {self._markup(closing)} {self._json({}, {})} "\\n")*'
        parts = []
        for name, value, is_required in members_of(schema, what):
            ways = " | ".join(self._value(value, schema, f"{what}.{name}"))
            member = self._rule(f'{self._markup(opening + name + closing)} ({ways}) "\\n"')
            parts.append(member if is_required else f"{member}?")
        return " ".join(parts)

    def _value(self, schema: Any, root: Mapping[str, Any], what: str) -> list[str]:
        """The ways to write a value, each with the tag that ends it."""
        types = types_of(schema, root)
        if "string" not in types or types == ANYTHING:
            return [self._json(schema, root)]
        if "$ref" in schema:
            return self._value(referenced(schema["$ref"], root), root, what)
        if "const" in schema or "enum" in schema:
            return [self._literal(value, what) for value in schema.get("enum", [schema.get("const")])]
        if "anyOf" in schema:
            return [way for part in schema["anyOf"] for way in self._value(part, root, what)]
        others = sorted(types - {"string"})
        about_text = set(schema) & {"pattern", "oneOf", "allOf", "not"} if others else set(schema) - ANNOTATIONS
        if unknown := about_text - _TEXT_KEYWORDS:
            raise GrammarError(f"{what}: {min(unknown)!r} cannot be enforced in this form of a call; leave it out")
        text = self._text(schema.get("minLength", 0), schema.get("maxLength"))
        return [text, self._json({**schema, "type": others}, root)] if others else [text]

    def _json(self, schema: Any, root: Mapping[str, Any]) -> str:
        return f"{json_value(schema, root)} {self._markup(self._newline + self._value_end)}"

    def _text(self, least: int, most: int | None) -> str:
        newline = self._newline.replace("\n", r"\n")
        text = f"/(?s:.{{{least},{'' if most is None else most}}}){newline}/"
        end = self._markup(self._value_end)
        is_token = end.startswith("<")
        return self._rule(f"{text} {end}" if is_token else text, "" if is_token else f"[suffix={end}]")

    def _literal(self, value: Any, what: str) -> str:
        if not isinstance(value, str | int | float | None):
            raise GrammarError(f"{what}: {value!r} cannot be one of its values; texts, numbers, booleans and null can")
        return self._markup((value if isinstance(value, str) else json.dumps(value)) + self._newline + self._value_end)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules[name + options] = body
        return name


def keyword_arguments(schema: Mapping[str, Any], what: str) -> str:
    """`name=value, …` with values in JSON; optional ones may be left out."""
    if takes_anything(schema):
        pair = f'{ANY_KEY} "=" {json_value({}, {})}'
        return f'({pair} (", " {pair})*)?'
    rest, is_optional = "", True
    firsts: list[str] = []
    for name, value, is_required in reversed(members_of(schema, what, re.compile(r"[^\W\d]\w*"))):
        pair = f"{json.dumps(name + '=')} {json_value(value, schema)}"
        firsts = [f"{pair} {rest}", *([] if is_required else firsts)]
        rest = f'(", " {pair}){"" if is_required else "?"} {rest}'
        is_optional = is_optional and not is_required
    return f"({' | '.join(firsts)}){'?' if is_optional else ''}" if firsts else ""
