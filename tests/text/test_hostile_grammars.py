"""Grammars made to crash, hang or fill whoever compiles them. Each costs its own request and nothing else."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.text.models import SMOLLM2, embedded_tokenizer
from windowpane.text.grammar import AnswerMatcher, GrammarError, Grammars
from windowpane.text.grammar_pool import CACHED_BYTES, _Cache
from windowpane.text.grammar_worker import Source

COLOURS = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(embedded_tokenizer(SMOLLM2))
    yield made
    made.close()


def chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def deep_rules(count: int) -> str:
    rules = "\n".join(f'a{i}: a{i + 1} "x"' for i in range(count))
    return f'start: a0\n{rules}\na{count}: "y"'


ENDLESS = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 18)]}

HOSTILE: dict[str, Callable[[Grammars], Any]] = {
    "a chain of references": lambda g: g.json_schema(chain(3000)),
    "nested objects": lambda g: g.json_schema(nested(1300)),
    "nested objects, as text": lambda g: g.json_schema('{"not":' * 985 + "{}" + "}" * 985),
    "a chain of rules": lambda g: g.lark(deep_rules(5000)),
    "a large pattern": lambda g: g.regex("a" * 2**20),
    "bounds that no machine number holds": lambda g: g.json_schema({"type": "integer", "minimum": -(2**70)}),
    "patterns that never end": lambda g: g.json_schema(ENDLESS),
    "a large choice": lambda g: g.choice(["x" * 1000 + str(i) for i in range(10_000)]),
}


def follow(grammars: Grammars, text: str, matcher: AnswerMatcher) -> bool:
    """Whether the grammar lets this text through, to its end."""
    tokenizer = embedded_tokenizer(SMOLLM2)
    for token in tokenizer.encode_text(text):
        if not is_allowed(matcher.allowed(may_stop=True), token):
            return False
        matcher.accept(token)
    return is_allowed(matcher.allowed(may_stop=True), min(tokenizer.stop_ids))


def is_allowed(mask: Any, token: int) -> bool:
    return bool(np.uint32(mask[token // 32]) >> np.uint32(token % 32) & 1)


@pytest.mark.parametrize("attack", list(HOSTILE))
def test_what_cannot_be_compiled_is_refused_in_bounded_time(grammars: Grammars, attack: str) -> None:
    began = time.process_time()
    with pytest.raises(GrammarError, match=r"\w"):
        HOSTILE[attack](grammars)
    assert time.process_time() - began < 1, "this process did the work"
    assert follow(grammars, "green", grammars.choice(COLOURS).matcher())


def test_others_compile_while_several_never_end(grammars: Grammars) -> None:
    def refused(index: int) -> None:
        with pytest.raises(GrammarError, match=r"processor time|memory"):
            grammars.json_schema({**ENDLESS, "title": str(index)})

    hostile = [threading.Thread(target=refused, args=(i,)) for i in range(2)]
    for thread in hostile:
        thread.start()
    assert follow(grammars, "ab", grammars.regex("ab|ba").matcher())
    assert any(thread.is_alive() for thread in hostile), "it waited for them"
    for thread in hostile:
        thread.join()


def test_a_worker_that_dies_is_replaced_and_its_answers_go_on(grammars: Grammars) -> None:
    """All but the one that killed it: here nobody did."""
    begun = [grammars.choice(COLOURS).matcher() for _ in range(3)]
    first, *rest = embedded_tokenizer(SMOLLM2).encode_text("green")
    for matcher in begun:
        assert is_allowed(matcher.allowed(may_stop=True), first)
        matcher.accept(first)
    shared = grammars._pool._shared
    assert shared is not None
    os.kill(shared._pid, signal.SIGKILL)
    for matcher in begun:
        matcher.ask(may_stop=True)
    for matcher in begun:
        words = matcher.allowed(may_stop=True)
        assert is_allowed(words, rest[0] if rest else min(embedded_tokenizer(SMOLLM2).stop_ids))
    assert grammars._pool._shared is not shared


def test_so_is_the_keeper(grammars: Grammars) -> None:
    grammars.prepare()
    keeper = grammars._pool._keeper
    assert keeper is not None
    keeper.close()
    assert follow(grammars, "red", grammars.regex("red|dead").matcher())


def test_a_grammar_that_took_long_is_followed_apart(grammars: Grammars) -> None:
    """Its worker is its own, so that nobody else waits while it is compiled again."""
    texts = [f"text {i} of {i * 7919 % 1000}" for i in range(100_000)]
    large = grammars.choice(texts)
    assert large._pooled.own is not None
    assert follow(grammars, texts[77_777], large.matcher())
    assert not follow(grammars, "text 5 of 6", large.matcher())
    own = large._pooled.own
    os.kill(own._pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="cannot go on"):
        large.matcher().allowed(may_stop=True)
    assert follow(grammars, "blue", grammars.choice(COLOURS).matcher())
    assert follow(grammars, texts[3], grammars.choice(texts).matcher())


def test_what_was_compiled_is_remembered(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"remembered": {"type": "integer"}}}
    assert grammars.json_schema(schema)._pooled is grammars.json_schema(dict(schema))._pooled


def test_so_is_what_was_refused(grammars: Grammars) -> None:
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(GrammarError):
            grammars.json_schema(ENDLESS)
    assert time.monotonic() - began < 0.1


def test_who_was_refused_is_not_remembered(grammars: Grammars) -> None:
    class Body: ...

    def ask() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(GrammarError):
            grammars.regex("(never closed")
        return weakref.ref(body)

    bodies = [ask(), ask()]
    gc.collect()
    assert [body() for body in bodies] == [None, None]


def test_a_worker_that_compiles_keeps_the_last_grammar_only(grammars: Grammars) -> None:
    def compile(number: int) -> None:
        grammars.json_schema({"type": "object", "properties": {f"{number}-{i}": {"minLength": 1} for i in range(40)}})

    def resident_bytes() -> int:
        worker = grammars._pool._idle[-1]
        return int(Path(f"/proc/{worker._pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    for number in range(10):
        compile(number)
    before = resident_bytes()
    for number in range(10, 60):
        compile(number)
    assert resident_bytes() - before < 10 * 2**20


@pytest.mark.parametrize(
    "texts", [["a", "ab", "abc"], ["a|b", "a.c", "(x)"], ["é\n", "é", "/\\", "#1 &~-"], ["same"] * 3]
)
def test_choices_are_these_texts_and_no_others(grammars: Grammars, texts: list[str]) -> None:
    for text in texts:
        assert follow(grammars, text, grammars.choice(texts).matcher())
    assert not follow(grammars, texts[0] + "?", grammars.choice(texts).matcher())
    assert not follow(grammars, "axc", grammars.choice(texts).matcher())


def test_what_is_remembered_of_large_sources_is_bounded_by_bytes() -> None:
    cache = _Cache()
    sources = [Source("regex", f"{i:03}" * 2**18) for i in range(100)]
    for source in sources:
        cache.add(source, "too large")
    kept = [source for source in sources if cache.find(source) is not None]
    assert kept == sources[-len(kept) :] and len(kept) > 20
    assert sum(source.size_bytes for source in kept) <= CACHED_BYTES < sum(source.size_bytes for source in sources)
    cache.drop(kept[0])
    assert cache.find(kept[0]) is None and cache.find(kept[1]) is not None
