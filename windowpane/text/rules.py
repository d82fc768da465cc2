"""Rules that an answer keeps beside its grammar, or without one: words that are never said, and thoughts that end.

They are matchers like those of grammars (`request.Matcher`), so that the engine knows one way to constrain an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windowpane.schedule.request import Grammar, Matcher, SamplingParams, Tokens
from windowpane.text.detokenizer import Detokenizer
from windowpane.text.grammar import GrammarError, Thought
from windowpane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """A thought is ended for the model after so many tokens."""

    thought: Thought
    max_tokens: int


def with_rules(
    grammar: Grammar | None,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    budget: ThoughtBudget | None = None,
) -> Grammar | None:
    """`grammar` and the rules of `params`; the grammar itself where there are none."""
    if not params.bad_words and budget is None:
        return grammar
    if tokenizer is None:
        raise GrammarError("bad_words need text and this model came without a tokenizer; use logit_bias")
    words = tuple(tokens for word in params.bad_words for tokens in _spellings(tokenizer, word))
    return Rules(grammar, tokenizer, vocab_size, words, params.stop_token_ids, budget)


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """A word as tokens, as vLLM takes it: as it is, and behind a space where that is as many other tokens."""
    plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    if plain:
        yield plain
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    if spaced and (not plain or (len(spaced) == len(plain) and spaced[0] != plain[0])):
        yield spaced


@dataclass(frozen=True, slots=True)
class Rules:
    """`words` are token sequences that no answer has; the last token of one is not sampled behind the others."""

    grammar: Grammar | None
    tokenizer: Tokenizer
    vocab_size: int
    words: tuple[tuple[int, ...], ...]
    own_stop_ids: tuple[int, ...]
    budget: ThoughtBudget | None

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset() if self.grammar is None else self.grammar.stop_ids

    def matcher(self) -> RuleMatcher:
        return RuleMatcher(self, None if self.grammar is None else self.grammar.matcher())


class RuleMatcher:
    def __init__(self, rules: Rules, inner: Matcher | None) -> None:
        self._rules = rules
        self._inner = inner
        self._tail: list[int] = []  # of the answer, as long as the longest word
        self._keeps = max((len(word) - 1 for word in rules.words), default=0)
        self._thought = None if rules.budget is None else _CountedThought(rules.budget, rules.tokenizer)

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        self._follow(token)

    def _follow(self, token: int) -> None:
        self._tail = [*self._tail, token][-self._keeps :] if self._keeps else []
        if self._thought is not None:
            self._thought.accept(token)

    def ask(self, *, may_stop: bool) -> None:
        if self._inner is not None:
            self._inner.ask(may_stop=may_stop)

    def allowed(self, *, may_stop: bool) -> NDArray[np.uint32]:
        allowed = self._unruled(may_stop)
        forced = None if self._thought is None else self._thought.forced
        if forced is not None:
            return _bits([forced], len(allowed))
        banned = [word[-1] for word in self._rules.words if self._begins(word)]
        if banned:
            allowed = allowed & ~_bits(banned, len(allowed))
            if not allowed.any():
                raise GrammarError("bad_words leave no token that the answer's format allows")
        return allowed

    def ahead(self, tokens: Tokens) -> RuleMatcher:
        later = copy(self)
        later._inner = None if self._inner is None else self._inner.ahead(tokens)
        later._thought = None if self._thought is None else self._thought.copy()
        for token in tokens.tolist():
            later._follow(token)
        return later

    def _unruled(self, may_stop: bool) -> NDArray[np.uint32]:
        if self._inner is not None:
            return self._inner.allowed(may_stop=may_stop)
        vocab_size = self._rules.vocab_size
        allowed = np.full(-(-vocab_size // 32), 2**32 - 1, dtype=np.uint32)
        return allowed if may_stop else allowed & ~_bits(self._rules.own_stop_ids, len(allowed))

    def _begins(self, word: Sequence[int]) -> bool:
        """Whether the answer ends with all of this word but its last token."""
        before = len(word) - 1
        return before == 0 or tuple(self._tail[-before:]) == tuple(word[:-1])


class _CountedThought:
    """Follows the text of one answer: whether it is inside a thought, and for how many tokens it has been in one."""

    def __init__(self, budget: ThoughtBudget, tokenizer: Tokenizer) -> None:
        self._budget = budget
        thought = budget.thought
        self._is_inside = thought.is_open
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)  # markers are often special tokens
        self._end_ids = tokenizer.encode(thought.end, add_special_tokens=False)
        self._text = ""
        self._tokens = 0
        self._forced = 0  # tokens of the end that were written because they had to be

    def copy(self) -> _CountedThought:
        made = copy(self)
        made._detokenizer = self._detokenizer.copy()
        return made

    @property
    def forced(self) -> int | None:
        """The only token that may come next, where the thought has to end."""
        is_due = self._is_inside and self._tokens >= self._budget.max_tokens
        return self._end_ids[self._forced] if is_due and self._forced < len(self._end_ids) else None

    def accept(self, token: int) -> None:
        self._forced += self.forced == token
        self._tokens += self._is_inside
        thought = self._budget.thought
        marker = thought.end if self._is_inside else thought.start
        self._text = self._text[-len(marker) :] + self._detokenizer.push(token)
        if marker in self._text:
            self._text = ""
            self._is_inside = not self._is_inside


def _bits(tokens: Sequence[int], words: int) -> NDArray[np.uint32]:
    bits = np.zeros(words, dtype=np.uint32)
    for token in tokens:
        if token // 32 < words:
            bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits
