"""Reading JSON bodies more strictly than Python does: what is no text in any encoding is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from windowpane.server.errors import bad_request
from windowpane.server.turnstile import Turnstile

COUNTED_BYTES = 2**20  # at once, in a millisecond or a few
LARGE_BYTES = 2**14  # beyond which a body may take milliseconds to read, and again to check
JOINED_PIECES = 4096  # of JSON, at once
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        turns: Turnstile = self.app.state.large_bodies
        await check_size(body, self.app.state.max_body_values, self.app.state.max_body_names, turns)
        await let_others_run(body, turns)
        document = _read_quickly(body)
        if document is _NOT_READ:
            await let_others_run(body, turns)
            document = _read(body)
            await asyncio.to_thread(_check_surrogates, document)
        await let_others_run(body, turns)
        return document


async def check_size(body: bytes, most: int, most_names: int, turns: Turnstile) -> None:
    """Reading holds the interpreter's lock, so the event loop: how long depends on the number of parts alone.

    So does counting them, so it is done piece by piece.
    """
    values = escapes = colons = names = 0
    async for piece in _pieces(body, turns):
        values += sum(map(piece.count, (b",", b"[", b"{")))
        escapes += piece.count(b"\\")
        colons += piece.count(b":")
        if max(values, escapes) > most:
            raise bad_request(
                f"the body has more than {most:,} values or escapes; send fewer or shorter prompts at once"
            )
    if colons <= most_names:
        return
    # Objects are read, and then checked against their fields, in microseconds each: 100 times as long as numbers.
    async for piece in _pieces(body, turns):
        names += _names(piece)
        if names > most_names:
            raise bad_request(
                f"the body has more than {most_names:,} names of fields; send fewer messages or tools at once"
            )


async def _pieces(body: bytes, turns: Turnstile) -> AsyncIterator[bytes]:
    for start in range(0, len(body), COUNTED_BYTES):
        await let_others_run(body, turns)
        yield body[start : start + COUNTED_BYTES]


def _names(body: bytes) -> int:
    """About how many names its objects have: quotes with a colon behind them, unless they are escaped."""
    return body.translate(None, b" \t\r\n").replace(b"\\\\", b"").replace(b'\\"', b"").count(b'":')


async def let_others_run(body: bytes, turns: Turnstile) -> None:
    """Before something that takes a while for a large body: in a turn of the event loop one of them is worked on."""
    if len(body) > LARGE_BYTES:
        await turns.enter()


def slow_json(document: Any) -> bytes:
    """JSON, piece by piece in Python: `json.dumps` would hold the interpreter's lock until the last of them. So would
    joining all of them, so that is done some at a time.
    """
    pieces = _ENCODER.iterencode(document)
    return b"".join(iter(lambda: "".join(islice(pieces, JOINED_PIECES)).encode(), b""))


def strict_json(text: str | bytes) -> Any:
    """The document in `text`. Raises `ApiError` or ValueError for what is no JSON, or no text in any encoding."""
    document = _read_quickly(text)
    if document is _NOT_READ:
        document = _read(text)
        _check_surrogates(document)
    return document


_NOT_READ = object()


def _read_quickly(text: str | bytes) -> Any:
    """In half the time that Python takes, or less. What is odd in any way is left to Python's reader, which says what
    is wrong in its own words: lone surrogates, constants such as NaN, and depth, some of which may be allowed.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return _NOT_READ


def _read(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise bad_request("the body has an integer of more than 4,300 digits") from None


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no JSON number", name, 0)


def _check_surrogates(document: Any) -> None:
    """Half of a character, escaped, is a string to Python but text to nobody."""
    values = [document]
    try:
        while values:
            value = values.pop()
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, list):
                values += value
            elif isinstance(value, dict):
                values += value
                values += value.values()
    except UnicodeEncodeError:
        raise bad_request("the body has a lone surrogate (an escape such as \\ud800), which is no character") from None
