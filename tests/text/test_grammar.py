"""What grammars let through, token by token, with the real vocabularies."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.models import GEMMA, SMOLLM2, embedded_tokenizer
from windowpane.text import Tokenizer
from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars, Thought
from windowpane.text.plain_schema import is_plain

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return embedded_tokenizer(request.param)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(scope="module")
def small() -> Grammars:
    return Grammars(embedded_tokenizer(SMOLLM2))


def allowed(words: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def fits(grammar: CompiledGrammar, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a model may write this text and stop."""
    matcher = grammar.matcher()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(matcher.allowed(may_stop=True)):
            return False
        matcher.accept(token)
    return allowed(matcher.allowed(may_stop=True)) >= tokenizer.stop_ids


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"name": "é \\"quoted\\" 你", "age": 0}', True),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": 36', False),
        ('{"name": "Ada", "age": 151}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": 36, "more": 1}', False),
        ('{"name": "a name that is too long", "age": 36}', False),
        ("Sure! Here it is", False),
        ("", False),
    ],
)
def test_a_json_schema_is_kept(text: str, is_fine: bool, grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert fits(grammars.json_schema(PERSON), text, tokenizer) is is_fine
    assert fits(grammars.json_schema(json.dumps(PERSON)), text, tokenizer) is is_fine


def test_white_space_in_json_is_bounded(small: Grammars) -> None:
    """A model that has begun to write spaces may never stop."""
    tokenizer = embedded_tokenizer(SMOLLM2)
    grammar = small.json_object()
    assert fits(grammar, '{"a":' + 30 * " " + "1}", tokenizer)
    assert not fits(grammar, '{"a":' + 50 * " " + "1}", tokenizer)


@pytest.mark.parametrize(
    ("make", "fine", "wrong"),
    [
        (lambda g: g.json_object(), ["{}", '{"a": [1, null, {"b": true}]}'], ["[]", "1", '"x"']),
        (lambda g: g.regex(r"\d{3}-[a-c/]+"), ["123-a/b"], ["12-a", "123-d", " 123-a"]),
        (lambda g: g.choice(["yes", "no", 'may"be\n']), ["yes", "no", 'may"be\n'], ["ye", "yes no", "maybe"]),
        (lambda g: g.lark('start: "a" B+\nB: /[bc]/'), ["ab", "acb"], ["a", "b"]),
        (lambda g: g.lark('root ::= "a" [bc]+'), ["ab", "acb"], ["a", "b"]),
        (lambda g: g.from_response_format({"type": "json_object"}), ['{"a": 1}'], ["1"]),
        (
            lambda g: g.from_response_format({"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}),
            ['{"name": "Bo", "age": 1}'],
            ["{}"],
        ),
    ],
)
def test_each_kind_lets_its_texts_through_and_no_others(make: Any, fine: list[str], wrong: list[str]) -> None:
    tokenizer = embedded_tokenizer(SMOLLM2)
    grammar = make(Grammars(tokenizer))
    assert [text for text in fine if not fits(grammar, text, tokenizer)] == []
    assert [text for text in wrong if fits(grammar, text, tokenizer)] == []


def test_plain_text_needs_no_grammar(small: Grammars) -> None:
    assert small.from_response_format({"type": "text"}) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.json_schema({"type": "strin"}), "JSON schema cannot be used: .*strin"),
        (lambda g: g.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (
            lambda g: g.json_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
            "uniqueItems",
        ),
        (lambda g: g.json_schema({"$ref": "file:///etc/hosts"}), "cannot be used"),
        (lambda g: g.json_schema("{"), "no JSON"),
        (lambda g: g.json_schema([1]), "is an object, not list"),
        (lambda g: g.regex("(a"), r"regex '\(a' cannot be used: .*"),
        (lambda g: g.regex("(?=a)a"), "look-around"),
        (lambda g: g.regex(r"[^\s\S]"), "no text fits"),
        (lambda g: g.regex(""), "not empty"),
        (lambda g: g.lark("start: nothing"), "nothing"),
        (lambda g: g.lark("root ::= nothing"), "nothing"),
        (lambda g: g.choice([]), "not empty"),
        (lambda g: g.choice("yes"), "list of texts"),
        (lambda g: g.from_response_format({"type": "xml"}), "'xml'"),
        (lambda g: g.from_response_format({"type": "json_schema"}), "json_schema.schema"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(make: Any, message: str, small: Grammars) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        make(small)
    assert isinstance(caught.value, ValueError)
    assert "<" not in str(caught.value).split("\n")[0] or "(?" in str(caught.value)


TEXTS = st.text(max_size=5)
LEAVES = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"]).map(lambda t: {"type": t}),
    st.fixed_dictionaries({"enum": st.lists(TEXTS, min_size=1, max_size=4)}, optional={"type": st.just("string")}),
    st.fixed_dictionaries({}, optional={"title": TEXTS, "description": TEXTS}),
)


def plain_objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def an_object(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        required = st.lists(st.sampled_from(sorted(properties)), max_size=4) if properties else st.just([])
        optional = {"type": st.just("object"), "required": required, "additionalProperties": st.booleans()}
        return st.fixed_dictionaries({"properties": st.just(properties)}, optional=optional)

    arrays = st.fixed_dictionaries({"items": inner}, optional={"type": st.just("array")})
    return st.dictionaries(TEXTS, inner, max_size=4).flatmap(an_object) | arrays


class TestPlainSchemas:
    """They are not tried before an answer begins, so none may turn out to be wrong then."""

    @given(st.recursive(LEAVES, plain_objects, max_leaves=8))
    @settings(max_examples=60)
    def test_each_compiles(self, small: Grammars, schema: dict[str, Any]) -> None:
        grammar = small.json_schema(schema)
        assert grammar.source.is_plain_schema or "\\ud" in json.dumps(schema)
        small.from_source(replace(grammar.source, is_plain_schema=False))  # raises where it does not
        grammar.matcher().allowed(may_stop=True)

    @pytest.mark.parametrize(
        "schema",
        [
            PERSON,
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"type": "array", "items": {"pattern": "a*"}},
            {"type": "array", "items": True},
            {"type": "string", "enum": []},
            {"type": "integer", "enum": ["a"]},
            {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            {"properties": {f"{i}": {} for i in range(64)}},
            {"enum": ["x" * 4096]},
        ],
    )
    def test_others_are_tried(self, schema: dict[str, Any]) -> None:
        assert not is_plain(schema, json.dumps(schema))

    def test_the_shared_worker_alone_compiles_them(self) -> None:
        grammars = Grammars(embedded_tokenizer(SMOLLM2))
        plain = {"type": "object", "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}}}
        assert fits(grammars.json_schema(plain), '{"name": "x", "kind": "a"}', embedded_tokenizer(SMOLLM2))
        assert grammars._pool._idle == []
        grammars.json_schema(PERSON)
        assert len(grammars._pool._idle) == 1
        grammars.close()


class TestStopTokens:
    def test_come_when_the_text_may_end_and_alone_when_it_must(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        matcher = grammars.regex("ab?").matcher()
        assert not allowed(matcher.allowed(may_stop=True)) & tokenizer.stop_ids
        matcher.accept(tokenizer.encode("a", add_special_tokens=False)[0])
        assert allowed(matcher.allowed(may_stop=True)) > tokenizer.stop_ids
        assert not allowed(matcher.allowed(may_stop=False)) & tokenizer.stop_ids
        matcher.accept(tokenizer.encode("b", add_special_tokens=False)[0])
        assert allowed(matcher.allowed(may_stop=True)) == tokenizer.stop_ids
        assert allowed(matcher.allowed(may_stop=False)) == tokenizer.stop_ids  # nothing else is left

    def test_no_special_token_is_text(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        everything = grammars.regex(r"(?s:.*)").matcher().allowed(may_stop=False)
        special = {i for i in range(tokenizer.id_count) if not tokenizer.token_bytes(i)}
        assert special and not allowed(everything) & special

    def test_without_one_there_is_no_grammar(self) -> None:
        tokenizer = embedded_tokenizer(SMOLLM2)
        bare = SimpleNamespace(stop_ids=frozenset(), files=replace(tokenizer.files, source="bare"))
        with pytest.raises(GrammarError, match="bare names no stop token"):
            Grammars(cast(Tokenizer, bare)).json_object()


def test_requests_share_a_grammar_and_not_their_places_in_it(small: Grammars) -> None:
    tokenizer = embedded_tokenizer(SMOLLM2)
    grammar = small.choice(["ax", "by"])
    one, other = grammar.matcher(), grammar.matcher()
    one.accept(tokenizer.encode("a")[0])
    assert allowed(one.allowed(may_stop=True)) == {tokenizer.encode("x")[0]}
    assert allowed(other.allowed(may_stop=True)) >= {tokenizer.encode("a")[0], tokenizer.encode("b")[0]}


def test_a_token_that_does_not_fit_ends_the_matter(small: Grammars) -> None:
    matcher = small.choice(["ax"]).matcher()
    matcher.accept(embedded_tokenizer(SMOLLM2).encode("q")[0])
    with pytest.raises(GrammarError, match="cannot go on"):
        matcher.allowed(may_stop=True)


@pytest.mark.parametrize("start", ["<think>", "<|im_start|>"], ids=["text", "a special token"])
def test_a_thought_may_come_first(start: str, small: Grammars) -> None:
    tokenizer = embedded_tokenizer(SMOLLM2)
    answer = '{"a": 1}'
    end = {"<think>": "</think>", "<|im_start|>": "<repo_name>"}[start]
    thought = f'hm, {{"b" </b>\n{end}\n\n'
    closed = small.after(Thought(start, end, is_open=False)).json_object()
    assert fits(closed, answer, tokenizer) and fits(closed, start + thought + answer, tokenizer)
    assert not fits(closed, thought + answer, tokenizer)
    begun = small.after(Thought(start, end, is_open=True)).json_object()
    assert fits(begun, thought + answer, tokenizer) and not fits(begun, answer, tokenizer)
    assert not fits(begun, thought + "no", tokenizer)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_is_valid(seed: int, grammars: Grammars, tokenizer: Tokenizer) -> None:
    draw = random.Random(seed)
    matcher = grammars.json_schema(PERSON).matcher()
    tokens: list[int] = []
    while not (tokens and tokens[-1] in tokenizer.stop_ids):
        tokens.append(draw.choice(sorted(allowed(matcher.allowed(may_stop=True)))))
        matcher.accept(tokens[-1])
    person = json.loads(tokenizer.decode(tokens[:-1]))
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 150 and len(person["name"]) <= 12


def test_nothing_imports_the_library_before_it_is_needed() -> None:
    modules = "windowpane.cli.main, windowpane.schedule.scheduler, windowpane.text.parsers"
    code = f"import sys, {modules}; print('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
