"""A job: what one HTTP request asks of the engine, and the pieces of text that come back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from windowpane.schedule.request import FinishReason, Request, TokenLogprobs
from windowpane.text.answer import Answer

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def job_id(prefix: str, asked: str | None, headers: Mapping[str, str]) -> str:
    """The id of an answer: what the body asks for, or made of the X-Request-Id that a client or proxy sent along."""
    given = headers.get("x-request-id", "")
    return asked or f"{prefix}-{given if _ID.fullmatch(given) else uuid4().hex}"


class Piece(NamedTuple):
    """What one step added to one choice of a job: text (which may be held back and so empty), and its token.

    `token` is None where a choice ended without one. `finish_reason` is set with the last piece of a choice.
    """

    choice: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False)
class Times:
    """Moments of one request's life, in `time.monotonic` seconds; None where it never came that far."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


class Mailbox:
    """Pieces on their way to one reader, on the event loop."""

    def __init__(self) -> None:
        self.looked_at = time.monotonic()  # when its reader last came
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.wake()

    def wake(self) -> None:
        """Have the reader look, even if there is nothing: it may want to show a sign of life."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """All that has come; waits where nothing has. Empty when the reader was woken for nothing."""
        self.looked_at = time.monotonic()
        if not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._pieces = self._pieces, []
        return taken


@dataclass(slots=True, eq=False)
class Job:
    """What one HTTP request asks of the engine: a request per choice, run together.

    Unless it `streams`, nothing is posted for a choice before it has ended.
    """

    id: str
    answers: list[Answer]
    streams: bool
    arrived: float = field(default_factory=time.monotonic)
    user: str | None = None
    traceparent: str | None = None  # the trace that its client is in, by the header of this name
    caller: str = ""  # whose key it came with: see `auth.caller`
    client_gone: bool = False
    mailbox: Mailbox = field(default_factory=Mailbox)
    times: list[Times] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """Of its response."""
        return {"X-Request-Id": self.id}

    @property
    def requests(self) -> list[Request]:
        return [answer.request for answer in self.answers]
