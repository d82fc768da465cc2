"""What an answer may be: a JSON schema, a regular expression, one of several texts, a grammar.

The work is llguidance's. `Grammars` compiles them for one tokenizer. A `CompiledGrammar` is what a request carries: the
engine asks its matcher, token by token, what may come next, and samples nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windowpane.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Between the parts of a JSON text. Bounded: a model that has begun to write spaces may never stop.
JSON_WHITESPACE = r"[ \t\r\n]{1,40}"
AFTER_THOUGHT = r"[ \n]{0,4}"


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning that may stand in front of a constrained answer, between its markers.

    `is_open`: the prompt has written `start` already, so that it must end before the answer begins.
    """

    start: str
    end: str
    is_open: bool


class Grammars:
    """Compiles grammars for one tokenizer.

    The first one prepares the vocabulary: up to two seconds for 262,144 tokens, which `prepare` spends ahead of time.
    Others take about a millisecond. With a `thought` every answer may begin with one, and only the rest is constrained.
    """

    def __init__(self, tokenizer: Tokenizer, thought: Thought | None = None) -> None:
        self._tokenizer = tokenizer
        self._thought = thought

    def after(self, thought: Thought | None) -> Grammars:
        """The same, for answers that may begin with a thought."""
        other = Grammars(self._tokenizer, thought)
        other._vocabulary = self._vocabulary
        return other

    def prepare(self) -> None:
        """Make the vocabulary ready, if it is not."""
        _ = self._vocabulary

    def from_response_format(self, response_format: Mapping[str, Any]) -> CompiledGrammar | None:
        """By the OpenAI API's `response_format`; None where that is plain text."""
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return self.json_object()
        if kind == "json_schema":
            wrapper = response_format.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
            if schema is None:
                raise GrammarError('response_format of type "json_schema" needs the schema in json_schema.schema')
            return self.json_schema(schema)
        raise GrammarError(f'response_format.type is "text", "json_object" or "json_schema", not {kind!r}')

    def json_object(self) -> CompiledGrammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | str) -> CompiledGrammar:
        """JSON by a schema (or its text). Keywords that cannot be enforced are errors, never ignored."""
        return self._compile({"json_schema": json_rules(schema)}, "the JSON schema")

    def regex(self, pattern: str) -> CompiledGrammar:
        """Text that a regular expression matches as a whole. There is no look-around."""
        from llguidance import LLMatcher

        grammars = json.loads(LLMatcher.grammar_from_regex(_text(pattern, "a regex")))["grammars"]
        return self._compile(grammars[0], f"the regex {_short(pattern)}")

    def lark(self, text: str) -> CompiledGrammar:
        """A grammar in llguidance's variant of Lark, or in GBNF (EBNF with `::=`, as llama.cpp writes it)."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(_text(text, "a grammar"))
        except Exception as error:  # the converter raises several kinds, and plain ones
            raise GrammarError(f"the grammar cannot be read: {error}") from None
        return self.from_rules(lark, "the grammar")

    def choice(self, texts: Sequence[str]) -> CompiledGrammar:
        """One of several texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"a choice is a list of texts that are not empty, not {texts!r}")
        return self.from_rules("start: " + " | ".join(map(json.dumps, texts)), "the choice")

    def from_rules(self, lark: str, what: str) -> CompiledGrammar:
        """Rules that are ours, not a user's; `what` names them in errors."""
        return self._compile({"lark_grammar": lark}, what)

    def marker(self, text: str) -> str:
        """A marker as grammars write it: special tokens by their number, others as the text they are."""
        token = self._tokenizer.token_id(text)
        is_special = token is not None and not self._tokenizer.token_bytes(token, skip_special_tokens=True)
        return f"<[{token}]>" if is_special else json.dumps(text)

    def _compile(self, answer: dict[str, Any], what: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        grammars = [{**answer, "name": "answer"}]
        if self._thought is not None:
            grammars.insert(0, {"name": "thought", "lark_grammar": self._thought_rules(self._thought)})
        limits = LLParserLimits(verbose_errors=False)
        first = LLMatcher(self._vocabulary, json.dumps({"grammars": grammars}), log_level=0, limits=limits)
        if not first.is_error():
            first.compute_bitmask()  # finds what is too complex to follow
        if first.is_error():
            raise GrammarError(f"{what} cannot be used: {_reason(first.get_error())}")
        return CompiledGrammar(first, frozenset(self._tokenizer.stop_ids))

    def _thought_rules(self, thought: Thought) -> str:
        end = self.marker(thought.end)
        is_token = end.startswith("<")
        inside = f"inside: /(?s:.*)/ {end}" if is_token else f"inside[suffix={end}]: /(?s:.*)/"
        whole = "inside GAP" if thought.is_open else f"({self.marker(thought.start)} inside GAP)?"
        return f"start: {whole} @answer\n{inside}\nGAP: /{AFTER_THOUGHT}/"

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise GrammarError('structured output needs llguidance: pip install "windowpane[engine]"') from None
        if not self._tokenizer.stop_ids:
            raise GrammarError(
                f"{self._tokenizer.files.source} names no stop token, and a constrained answer ends with one; "
                "set eos_token_id in its generation_config.json"
            )
        words = _Words(self._tokenizer)
        return LLTokenizer(TokenizerWrapper(words), eos_token=sorted(self._tokenizer.stop_ids))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for requests, any number of them."""

    _first: llguidance.LLMatcher
    stop_ids: frozenset[int]

    def matcher(self) -> AnswerMatcher:
        return AnswerMatcher(self._first.deep_copy(), self.stop_ids)


class AnswerMatcher:
    """Where one answer stands in its grammar (`request.Matcher`)."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)  # one that does not fit is told by `allowed`

    def allowed(self, *, may_stop: bool) -> NDArray[np.uint32]:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_reason(self._matcher.get_error())}")
        if may_stop or not self._matcher.is_accepting():
            return words
        others = words.copy()
        for stop in self._stop_ids:
            others[stop // 32] &= ~np.uint32(1 << stop % 32)
        return others if others.any() else words


class _Words:
    """A tokenizer as llguidance wants it: every token's bytes, and which tokens are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.id_count)
        texts = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if not texts[i] and tokenizer.token_bytes(i, False)]
        for i in self.special_token_ids:
            texts[i] = tokenizer.token_bytes(i, False)
        self.tokens = texts
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.stop_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # so it learns that only whole characters can be encoded
        return self._tokenizer.encode(text, add_special_tokens=False)


def json_rules(schema: Mapping[str, Any] | str) -> dict[str, Any]:
    """A schema as it goes into a grammar, with our rules for what it leaves open."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise GrammarError(f"a JSON schema is an object, not {type(schema).__name__}")
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, "lenient": False}}


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} is a text that is not empty, not {value!r}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")


def _reason(message: str) -> str:
    """The library's words, without the state of its parser."""
    reason = message.split("<state>")[0].replace("<non-verbose/>", "").strip()
    return "no text fits it" if reason == "NoExtensionBias" else reason
