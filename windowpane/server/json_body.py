"""Reading JSON bodies more strictly than Python does: what is no text in any encoding is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from windowpane.server.errors import bad_request

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
        most = self.app.state.max_body_values
        # Reading holds the interpreter's lock, so the event loop: how long depends on the number of parts alone.
        if sum(map(body.count, (b",", b"[", b"{"))) > most or body.count(b"\\") > most:
            raise bad_request(
                f"the body has more than {most:,} values or escapes; send fewer or shorter prompts at once"
            )
        document = strict_json(body)
        await asyncio.sleep(0)  # checking takes as long again
        return document


def slow_json(document: Any) -> bytes:
    """JSON, piece by piece in Python: `json.dumps` would hold the interpreter's lock until the last of them."""
    return "".join(_ENCODER.iterencode(document)).encode()


def strict_json(text: str | bytes) -> Any:
    """The document in `text`. Raises `ApiError` or ValueError for what is no JSON, or no text in any encoding."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise bad_request("the body has an integer of more than 4,300 digits") from None
    if ("\\ud" in text.lower()) if isinstance(text, str) else (b"\\ud" in text.lower()):
        _check_surrogates(document)
    return document


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no JSON number", name, 0)


def _check_surrogates(document: Any) -> None:
    """Half of a character, escaped, is a string to Python but text to nobody."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("the body has a lone surrogate (an escape such as \\ud800), which is no character") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
