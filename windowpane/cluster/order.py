"""What crosses between the ingress and a replica: a request by value, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windowpane.cluster.channel import ReplyTo
from windowpane.routing.hashes import Hashes
from windowpane.schedule.request import FinishReason, Grammar, Pooling, Request, SamplingParams, TokenLogprobs, Tokens
from windowpane.text.grammar import CompiledGrammar, Grammars
from windowpane.text.grammar_worker import Source
from windowpane.text.rules import Rules, ThoughtBudget
from windowpane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class WiredGrammar:
    """A grammar and its rules before they are compiled: each replica compiles for itself."""

    source: Source | None
    words: tuple[tuple[int, ...], ...] = ()
    own_stop_ids: tuple[int, ...] = ()
    budget: ThoughtBudget | None = None
    has_rules: bool = False

    @classmethod
    def of(cls, grammar: Grammar | None) -> WiredGrammar | None:
        if grammar is None:
            return None
        if isinstance(grammar, Rules):
            inner = grammar.grammar
            source = inner.source if isinstance(inner, CompiledGrammar) else None
            return cls(source, grammar.words, grammar.own_stop_ids, grammar.budget, has_rules=True)
        assert isinstance(grammar, CompiledGrammar)
        return cls(grammar.source)

    def compile(self, grammars: Grammars, tokenizer: Tokenizer, vocab_size: int) -> Grammar:
        compiled = None if self.source is None else grammars.from_source(self.source)
        if self.has_rules:
            return Rules(compiled, tokenizer, vocab_size, self.words, self.own_stop_ids, self.budget)
        assert compiled is not None
        return compiled


@dataclass(frozen=True, slots=True)
class Order:
    """One request. `hashes` are those of its prompt, for the router. Its tokens go to a `channel` of `reply_to` as they
    come, where there is one, and all of them with its end.
    """

    id: str
    prompt: Tokens
    params: SamplingParams
    priority: int
    message_ends: tuple[int, ...]
    cache_salt: str
    adapter: int
    pooling: Pooling | None
    grammar: WiredGrammar | None
    hashes: Hashes
    reply_to: ReplyTo | None
    channel: int

    @classmethod
    def of(cls, request: Request, hashes: Hashes, reply_to: ReplyTo | None, channel: int) -> Order:
        return cls(
            request.id, request.prompt, request.params, request.priority, request.message_ends, request.cache_salt,
            request.adapter, request.pooling, WiredGrammar.of(request.grammar), hashes, reply_to, channel,
        )  # fmt: skip

    def request(self, grammar: Grammar | None) -> Request:
        return Request(
            self.id, self.prompt, self.params, priority=self.priority, message_ends=self.message_ends,
            cache_salt=self.cache_salt, grammar=grammar, pooling=self.pooling, adapter=self.adapter,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class To:
    """The first argument of a call that is for one replica and no other."""

    replica: str


@dataclass(frozen=True, slots=True)
class Ending:
    """What a replica knows of a request that is over."""

    finish_reason: FinishReason
    error: str | None
    is_grammar_error: bool
    fields: dict[str, Any]
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


# What the ingress copies from a replica's request into its own.
COPIED = (
    "prompt_logprobs",
    "pooled",
    "drafted_tokens",
    "accepted_tokens",
    "cached_tokens",
    "cache_miss",
    "preemptions",
)
