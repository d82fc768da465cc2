"""A request: what was asked, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from operator import index
from typing import Any, Literal, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
RoutedExperts = NDArray[np.integer[Any]]  # [tokens, layers with experts, experts visited], uint8 or int16

Pooling = Literal["mean", "last"]

MAX_PENALTY = 2.0  # as in the OpenAI API


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    FAILED = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled, by the names and meanings of the OpenAI API and vLLM.

    `n` answers are given, and `structured_outputs` (one of json, json_object, regex, choice and grammar, by name) is
    what they must look like: both are for `LLM`, which makes requests of them.

    A stop token ends the answer once `min_tokens` are there; until then it is not sampled. `stop` strings end it too
    and are not shown. `bad_words` are never said. `ignore_eos` leaves the model's own stop tokens out. `temperature` 0
    is greedy. `top_k` 0 or -1 and `top_p` 1 are off. Penalties apply to raw logits, first repetition (prompt and
    answer), then frequency and presence (answer only); then `logit_bias`. The same `seed` gives the same answer in any
    batch; None draws from the engine's own. `logprobs` n gives the chosen token and the n likeliest, of the model's raw
    distribution; `prompt_logprobs` the same for the prompt. `return_routed_experts` gives the experts that each token
    visited, from token `routed_experts_prompt_start` of the prompt on.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0
    bad_words: tuple[str, ...] = ()
    n: int = 1
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # lists, a lone string and the like take their one form here
        for name in ("stop", "bad_words"):
            set_field(self, name, _texts(name, getattr(self, name)))
        set_field(self, "stop_token_ids", tuple(_whole("stop_token_ids", i) for i in self.stop_token_ids or ()))
        biases = dict(self.logit_bias or {})
        set_field(self, "logit_bias", {_whole("logit_bias", i): _number("logit_bias", b) for i, b in biases.items()})
        for name in _NUMBERS:
            set_field(self, name, _number(name, getattr(self, name)))
        for name in ("n", "max_tokens", "min_tokens", "top_k", "routed_experts_prompt_start"):
            set_field(self, name, _whole(name, getattr(self, name)))
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                set_field(self, name, _whole(name, getattr(self, name)))
        self._check_length()
        self._check_distribution()
        self._check_penalties()
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is how many of the likeliest tokens to name, not {getattr(self, name)}")
        if self.routed_experts_prompt_start < 0:
            raise ValueError(
                f"routed_experts_prompt_start counts prompt tokens from 0 on, not {self.routed_experts_prompt_start}"
            )
        if self.routed_experts_prompt_start and not self.return_routed_experts:
            raise ValueError("routed_experts_prompt_start is for return_routed_experts; set that too, or leave it out")

    def for_choice(self, choice: int) -> SamplingParams:
        """Those of one of several answers. With a seed each has its own: the seed, and those after it."""
        if self.n == 1 and (self.seed is None or choice == 0):
            return self
        other = copy(self)  # checked before, and a large logit_bias must not be copied for each
        object.__setattr__(other, "n", 1)
        if self.seed is not None:
            object.__setattr__(other, "seed", self.seed + choice)
        return other

    def _check_length(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is a number of answers, not {self.n}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must lie between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if any(i < 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids are token numbers from 0 on, not {list(self.stop_token_ids)}")

    def _check_distribution(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 to turn it off, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0 and up to 1 (off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is a share between 0 (off) and 1, not {self.min_p}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise ValueError(
                    f"{name} must lie between {-MAX_PENALTY:g} and {MAX_PENALTY:g}, not {getattr(self, name)}"
                )
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be above 0 (1 is off), not {self.repetition_penalty}")
        for token, bias in self.logit_bias.items():
            if token < 0 or not isfinite(bias):
                raise ValueError(f"logit_bias maps token numbers to finite values, not {token} to {bias}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise ValueError(f"{name} takes a number, not {value!r}")
    return float(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | Iterable | None):
        raise ValueError(f"{name} is one or more strings, not {value!r}")
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} is one or more strings that are not empty, not {list(texts)}")
    return texts


def _whole(name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} takes whole numbers, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's raw distribution at one place: the token there, and the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Matcher(Protocol):
    """Follows one answer through its grammar, token by token."""

    def accept(self, token: int) -> None:
        """The answer's next token."""

    def ask(self, *, may_stop: bool) -> None:
        """`allowed` will be called next, for this answer and perhaps others: they can be worked on together."""

    def allowed(self, *, may_stop: bool) -> NDArray[np.uint32]:
        """The tokens that may come next: bit i % 32 of word i // 32, and at least one. Ids beyond the end may not.

        Stop tokens are among them where the answer may be complete, and alone where it must be; unless `may_stop`, only
        there. Raises where the grammar cannot go on.
        """

    def ahead(self, tokens: Tokens) -> Matcher:
        """Where the answer would stand behind these drafts: to be asked once, and after this one was."""


class Grammar(Protocol):
    """What an answer may be. Requests may share one. See `text.grammar`."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer which is complete."""

    def matcher(self) -> Matcher:
        """A new one, at the beginning of an answer."""


@dataclass(slots=True, eq=False)
class Request:
    """Lower `priority` runs first. `arrival` is set by the scheduler and breaks ties.

    With a `grammar` nothing else is sampled; it ends the answer by a stop token, `min_tokens` or not. `matcher` is the
    engine's.

    `logprobs` has an entry per output token where they were asked for; `prompt_logprobs` one per prompt token, None for
    the first, which nothing predicts. `read_routes` is the engine's. `error` is what a failed step raised. Of
    `drafted_tokens` that steps verified for it, `accepted_tokens` were part of the answer.

    `message_ends` are lengths of the prompt at which its messages end: a later request may branch off there. Requests
    with different `cache_salt` or `adapter` (0: none) never share memory. `cached_tokens` is how much of the prompt was
    found computed when it was admitted, and `cache_miss` why nothing was.

    With `pooling` the prompt's final hidden states are `pooled`: their sum, or the last of them.
    """

    id: str
    prompt: Tokens
    params: SamplingParams = SamplingParams()
    priority: int = 0
    message_ends: tuple[int, ...] = ()
    cache_salt: str = ""
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    adapter: int = 0

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    read_routes: Callable[[], RoutedExperts] | None = None
    pooled: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    cache_miss: str | None = None
    arrival: int = -1
    preemptions: int = 0
    bypassed: int = 0
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.prompt, dtype=np.int32)
        if len(self.prompt) == 0:
            raise ValueError(f"request {self.id} has an empty prompt; a model needs at least one token (BOS)")

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """There once a request that asked for it has ended: a row for every token but the last, which is never
        computed. Waits until it has come from the device.
        """
        return None if self.read_routes is None else self.read_routes()

    def embedding(self, dimensions: int | None = None, *, normalize: bool = True) -> NDArray[np.float32]:
        """Of a request with `pooling` that has ended: its first `dimensions`, of length 1 unless told otherwise."""
        assert self.pooled is not None
        whole = self.pooled / len(self.prompt) if self.pooling == "mean" else self.pooled
        part = whole[:dimensions].astype(np.float32)
        length = float(np.linalg.norm(part))
        scaled: NDArray[np.float32] = part / np.float32(length) if normalize and length > 0 else part
        return scaled

    @property
    def prefix_key(self) -> str:
        """What requests must have in common to share memory: no salt passes for an adapter."""
        return f"{self.adapter}:{self.cache_salt}"

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def longest_kv(self) -> int:
        """Tokens in KV at the end of its life: the last one sampled is never computed."""
        return len(self.prompt) + self.params.max_tokens - 1

    def tokens(self, start: int, stop: int) -> Tokens:
        """Known tokens [start, stop) of prompt and output."""
        prompted = len(self.prompt)
        if stop <= prompted:
            return self.prompt[start:stop]
        sampled = np.array(self.output[max(start - prompted, 0) : stop - prompted], dtype=np.int32)
        return sampled if start >= prompted else np.concatenate([self.prompt[start:], sampled])
