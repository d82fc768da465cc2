"""Lets work begin a little at a time, so that a thousand requests that come at once do not stop the streams that run.

An event loop does all that is ready before it looks at anything else, and the first part of a request (parsing,
checking, tokenizing) is the longest that a handler works without a pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

PER_TURN = 8  # requests that begin in one turn of the event loop: some milliseconds of work

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Turnstile:
    """Lets `per_turn` in during each turn of the event loop, in the order they came."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._entered = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._entered < self._per_turn and not self._waiting:
            self._entered += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        """The next turn of the loop: those who came first enter."""
        self._entered = 0
        while self._waiting and self._entered < self._per_turn:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its client may be gone
                waiting.set_result(None)
                self._entered += 1
        self._turning = bool(self._entered or self._waiting)
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)


class Entrance:
    """Middleware: all requests pass one turnstile."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._turnstile = Turnstile(PER_TURN)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._turnstile.enter()
        await self._app(scope, receive, send)
