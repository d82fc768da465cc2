"""Lets requests in a few at a time, so that a thousand that come at once do not stop the streams that run.

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
    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._begun < PER_TURN and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        """The next turn of the loop: those who came first begin."""
        self._begun = 0
        while self._waiting and self._begun < PER_TURN:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its client may be gone
                waiting.set_result(None)
                self._begun += 1
        self._turning = bool(self._begun or self._waiting)
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
