"""The processes in which llguidance works: a keeper, which knows the vocabulary, and the workers it forks.

    server ──── "fork" ────► keeper: llguidance, the vocabulary
      │  ◄── socket, memory ───┘ │ fork: a worker costs milliseconds, and shares the vocabulary's memory
      └──── sources, tokens ──► worker: compiles, follows answers, writes masks into shared memory

The library is native code that follows what strangers write, so a worker may crash, hang or grow. Its processor time
and memory are limited by the operating system, and whoever asked it notices that it is gone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from windowpane.text.pattern import choice_pattern

if TYPE_CHECKING:
    import llguidance

MASK_ROWS = 256  # masks that a worker's shared memory holds
SHARED_MEMORY_FOLDER = "/dev/shm"
ENCODED_TEXTS = 4096  # forced texts whose tokens a worker remembers
MASK_THREADS = 4
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as llguidance wants it: every token's bytes, and which tokens are no text."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    bos_token_id: int | None
    stop_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Source:
    """What a grammar is made of. `thought` has the rules of what may stand in front of the answer.

    `is_plain_schema`: it needs no trial (`plain_schema`).
    """

    kind: Literal["json_schema", "lark_grammar", "user_lark", "regex", "choice"]
    text: str | tuple[str, ...]
    thought: str | None = None
    is_plain_schema: bool = False

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        texts = (self.text,) if isinstance(self.text, str) else self.text
        return sum(sys.getsizeof(text) for text in texts)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker: bytes beyond those it begins with, and how much it stands back for others."""

    memory_bytes: int
    niceness: int


@dataclass(frozen=True, slots=True)
class CompileOrder:
    grammar: int
    source: Source
    cpu_s: float


class Row(NamedTuple):
    """One answer's mask. `source` comes with a grammar that the worker does not know, `is_new` with all tokens.

    `ahead` are drafts: the mask is that behind them, and the answer stays where it is.
    """

    answer: int
    grammar: int
    source: Source | None
    is_new: bool
    tokens: list[int]
    may_stop: bool
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MaskOrder:
    """Masks for these answers, in this order; what else is known of `ended` and `forgotten` may go."""

    rows: list[Row]
    ended: list[int]
    forgotten: list[int]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Compiled:
    error: str | None
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Masks:
    """Which rows have none, and why. The others lie in shared memory."""

    errors: dict[int, str]


@dataclass(frozen=True, slots=True)
class Encode:
    """A worker's question: the tokens of this text."""

    text: str


def mask_words(vocabulary_size: int) -> int:
    return (vocabulary_size + 31) // 32


# -- the keeper ----------------------------------------------------------------------------------------------------


def keep(fd: int) -> None:
    """Serve the socket `fd` until it is closed: fork workers, and end them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody; the server says when to end
    asking = socket.socket(fileno=fd)
    orders = Connection(os.dup(fd))
    encoder = _Encoder()
    try:
        vocabulary, words = _vocabulary(orders.recv(), encoder)
        gc.freeze()  # a collection would touch, and so copy, what workers share
        orders.send(True)
        while True:
            order = orders.recv()
            if isinstance(order, Limits):
                _fork(asking, orders, vocabulary, words, encoder, order)
            else:
                orders.send(_end(order))
    except EOFError:
        pass


def _vocabulary(given: Words, encoder: _Encoder) -> tuple[llguidance.LLTokenizer, Words]:
    from llguidance import LLTokenizer, TokenizerWrapper

    encoder.tokens, encoder.special_token_ids = given.tokens, given.special_token_ids
    encoder.bos_token_id, encoder.eos_token_id = given.bos_token_id, min(given.stop_ids)
    return LLTokenizer(TokenizerWrapper(encoder), eos_token=list(given.stop_ids)), given


def _fork(
    asking: socket.socket, orders: Connection, vocabulary: Any, words: Words, encoder: _Encoder, limits: Limits
) -> None:
    ours, theirs = socket.socketpair()
    folder = SHARED_MEMORY_FOLDER if Path(SHARED_MEMORY_FOLDER).is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as memory, ours, theirs:
        memory.truncate(MASK_ROWS * mask_words(len(words.tokens)) * 4)
        pid = os.fork()
        if pid == 0:
            for inherited in (asking, orders, ours):
                inherited.close()
            _work(theirs.detach(), memory.fileno(), vocabulary, words, encoder, limits)
        socket.send_fds(asking, [pid.to_bytes(8, "little")], [ours.fileno(), memory.fileno()])


def _end(pid: int) -> int:
    """End a worker, if it has not ended, and say how it did: minus the signal, or the exit code."""
    os.kill(pid, signal.SIGKILL)  # it is ours to reap, so the number cannot be another's
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- a worker ------------------------------------------------------------------------------------------------------


def _work(fd: int, memory: int, vocabulary: Any, words: Words, encoder: _Encoder, limits: Limits) -> NoReturn:
    """Never returns: a forked process must not go on with what its parent was about to do."""
    try:
        _limit(limits)
        connection = Connection(fd)
        encoder.connection = connection
        Worker(connection, memory, vocabulary, words).serve()
    except MemoryError:
        os.abort()
    finally:
        os._exit(0)


def _limit(limits: Limits) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stderr.fileno())  # the library tells of its panics there
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_bytes, used + limits.memory_bytes))


class _Encoder:
    """Asks the server how forced text is tokenized: it has the tokenizer, and a worker needs it seldom."""

    tokens: Sequence[bytes] = ()
    special_token_ids: Sequence[int] = ()
    bos_token_id: int | None = None
    eos_token_id = 0
    connection: Connection | None = None

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._lock = Lock()  # masks are computed in several threads

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # so llguidance learns that only whole characters can be encoded
        with self._lock:
            known = self._known.get(text)
            if known is None:
                known = self._ask(text)
                if len(self._known) < ENCODED_TEXTS:
                    self._known[text] = known
            return known

    def _ask(self, text: str) -> list[int]:
        if self.connection is None:
            return []  # llguidance tries its tokenizer once, in the keeper
        self.connection.send(Encode(text))
        tokens: list[int] = self.connection.recv()
        return tokens


class Worker:
    """Compiles grammars and follows answers, one order after the other."""

    def __init__(self, connection: Connection, memory: int, vocabulary: llguidance.LLTokenizer, words: Words) -> None:
        self._connection = connection
        self._vocabulary = vocabulary
        self._stop_ids = words.stop_ids
        shared = mmap.mmap(memory, 0)
        self._masks = np.frombuffer(shared, dtype=np.int32).reshape(MASK_ROWS, mask_words(len(words.tokens)))
        self._grammars: dict[int, llguidance.LLMatcher] = {}
        self._answers: dict[int, llguidance.LLMatcher] = {}

    def serve(self) -> None:
        while True:
            order = self._connection.recv()
            # Processor time, not the clock's: a busy machine is no reason to give up. The signal ends the process.
            signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
            done = self._compile(order) if isinstance(order, CompileOrder) else self._fill(order)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._connection.send(done)

    def _compile(self, order: CompileOrder) -> Compiled:
        """Nobody follows an answer here while grammars are compiled: those before this one are not needed any more."""
        began = time.process_time()
        self._grammars.clear()
        error = self._learn(order.grammar, order.source, is_checked=False)
        return Compiled(error, time.process_time() - began)

    def _learn(self, grammar: int, source: Source, *, is_checked: bool) -> str | None:
        """Compile a grammar. One that another worker has not checked computes a mask at once: that finds what is too
        complex to follow.
        """
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = grammar_text(source)
        except Exception as error:  # the converter of grammars raises several kinds, and plain ones
            return f"{error}"
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not is_checked and not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        self._grammars[grammar] = matcher
        return None

    def _fill(self, order: MaskOrder) -> Masks:
        for answer in order.ended:
            self._answers.pop(answer, None)
        for grammar in order.forgotten:
            self._grammars.pop(grammar, None)
        errors: dict[int, str] = {}
        followed = []
        for index, row in enumerate(order.rows):
            error, matcher = self._follow(row)
            if matcher is not None:
                followed.append((matcher, index))
            else:
                errors[index] = error
        if followed:
            one_mask_bytes = self._masks.strides[0]
            self._threads.unsafe_compute_mask_ptr(followed, self._masks.ctypes.data, one_mask_bytes, MASK_ROWS)
        for matcher, index in followed:
            if matcher.is_error():
                errors[index] = matcher.get_error()
            elif not order.rows[index].may_stop and matcher.is_accepting():
                self._forbid_stops(self._masks[index])
        return Masks(errors)

    def _follow(self, row: Row) -> tuple[str, llguidance.LLMatcher | None]:
        """Bring an answer to where the server knows it is; returns what asks for its mask, or why nothing can."""
        if row.is_new:
            if row.grammar not in self._grammars and row.source is not None:
                error = self._learn(row.grammar, row.source, is_checked=True)
                if error is not None:
                    return error, None
            self._answers[row.answer] = self._grammars[row.grammar].deep_copy()
        matcher = self._answers[row.answer]
        if row.tokens:
            matcher.consume_tokens(row.tokens)
        if row.ahead and not matcher.is_error():
            matcher = matcher.deep_copy()
            matcher.consume_tokens(list(row.ahead))
        error = matcher.get_error()
        return error, None if error else matcher

    def _forbid_stops(self, mask: NDArray[np.int32]) -> None:
        """Unless nothing else may come."""
        words = mask.copy().view(np.uint32)
        for stop in self._stop_ids:
            words[stop // 32] &= ~np.uint32(1 << stop % 32)
        if words.any():
            mask[:] = words.view(np.int32)

    @cached_property
    def _threads(self) -> llguidance.LLExecutor:
        """Made when first needed, since threads do not survive a fork."""
        from llguidance import LLExecutor

        return LLExecutor(num_threads=min(MASK_THREADS, os.cpu_count() or 1))


# -- sources to llguidance's own form ------------------------------------------------------------------------------


def grammar_text(source: Source) -> str:
    grammars = [{**_answer(source), "name": "answer"}]
    if source.thought is not None:
        grammars.insert(0, {"name": "thought", "lark_grammar": source.thought})
    return json.dumps({"grammars": grammars})


def _answer(source: Source) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import any_to_lark

    if isinstance(source.text, tuple):
        return _regex(choice_pattern(source.text))
    if source.kind == "json_schema":
        return {"json_schema": json.loads(source.text)}
    if source.kind == "user_lark":
        return {"lark_grammar": any_to_lark(source.text)}
    if source.kind == "regex":
        return _regex(source.text)
    return {"lark_grammar": source.text}


def _regex(pattern: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    return grammar
