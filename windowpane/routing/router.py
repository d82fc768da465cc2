"""Chooses the replica where a request's first token comes soonest: what it remembers weighed against how busy it is.

    expected time to first token = wait until its turn + tokens left to compute / speed

The router looks at replicas that hold the longest beginnings of the prompt (a few of each length, by chance, where many
do), and at two that it takes at random from all: so what nobody knows is balanced by the power of two choices, and a
holder that is busy loses to somebody who is not. Where much is left to compute it looks at more, because to wait behind
another long prompt costs seconds. A decision costs a lookup per block of the prompt and a few replicas, however many
there are.

What a router has sent is remembered for a while: a digest comes a second later, and a chat may not wait for it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from windowpane.routing.digest import ASSUMED_TOKENS_PER_S, Digest, Load
from windowpane.routing.hashes import BLOCK_TOKENS, Hashes
from windowpane.routing.index import HolderIndex

HOLDERS_LOOKED_AT = 8  # of each length
LENGTHS_LOOKED_AT = 8  # the longest
TOKENS_A_LOOK = 1024  # so many to compute are worth looking at one more replica
EXPECTED_S = 10.0  # what was sent counts as held for so long, unless digests say so by then
# The share of computing that is saved where a beginning lies on the device, on the host and on disk.
TIER_WORTH = np.array([1.0, 0.9, 0.7])
# What a sequence that decodes adds to the expected time, as tokens of a prompt: replicas that are equal otherwise are
# filled evenly.
RUNNING_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """`reused_tokens` of the prompt are held by `replica`, as far as is known."""

    replica: str
    reused_tokens: int
    expected_s: float


@dataclass(slots=True)
class _Replica:
    """What is known of one. `sent` are requests that its digest does not have yet, `ended` those that have ended since,
    and at `free_s` the prompts of all that it has are computed.
    """

    load: Load = field(default_factory=Load)
    hashes: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    held: set[int] = field(default_factory=set)
    sent: int = 0
    ended: int = 0
    free_s: float = 0.0

    def expected_s(self, tokens: int, now_s: float, usual_tokens_per_s: float) -> float:
        # One that had ended when the digest was made may be told of behind it.
        beside = RUNNING_TOKENS * max(0, self.load.running + self.load.waiting + self.sent - self.ended)
        return max(0.0, self.free_s - now_s) + (beside + tokens) / (self.load.tokens_per_s or usual_tokens_per_s)


class Router:
    """Not locked: one thread or event loop calls it."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []
        self._index = HolderIndex()
        self._expected: deque[tuple[float, str, list[int]]] = deque()
        self._usual_tokens_per_s = ASSUMED_TOKENS_PER_S
        self._random = random.Random(seed)
        self._clock = clock

    @property
    def replicas(self) -> Sequence[str]:
        return self._names

    def update(self, name: str, digest: Digest) -> None:
        """Take in what a replica published; one that is not known yet joins."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica()
            self._names.append(name)
        if not np.array_equal(replica.hashes, digest.hashes):
            self._enter(name, replica, digest)
        replica.load, replica.hashes = digest.load, digest.hashes
        # Who has computed nothing yet is taken to be as fast as others: it must not look slow beside who is busy.
        self._usual_tokens_per_s = digest.load.tokens_per_s or self._usual_tokens_per_s
        replica.sent, replica.ended, replica.free_s = 0, 0, self._clock() + digest.load.wait_s

    def _enter(self, name: str, replica: _Replica, digest: Digest) -> None:
        """The differences to the digest before."""
        gone = np.setdiff1d(replica.hashes, digest.hashes, assume_unique=True).tolist()
        replica.held.difference_update(gone)
        self._index.forget(name, gone)
        is_new = ~np.isin(digest.hashes, replica.hashes, assume_unique=True)
        worth = (digest.tokens * TIER_WORTH[digest.tiers]).astype(np.int64)
        new = digest.hashes[is_new].tolist()
        replica.held.update(new)
        self._index.put(name, new, worth[is_new].tolist())

    def join(self, name: str) -> None:
        """A replica that has published nothing yet can be chosen too."""
        if name not in self._replicas:
            self._replicas[name] = _Replica()
            self._names.append(name)

    def remove(self, name: str) -> None:
        """It is gone, or takes nobody any more."""
        if name not in self._replicas:
            return
        expected = {hashed for _, holder, hashes in self._expected if holder == name for hashed in hashes}
        self._index.forget(name, expected | self._replicas.pop(name).held)
        self._names.remove(name)

    def choose(self, hashes: Hashes, prompt_tokens: int, among: Collection[str] | None = None) -> Choice:
        """The replica for a prompt with these `prefix_hashes`: one of all, or of those `among` that are known.

        Raises LookupError where there is none.
        """
        self._expire()
        names = self._names if among is None else [name for name in among if name in self._replicas]
        if not names:
            raise LookupError("no replica is there to take the request")
        reused: dict[str, int] = {}
        allowed = None if among is None else set(names)
        for holders in islice(self._index.longest_first(hashes), LENGTHS_LOOKED_AT):
            for name in self._some(holders, allowed):
                reused[name] = max(reused.get(name, 0), min(holders[name], prompt_tokens - 1))
        left = prompt_tokens - max(reused.values(), default=0)
        for name in self._random.sample(names, min(2 + left // TOKENS_A_LOOK, len(names))):
            reused.setdefault(name, 0)
        now_s = self._clock()
        expected = {
            name: self._replicas[name].expected_s(prompt_tokens - tokens, now_s, self._usual_tokens_per_s)
            for name, tokens in reused.items()
        }
        best = min(expected, key=expected.__getitem__)
        return Choice(best, reused[best], expected[best])

    def sent(self, choice: Choice, hashes: Hashes, prompt_tokens: int, message_ends: Sequence[int] = ()) -> None:
        """The request went where it was to go: its messages' ends will be held there."""
        replica = self._replicas.get(choice.replica)
        if replica is None:
            return
        now_s = self._clock()
        replica.sent += 1
        left_s = (prompt_tokens - choice.reused_tokens) / (replica.load.tokens_per_s or self._usual_tokens_per_s)
        replica.free_s = max(now_s, replica.free_s) + left_s
        ends = [end for end in {*message_ends, prompt_tokens} if 0 < end // BLOCK_TOKENS <= len(hashes)]
        held = [int(hashes[end // BLOCK_TOKENS - 1]) for end in ends]
        self._index.put(choice.replica, held, ends, replace=False)
        self._expected.append((now_s + EXPECTED_S, choice.replica, held))

    def ended(self, name: str) -> None:
        """A request that went to this replica is over. The next digest says so too, but a chat may come before it, and
        its own turns are not to count against who knows it.
        """
        if (replica := self._replicas.get(name)) is not None:
            replica.ended += 1

    def _some(self, holders: Mapping[str, int], allowed: Collection[str] | None) -> list[str]:
        names = list(holders) if allowed is None else [name for name in holders if name in allowed]
        return names if len(names) <= HOLDERS_LOOKED_AT else self._random.sample(names, HOLDERS_LOOKED_AT)

    def _expire(self) -> None:
        now = self._clock()
        while self._expected and self._expected[0][0] <= now:
            _, name, hashes = self._expected.popleft()
            replica = self._replicas.get(name)
            held = () if replica is None else replica.held
            self._index.forget(name, [hashed for hashed in hashes if hashed not in held])


class RoundRobin:
    """One after another, whatever they hold: the yardstick."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, names: Sequence[str]) -> str:
        self._turn += 1
        return names[self._turn % len(names)]
