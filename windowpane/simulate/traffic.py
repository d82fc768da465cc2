"""Traffic: sessions that begin at some time and go on turn by turn, built in or read from a trace.

A turn comes some seconds after the answer to the last one; its prompt is everything said before and a new message. So a
slow engine gets its later turns later, as it would from people and agents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from windowpane.schedule.request import Tokens

ANSWER_TOKEN = 1  # what a simulated model says
FIRST_TEXT_TOKEN = 2
VOCABULARY = 30_000


@dataclass(frozen=True, slots=True)
class Turn:
    """`message_tokens` new ones, then an answer. `wait_s` is counted from the end of the answer before.

    `at_s` is a time on the clock instead (a trace's), and `tokens` the whole prompt where a trace names it.
    """

    message_tokens: int
    output_tokens: int
    wait_s: float = 0.0
    at_s: float | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(slots=True)
class Session:
    """One conversation. `system` is shared with others, `history` grows as it goes on, messages end at `ends`."""

    name: str
    start_s: float
    system: Tokens
    turns: tuple[Turn, ...]
    seed: int
    history: Tokens = field(init=False)
    ends: list[int] = field(init=False)
    said: int = 0  # turns begun

    def __post_init__(self) -> None:
        self.history = self.system
        self.ends = [len(self.system)] if len(self.system) else []

    def coming_prompt(self) -> tuple[Tokens, tuple[int, ...]]:
        """What `next_prompt` will give."""
        turn = self.turns[self.said]
        if turn.tokens is not None:
            return np.asarray(turn.tokens, dtype=np.int32), (len(turn.tokens),)
        rng = np.random.default_rng((self.seed, self.said))
        message = rng.integers(FIRST_TEXT_TOKEN, VOCABULARY, turn.message_tokens).astype(np.int32)
        return np.concatenate([self.history, message]), (*self.ends, len(self.history) + len(message))

    def next_prompt(self) -> tuple[Tokens, tuple[int, ...]]:
        """The prompt of the next turn and where its messages end."""
        self.history, ends = self.coming_prompt()
        self.ends = list(ends)
        self.said += 1
        return self.history, ends

    def answered(self, tokens: int) -> None:
        self.history = np.concatenate([self.history, np.full(tokens, ANSWER_TOKEN, dtype=np.int32)])
        self.ends.append(len(self.history))

    @property
    def first_tokens(self) -> int:
        """Of the first request: its prompt and its answer."""
        turn = self.turns[0]
        return (0 if turn.tokens is not None else len(self.system)) + turn.message_tokens + turn.output_tokens

    @property
    def next_turn(self) -> Turn | None:
        return self.turns[self.said] if self.said < len(self.turns) else None


@dataclass(frozen=True, slots=True)
class Workload:
    """A built-in kind of traffic. `rate_per_s` is how many sessions begin, or 0 where all `sessions` begin at once."""

    name: str
    about: str
    sessions: int
    rate_per_s: float
    system_tokens: int
    make_turns: Callable[[np.random.Generator], Iterator[Turn]]


def _chat(rng: np.random.Generator) -> Iterator[Turn]:
    """Messages of about 120 tokens, answers of about 250, half a minute of reading and typing between them."""
    for turn in range(1 + rng.geometric(0.2)):
        wait_s = float(rng.exponential(30)) if turn else 0.0
        yield Turn(_length(rng, 120, 4000), _length(rng, 250, 4000), wait_s)


def _rag(rng: np.random.Generator) -> Iterator[Turn]:
    """Retrieved passages of 4,000 to 24,000 tokens, a short answer, and sometimes a second question."""
    yield Turn(int(rng.integers(4000, 24_000)), _length(rng, 200, 1000))
    if rng.random() < 0.3:
        yield Turn(_length(rng, 60, 500), _length(rng, 200, 1000), float(rng.exponential(20)))


def _agents(rng: np.random.Generator) -> Iterator[Turn]:
    """A context of about 65,000 tokens, then tool results that come back within seconds: five turns in all."""
    yield Turn(int(rng.integers(62_000, 66_000)), _length(rng, 200, 1000))
    for _ in range(4):
        yield Turn(_length(rng, 400, 4000), _length(rng, 200, 1000), float(rng.exponential(2)))


def _tools(rng: np.random.Generator) -> Iterator[Turn]:
    """The same contexts, and tools that take three minutes on average (builds, tests, people): twelve turns in all."""
    yield Turn(int(rng.integers(62_000, 66_000)), _length(rng, 200, 1000))
    for _ in range(11):
        yield Turn(_length(rng, 400, 4000), _length(rng, 200, 1000), float(rng.exponential(180)))


def _serve(rng: np.random.Generator) -> Iterator[Turn]:
    yield Turn(int(rng.integers(100, 1025)), int(rng.integers(100, 1025)))


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("chat", "multi-turn, with a system prompt that all share", 0, 0.25, 400, _chat),
        Workload("rag", "long prompts, short answers", 0, 0.2, 300, _rag),
        Workload("agents", "many turns over contexts of 65,000 tokens, all at once", 4, 0.0, 1500, _agents),
        Workload("tools", "agents whose tools take minutes, over contexts of 65,000 tokens", 0, 0.01, 1500, _tools),
        Workload("serve", "256 requests at once, 100 to 1,024 tokens in and out", 256, 0.0, 0, _serve),
    )
}


def built_in(
    name: str, seed: int, hours: float, rate_per_s: float | None = None, sessions: int | None = None
) -> list[Session]:
    """Sessions of a built-in workload: so many at once, or as many as begin in `hours` at its rate."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}, or give a trace: FILE.jsonl")
    workload = WORKLOADS[name]
    rate = workload.rate_per_s if rate_per_s is None else rate_per_s
    rng = np.random.default_rng(seed)
    if rate and sessions is None:
        starts = np.sort(rng.uniform(0, hours * 3600, rng.poisson(rate * hours * 3600)))
    elif rate:
        starts = np.cumsum(rng.exponential(1 / rate, sessions))
    else:
        starts = np.zeros(sessions or workload.sessions)
    system = rng.integers(FIRST_TEXT_TOKEN, VOCABULARY, workload.system_tokens).astype(np.int32)
    return [
        Session(f"{name}-{at}", float(start), system, tuple(workload.make_turns(rng)), seed=seed + at)
        for at, start in enumerate(starts)
    ]


def read_trace(path: str) -> list[Session]:
    """Sessions of a JSONL trace: a line per request with `time` (seconds), `output` (tokens), and `prompt`, which is a
    number of tokens or the tokens themselves; `session` joins requests.

    Where only lengths are known, a later prompt of a session is taken to begin with what was said before.
    """
    lines = _trace_lines(path)
    nothing = np.zeros(0, dtype=np.int32)
    by_session: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(lines):
        by_session.setdefault(str(line.get("session", f"request-{number}")), []).append(line)
    sessions = []
    for at, (name, requests) in enumerate(by_session.items()):
        requests.sort(key=lambda line: line["time"])
        turns, known = [], 0
        for line in requests:
            prompt, output = line["prompt"], line["output"]
            if isinstance(prompt, list):
                turns.append(Turn(len(prompt), output, at_s=line["time"], tokens=tuple(prompt)))
                known = len(prompt) + output
            else:
                turns.append(Turn(max(1, prompt - known), output, at_s=line["time"]))
                known = max(prompt, known + 1) + output
        sessions.append(Session(name, requests[0]["time"], nothing, tuple(turns), seed=at))
    return sorted(sessions, key=lambda session: session.start_s)


def _trace_lines(path: str) -> list[dict[str, Any]]:
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from None
    lines = []
    for number, row in enumerate(text.splitlines(), 1):
        if not row.strip():
            continue
        try:
            line = json.loads(row)
            good = (
                isinstance(line["time"], int | float)
                and isinstance(line["output"], int)
                and line["output"] >= 1
                and isinstance(line["prompt"], int | list)
                and (line["prompt"] if isinstance(line["prompt"], int) else len(line["prompt"])) >= 1
            )
        except (json.JSONDecodeError, KeyError, TypeError):
            good = False
        if not good:
            raise ValueError(
                f"{path}, line {number}: a request is a JSON object such as "
                '{"time": 0.5, "prompt": 800, "output": 200, "session": "a"}; prompt may also be a list of tokens'
            )
        lines.append(line)
    if not lines:
        raise ValueError(f"the trace {path} holds no requests")
    return lines


def _length(rng: np.random.Generator, median: int, most: int) -> int:
    return int(min(max(rng.lognormal(np.log(median), 0.8), 1), most))
