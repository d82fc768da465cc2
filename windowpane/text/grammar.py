"""What an answer may be: a JSON schema, a regular expression, one of several texts, a grammar.

The work is llguidance's, in processes of its own (`grammar_pool`). `Grammars` compiles for one tokenizer. A
`CompiledGrammar` is what a request carries: the engine asks its matcher, token by token, what may come next, and
samples nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windowpane.text.grammar_pool import GrammarError, GrammarPool, PooledAnswer, PooledGrammar
from windowpane.text.grammar_worker import Source, Words
from windowpane.text.plain_schema import is_plain
from windowpane.text.tokenizer import Tokenizer

__all__ = ["CompiledGrammar", "GrammarError", "Grammars", "Thought", "json_rules"]

# Between the parts of a JSON text. Bounded: a model that has begun to write spaces may never stop.
JSON_WHITESPACE = r"[ \t\r\n]{1,40}"
AFTER_THOUGHT = r"[ \n]{0,4}"
# Of what a request may send. Beyond them the library itself gives up, or takes long to find that it must.
MAX_SOURCE_BYTES = 2**18
MAX_CHOICE_BYTES = 2**23
MAX_DEPTH = 100
EXACT_INTEGERS = 2**53
OUR_RULES = "x-guidance"  # the library's keyword for what a schema leaves open


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning that may stand in front of a constrained answer, between its markers.

    `is_open`: the prompt has written `start` already, so that it must end before the answer begins. `answer_start`
    is written in front of an answer that is text; calls bring their own.
    """

    start: str
    end: str
    is_open: bool
    answer_start: str = ""


class Grammars:
    """Compiles grammars for one tokenizer.

    The first one starts a process and prepares the vocabulary there: up to two seconds for 262,144 tokens, which
    `prepare` spends ahead of time. Others take a millisecond or two, and one that was compiled before next to nothing.
    With a `thought` every answer may begin with one, and only the rest is constrained.
    """

    def __init__(self, tokenizer: Tokenizer, thought: Thought | None = None) -> None:
        self._tokenizer = tokenizer
        self._thought = thought
        self._pool = GrammarPool(partial(_words, tokenizer), lambda text: tokenizer.encode_text(text))

    def after(self, thought: Thought | None) -> Grammars:
        """The same, for answers that may begin with a thought."""
        other = Grammars(self._tokenizer, thought)
        other._pool = self._pool
        return other

    def prepare(self) -> None:
        """Make the vocabulary ready, if it is not."""
        self._pool.start()

    def close(self) -> None:
        """End the processes. They also end when this object goes, or the program."""
        self._pool.close()

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

    def structured(self, kinds: Mapping[str, Any]) -> CompiledGrammar:
        """By the one name among json, json_object, regex, choice and grammar."""
        compilers: dict[str, Callable[[Any], CompiledGrammar]] = {
            "json": self.json_schema,
            "json_object": lambda _: self.json_object(),
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.lark,
        }
        if len(kinds) != 1 or not kinds.keys() <= compilers.keys():
            raise GrammarError(f"give exactly one of {', '.join(compilers)}, not {', '.join(kinds) or 'none'}")
        ((name, value),) = kinds.items()
        return compilers[name](value)

    def json_object(self) -> CompiledGrammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | str) -> CompiledGrammar:
        """JSON by a schema (or its text). Keywords that cannot be enforced are errors, never ignored."""
        rules = json_rules(schema)
        text = json.dumps(rules)
        plain = is_plain({name: rules[name] for name in rules if name != OUR_RULES}, text)
        return self._compile("json_schema", text, "the JSON schema", is_plain_schema=plain)

    def regex(self, pattern: str) -> CompiledGrammar:
        """Text that a regular expression matches as a whole. There is no look-around."""
        return self._compile("regex", _text(pattern, "a regex"), f"the regex {_short(pattern)}")

    def lark(self, text: str) -> CompiledGrammar:
        """A grammar in llguidance's variant of Lark, or in GBNF (EBNF with `::=`, as llama.cpp writes it)."""
        return self._compile("user_lark", _text(text, "a grammar"), "the grammar")

    def choice(self, texts: Sequence[str]) -> CompiledGrammar:
        """One of several texts, 100,000 of them if need be."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"a choice is a list of texts that are not empty, not {_short(repr(texts))}")
        return self._compile("choice", tuple(texts), "the choice")

    def from_rules(self, lark: str, what: str) -> CompiledGrammar:
        """Rules that are ours, not a user's; `what` names them in errors."""
        return self._compile("lark_grammar", lark, what)

    def from_source(self, source: Source) -> CompiledGrammar:
        """What another process has made of a request: see `CompiledGrammar.source`."""
        return CompiledGrammar(self._pool, self._pool.compile(source), frozenset(self._tokenizer.stop_ids))

    def markup(self, text: str) -> str:
        """Text with markers in it, as grammars write it: special tokens by their number, others as they are."""
        parts = [(part, special) for _, part, special in self._tokenizer.split_special(text) if part]
        return " ".join(json.dumps(part) if special is None else f"<[{special}]>" for part, special in parts)

    def _compile(
        self, kind: Any, text: str | tuple[str, ...], what: str, *, is_plain_schema: bool = False
    ) -> CompiledGrammar:
        if find_spec("llguidance") is None:
            raise GrammarError('structured output needs llguidance: pip install "windowpane[engine]"')
        if not self._tokenizer.stop_ids:
            raise GrammarError(
                f"{self._tokenizer.files.source} names no stop token, and a constrained answer ends with one; "
                "set eos_token_id in its generation_config.json"
            )
        size, most = (len(text), MAX_SOURCE_BYTES) if isinstance(text, str) else (sum(map(len, text)), MAX_CHOICE_BYTES)
        if size > most:
            raise GrammarError(f"{what} cannot be used: it has {size:,} characters, and at most {most:,} are taken")
        thought = None if self._thought is None else self._thought_rules(self._thought, kind == "lark_grammar")
        try:
            return self.from_source(Source(kind, text, thought, is_plain_schema))
        except GrammarError as error:
            raise GrammarError(f"{what} cannot be used: {error}") from None

    def _thought_rules(self, thought: Thought, is_ours: bool) -> str:
        end = self.markup(thought.end)
        is_token = end.startswith("<")
        inside = f"inside: /(?s:.*)/ {end}" if is_token else f"inside[suffix={end}]: /(?s:.*)/"
        whole = "inside GAP" if thought.is_open else f"({self.markup(thought.start)} inside GAP)?"
        head = "" if is_ours else self.markup(thought.answer_start)
        return f"start: {whole} {head} @answer\n{inside}\nGAP: /{AFTER_THOUGHT}/"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for requests, any number of them."""

    _pool: GrammarPool
    _pooled: PooledGrammar
    stop_ids: frozenset[int]

    @property
    def source(self) -> Source:
        return self._pooled.source

    def matcher(self) -> AnswerMatcher:
        return AnswerMatcher(self._pool, self._pool.answer(self._pooled))


class AnswerMatcher:
    """Where one answer stands in its grammar (`request.Matcher`)."""

    def __init__(self, pool: GrammarPool, answer: PooledAnswer) -> None:
        self._pool = pool
        self._answer = answer
        self._is_asked = False

    def accept(self, token: int) -> None:
        self._answer.tokens.append(token)  # one that does not fit is told by `allowed`

    def ask(self, *, may_stop: bool) -> None:
        self._pool.ask(self._answer, may_stop)
        self._is_asked = True

    def allowed(self, *, may_stop: bool) -> NDArray[np.uint32]:
        if not self._is_asked:
            self.ask(may_stop=may_stop)
        self._is_asked = False
        return self._pool.take(self._answer)

    def ahead(self, tokens: NDArray[np.int32]) -> AnswerMatcher:
        return AnswerMatcher(self._pool, self._answer.ahead(tokens.tolist()))


def _words(tokenizer: Tokenizer) -> Words:
    ids = range(tokenizer.id_count)
    texts = [tokenizer.token_bytes(i) for i in ids]
    special = [i for i in ids if not texts[i] and tokenizer.token_bytes(i, False)]
    for i in special:
        texts[i] = tokenizer.token_bytes(i, False)
    return Words(texts, special, tokenizer.bos_id, sorted(tokenizer.stop_ids))


def json_rules(schema: Mapping[str, Any] | str) -> dict[str, Any]:
    """A schema as it goes into a grammar, with our rules for what it leaves open."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise GrammarError(f"a JSON schema is an object, not {type(schema).__name__}")
    _check(schema)
    return {**schema, OUR_RULES: {"whitespace_pattern": JSON_WHITESPACE, "lenient": False}}


def _check(schema: Mapping[str, Any]) -> None:
    """Refuse what the library would read otherwise than it is written: deep nesting, and numbers that it rounds."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner = [value for container in level for value in _parts(container)]
        for value in inner:
            if isinstance(value, int) and abs(value) > EXACT_INTEGERS:
                raise GrammarError(f"the JSON schema has {_short(str(value))}, and integers beyond 2⁵³ are not exact")
        level = [value for value in inner if isinstance(value, Mapping | list)]
        if not level:
            return
    raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} deep")


def _parts(container: Any) -> Iterable[Any]:
    if isinstance(container, Mapping):
        return (value for name, value in container.items() if name not in ("default", "examples", "example"))
    return container  # type: ignore[no-any-return]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} is a text that is not empty, not {value!r}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")
