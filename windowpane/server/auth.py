"""Pure ASGI middleware: who may come in, and how much they may bring."""

from __future__ import annotations

import base64
import hashlib
import hmac
from binascii import Error as NotBase64
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windowpane.server.errors import ApiError
from windowpane.server.page import is_page

Refused = Callable[[Scope, ApiError], None]  # told of whom is turned away here, before any route is found
OPEN_PATHS = frozenset({"/health"})


CALLER = "windowpane.caller"  # where a scope says whose key it came with


def caller(scope: Scope) -> str:
    """Tells callers apart by their keys. Where none is asked for, all are one."""
    return str(scope.get(CALLER, ""))


class ApiKeys:
    """Lets nobody in without a key, but to /health and to the files of the page, which asks for the key itself.

    Clients and the page send `Authorization: Bearer KEY`. Browsers that open something else, such as /docs, are asked
    for a password, which is the key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = _digest(_credential(Headers(scope=scope)))
        if self._knows(given):
            scope[CALLER] = given.hex()
            await self._app(scope, receive, send)
            return
        browses = "text/html" in Request(scope).headers.get("accept", "")
        error = ApiError(
            401,
            "an API key is needed: send it as Authorization: Bearer KEY, or as X-Api-Key",
            kind="authentication_error",
            code="invalid_api_key",
        )
        self._refused(scope, error)
        response = error.response(scope["path"])
        # Only who opens a page is asked for a password; a script's request must not pop up a dialogue.
        response.headers["WWW-Authenticate"] = (
            'Basic realm="Windowpane: any name, the API key as password"' if browses else "Bearer"
        )
        await response(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        """Compares digests with every key: how long it takes tells nothing about any of them."""
        return sum(hmac.compare_digest(given, known) for known in self._digests) > 0


def _is_open(path: str) -> bool:
    """The page holds no data: it has to be there to ask for the key that everything it shows needs."""
    return path in OPEN_PATHS or is_page(path)


def _credential(headers: Headers) -> bytes:
    """As OpenAI's clients and browsers send it, or as Anthropic's do."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1", errors="replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except NotBase64:
            return b""
    return headers.get("x-api-key", "").encode("latin-1", errors="replace")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Refuses bodies beyond a size, by what they say of themselves and by what really comes."""

    def __init__(self, app: ASGIApp, max_bytes: int, refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdigit() or int(length) > self._max_bytes:
            error = self._too_large()
            self._refused(scope, error)
            await error.response(scope["path"])(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._max_bytes:,} bytes", code="body_too_large")
