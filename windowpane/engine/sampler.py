"""The sampler: logits in, tokens out, on the device and without waiting for it.

    raw logits ─ penalties ─ logit bias ─ stop tokens and grammars masked ─┬─ greedy rows: the largest
                                                                           └─ temperature ─ top-k, top-p, min-p ─ a race

A token is drawn by a race: each has an exponential time divided by its probability, and the first wins. The times are a
hash of (seed, position, token), so what a request draws depends on nothing else: not on its place in the batch, nor on
who else is in it, nor on preemption. And as each token runs for itself, a rounding error in the logits rarely changes
the winner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowpane.device.transfer import to_device
from windowpane.drafts.config import MOST_DRAFTS
from windowpane.lowering.cpu.logits import likeliest
from windowpane.schedule.request import NO_TOKENS, Request, SamplingParams, Tokens

NUCLEUS_GUESS = 1024  # on a CPU, top-p first looks at so many of the likeliest tokens before it sorts them all
LOGPROB_ROWS = 256  # prompt logprobs are taken so many rows at a time: each needs a vocabulary of floats
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """For each row: the logprob of the token there, and the likeliest tokens. On the device until asked for."""

    chosen: Tensor
    top: Tensor
    top_tokens: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """`tokens` int64, one per row. `logprobs` has a row for each of `logprob_rows`, those that asked for them."""

    tokens: Tensor
    logprob_rows: Sequence[int] = ()
    logprobs: TopLogprobs | None = None


class Sampler:
    """Samples a batch of rows, each by its own request's parameters. Requests without a seed draw from `seed`."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.seed = seed
        self._token_bits = _mix(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device))
        self._history = _History(vocab_size, device)
        self._rows = _Rows([], self)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        positions: NDArray[np.int64],
        masks: Mapping[int, NDArray[np.uint32]] | None = None,
        drafted: Mapping[int, Tokens] | None = None,
        too_far: Tensor | None = None,
    ) -> Sampled:
        """One token per row. `positions[i]` is the place in its sequence that the token of row i takes, or where
        `too_far` is given, one that is too far by `too_far[i]`, which the device knows: drafts that were not accepted.

        `masks` has the tokens that grammars allow, by row, as `request.Matcher` gives them. In a step with drafts a
        request has several rows: `drafted` has the drafts before each but its first, by row, and which of the tokens
        count is told to `remember` later.
        """
        if self._rows.requests != requests:
            self._rows = _Rows(list(requests), self)
        rows = self._rows
        adjusted = self._adjust(logits, rows, positions, drafted) if rows.adjusts else logits
        if masks:
            adjusted = self._keep_allowed(adjusted, masks)
        tokens = likeliest(adjusted) if rows.some_greedy else logits.new_empty(len(logits), dtype=torch.int64)
        for drawn in rows.drawn:
            chosen = adjusted if len(drawn.rows) == len(requests) else adjusted[drawn.index]
            beyond = None if too_far is None else too_far[drawn.index]
            tokens[drawn.index] = draw(chosen, drawn, positions[drawn.rows], self._token_bits, beyond)
        if rows.penalized and drafted is None:
            self._history.add(rows.history_rows, tokens[rows.penalized_index])
        if not rows.logprob_rows:
            return Sampled(tokens)
        index = rows.logprob_index
        return Sampled(tokens, rows.logprob_rows, top_logprobs(logits[index], tokens[index], rows.most_logprobs))

    def remember(self, request: Request, tokens: Sequence[int]) -> None:
        """These tokens of a step with drafts are part of the answer."""
        if request.params.has_penalties:
            rows = self._history.rows([request] * len(tokens))
            self._history.add(rows, to_device(tokens, self.device, torch.int64))

    def forget(self, request: Request) -> None:
        """A request is over: what was kept of its tokens is free for others."""
        if self._history.forget(request):
            self._rows = _Rows([], self)  # it may name the place that was given back

    def _adjust(
        self, logits: Tensor, rows: _Rows, positions: NDArray[np.int64], drafted: Mapping[int, Tokens] | None = None
    ) -> Tensor:
        logits = logits.clone()
        if rows.penalized:
            index = rows.penalized_index
            ahead = _ahead(rows.penalized, drafted) if drafted else ()
            logits[index] = self._history.penalize(logits[index], rows.history_rows, ahead, *rows.penalties)
        if rows.bias is not None:
            at_rows, at_tokens, values = rows.bias
            logits[at_rows, at_tokens] += values
        if len(rows.stop_rows):
            early = positions[rows.stop_rows] < rows.stop_until
            at = [to_device(a[early], self.device) for a in (rows.stop_rows, rows.stop_tokens)]
            logits[at[0], at[1]] = NEVER
        return logits

    def _keep_allowed(self, logits: Tensor, masks: Mapping[int, NDArray[np.uint32]]) -> Tensor:
        octets = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8))
        if self.device.type == "cuda":
            octets = octets.pin_memory().to(self.device, non_blocking=True)
        bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=self.device)) & 1
        known = bits.flatten(1)[:, : self.vocab_size].bool()
        # A model's vocabulary may be padded beyond its tokenizer's.
        allowed = torch.zeros((len(masks), self.vocab_size), dtype=torch.bool, device=self.device)
        allowed[:, : known.shape[1]] = known
        rows = torch.tensor(list(masks), dtype=torch.int64, device=self.device)
        logits = logits.clone()
        logits[rows] = logits[rows].masked_fill_(~allowed, NEVER)
        return logits


class _Rows:
    """The parameters of one set of rows as tensors, made once and kept while the same requests run."""

    def __init__(self, requests: list[Request], sampler: Sampler) -> None:
        params = [r.params for r in requests]
        device = sampler.device
        self.requests = requests
        greedy: list[int] = []
        free: list[int] = []
        cut: list[int] = []
        for i, p in enumerate(params):
            (greedy if p.is_greedy else cut if p.top_k > 0 or p.top_p < 1 else free).append(i)
        self.some_greedy = bool(greedy)
        self.drawn = [Draw.of(requests, rows, sampler) for rows in (free, cut) if rows]
        self.penalized = [i for i, p in enumerate(params) if p.has_penalties]
        self.penalized_index = to_device(self.penalized, device, torch.int64)
        self.history_rows = sampler._history.rows([requests[i] for i in self.penalized])
        self.penalties = [
            to_device([[getattr(params[i], name)] for i in self.penalized], device, torch.float32)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        ]
        self.bias = _bias(params, device)
        stops = [
            (i, token, len(requests[i].prompt) + p.min_tokens)
            for i, p in enumerate(params)
            if p.min_tokens and requests[i].grammar is None  # a grammar knows when to stop
            for token in p.stop_token_ids
        ]
        self.stop_rows, self.stop_tokens, self.stop_until = np.array(stops, dtype=np.int64).reshape(-1, 3).T
        self.adjusts = bool(self.penalized or self.bias is not None or stops)
        self.logprob_rows = [i for i, p in enumerate(params) if p.logprobs is not None]
        self.logprob_index = to_device(self.logprob_rows, device, torch.int64)
        self.most_logprobs = max((params[i].logprobs or 0 for i in self.logprob_rows), default=0)


def _bias(params: Sequence[SamplingParams], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows, tokens and values of all biases. Choices share their dict, so that it is read once for all of them."""
    rows_of: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        if p.logit_bias:
            rows_of.setdefault(id(p.logit_bias), []).append(row)
    if not rows_of:
        return None
    rows, tokens, values = [], [], []
    for same in rows_of.values():
        bias = params[same[0]].logit_bias
        rows.append(np.repeat(np.array(same, dtype=np.int64), len(bias)))
        tokens.append(np.tile(np.fromiter(bias.keys(), dtype=np.int64), len(same)))
        values.append(np.tile(np.fromiter(bias.values(), dtype=np.float32), len(same)))
    at_rows, at_tokens, added = (to_device(np.concatenate(column), device) for column in (rows, tokens, values))
    return at_rows, at_tokens, added


def _ahead(rows: Sequence[int], drafted: Mapping[int, Tokens]) -> list[tuple[int, int]]:
    """Drafts before these rows, each with the place of its row among them."""
    return [(i, token) for i, row in enumerate(rows) for token in drafted.get(row, NO_TOKENS).tolist()]


class _History:
    """Which tokens each penalized request has seen: counts of its answer, and whether they stood in its prompt.

    One row of the vocabulary per request, in tensors that double when they are full: no request without penalties pays.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._row_of: dict[Request, int] = {}
        self._free: list[int] = []

    def rows(self, requests: Sequence[Request]) -> Tensor:
        """The rows of these requests; new ones get one that knows what they hold so far."""
        for request in requests:
            if request not in self._row_of:
                self._row_of[request] = self._new_row(request)
        return to_device([self._row_of[r] for r in requests], self._counts.device, torch.int64)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        self._counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)

    def penalize(
        self, logits: Tensor, rows: Tensor, ahead: Sequence[tuple[int, int]],
        repetition: Tensor, frequency: Tensor, presence: Tensor,
    ) -> Tensor:  # fmt: skip
        """`ahead` are tokens that count in addition: the place of their row among `rows`, and the token."""
        counts = self._counts[rows]
        if ahead:
            at = to_device(np.array(ahead, dtype=np.int64).T, counts.device)
            counts.index_put_((at[0], at[1]), torch.ones_like(at[0], dtype=torch.int32), accumulate=True)
        answered = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(answered | self._in_prompt[rows], repeated, logits)
        return logits - frequency * counts - presence * answered

    def forget(self, request: Request) -> bool:
        row = self._row_of.pop(request, None)
        if row is None:
            return False
        self._free.append(row)
        return True

    def _new_row(self, request: Request) -> int:
        if not self._free:
            old = len(self._counts)
            more = max(4, old)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._counts.shape[1])])
            self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._counts.shape[1])])
            self._free = list(range(old + more - 1, old - 1, -1))
        row = self._free.pop()
        vocab_size, device = self._counts.shape[1], self._counts.device
        output = np.bincount(np.asarray(request.output, dtype=np.int64), minlength=vocab_size)
        self._counts[row] = to_device(output.astype(np.int32), device)
        self._in_prompt[row] = False
        self._in_prompt[row, to_device(request.prompt.astype(np.int64), device)] = True
        return row


# -- drawing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows that are drawn alike: all of them with top-k or top-p, or none. Limits are columns, one per row.

    `top_k` is the vocabulary size where it is off. `widest` is the most tokens that a row can keep, None where rows
    need not be sorted. `may_guess`: the likeliest `NUCLEUS_GUESS` tokens tell for every row whether they are enough;
    they do not where a top-k beyond them decides what the probabilities add up to.
    """

    rows: NDArray[np.int64]
    index: Tensor
    seeds: NDArray[np.uint64]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor | None
    widest: int | None
    may_guess: bool

    @classmethod
    def of(cls, requests: Sequence[Request], rows: Sequence[int], sampler: Sampler) -> Draw:
        params = [requests[i].params for i in rows]
        top_k = [min(p.top_k, sampler.vocab_size) if p.top_k > 0 else sampler.vocab_size for p in params]
        sorts = any(p.top_k > 0 or p.top_p < 1 for p in params)

        def column(values: Sequence[float]) -> Tensor:
            return to_device(values, sampler.device).unsqueeze(1)

        return cls(
            rows=np.array(rows, dtype=np.int64),
            index=to_device(rows, sampler.device, torch.int64),
            seeds=np.array([_seed(requests[i], sampler.seed) for i in rows], dtype=np.uint64),
            temperature=column([float(p.temperature) for p in params]),
            top_k=column(top_k),
            # 1 would cut the tail where the running sum rounds up to it.
            top_p=column([p.top_p if p.top_p < 1 else float("inf") for p in params]),
            min_p=column([float(p.min_p) for p in params]) if any(p.min_p for p in params) else None,
            widest=max(top_k) if sorts else None,
            may_guess=not any(NUCLEUS_GUESS < k < sampler.vocab_size for k in top_k),
        )


def draw(
    logits: Tensor, drawn: Draw, positions: NDArray[np.int64], token_bits: Tensor, too_far: Tensor | None = None
) -> Tensor:
    """One token per row, by the rows' own limits and seeds, at positions that may be `too_far` by so much."""
    scores, tokens = keep_likely(logits, drawn)
    if too_far is None:
        keys = to_device(noise_keys(drawn.seeds, positions), logits.device)
    else:
        possible = noise_keys(drawn.seeds[:, None], positions[:, None] - np.arange(MOST_DRAFTS + 1))
        keys = to_device(possible, logits.device).gather(1, too_far[:, None].long())[:, 0]
    times = exponential_times((token_bits if tokens is None else token_bits[tokens]) ^ keys.unsqueeze(1))
    winners = scores.exp_().div_(times).max(dim=-1).indices
    return winners if tokens is None else tokens.gather(1, winners.unsqueeze(1)).squeeze(1)


def keep_likely(logits: Tensor, drawn: Draw) -> tuple[Tensor, Tensor | None]:
    """Scores with all that top-k, top-p (of what top-k leaves) and min-p cut at -inf, and the tokens they belong to.

    None for the tokens means all, in order. The highest score of a row is 0, so that however small the temperature is,
    nothing overflows.
    """
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(drawn.temperature)
    tokens = None
    if drawn.widest is not None:
        scores, tokens = _top_k_top_p(scores, drawn, drawn.widest)
    if drawn.min_p is not None:
        scores.masked_fill_(scores < drawn.min_p.log(), NEVER)
    return scores, tokens


def _top_k_top_p(scores: Tensor, drawn: Draw, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest scores and their tokens, cut by top-k and top-p."""
    vocab_size = scores.shape[-1]
    if scores.device.type == "cpu" and drawn.may_guess and NUCLEUS_GUESS < width == vocab_size:
        # Sorting a large vocabulary is slow there, and a nucleus is nearly always small. Looking costs no wait.
        ordered, tokens = _top_k_top_p(scores, drawn, NUCLEUS_GUESS)
        if bool((ordered[:, -1] == NEVER).all()):  # every row has found its edge
            return ordered, tokens
    ordered, tokens = scores.topk(width, dim=-1) if width < vocab_size else scores.sort(dim=-1, descending=True)
    ordered.masked_fill_(torch.arange(width, device=scores.device) >= drawn.top_k, NEVER)
    whole = scores.logsumexp(dim=-1, keepdim=True)
    total = torch.where(drawn.top_k < vocab_size, ordered.logsumexp(dim=-1, keepdim=True), whole)
    probabilities = (ordered - total).exp_()
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= drawn.top_p
    beyond[:, 0] = False
    return ordered.masked_fill_(beyond, NEVER), tokens


# -- the times of the race: a hash of (seed, position, token) ------------------------------------------------------


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """32 bits per row from its seed and position."""
    mixed = _splitmix(_splitmix(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)


def exponential_times(bits: Tensor) -> Tensor:
    """Exponentially distributed times from hashed bits. Short ones decide a race, so they have the resolution."""
    uniform = _mix(bits).bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Murmur3's finalizer on int32, which wraps; shifts are made logical by a mask."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x.mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13) & 0x7FFFF)
    x.mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _seed(request: Request, engine_seed: int) -> int:
    """The request's own seed, or one of the engine's by order of arrival."""
    if request.params.seed is not None:
        return request.params.seed % 2**64
    arrived = np.array([engine_seed % 2**64 ^ 0x5EED, request.arrival % 2**64], dtype=np.uint64)
    mixed = _splitmix(_splitmix(arrived[:1]) ^ arrived[1:])
    return int(mixed[0])


# -- logprobs ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    """Logprobs of `tokens`, one per row, and of the `count` likeliest, of the raw distribution."""
    parts = []
    for rows, chosen in zip(torch.split(logits, LOGPROB_ROWS), torch.split(tokens, LOGPROB_ROWS), strict=True):
        logprobs = rows.float().log_softmax(dim=-1)
        top = logprobs.topk(count, dim=-1)
        parts.append((logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), top.values, top.indices))
    columns: list[Any] = [torch.cat(column) for column in zip(*parts, strict=True)]
    return TopLogprobs(*columns)
