"""Pure ASGI middleware: who may come in, and how much they may bring."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from binascii import Error as NotBase64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windowpane.server.errors import ApiError, route_path
from windowpane.server.page import is_page

Refused = Callable[[Scope, ApiError], None]  # told of whom is turned away here, before any route is found
OPEN_PATHS = frozenset({"/health", "/ping"})
REQUESTS = "/requests/"  # a key may cancel what it asked for, and the admin key what anybody did
ADMIN_PATHS = frozenset(
    {
        *("/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)


ADMIN = "admin"  # what the admin key's caller is called: no digest is
CALLER = "windowpane.caller"  # where a scope says whose key it came with


def caller(scope: Scope) -> str:
    """Tells callers apart by their keys. Where none is asked for, all are one."""
    return str(scope.get(CALLER, ""))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in. Without keys everybody may; without an admin key nobody may administer.

    `requests_per_minute` and `concurrent_requests` hold for each key by itself, and for POST requests. The rest is
    CORS: which pages of other sites a browser may let in.
    """

    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("--api-key is empty, which would let everybody in; leave it out, or give a key")
        if self.admin_key is not None and (not self.admin_key.strip() or self.admin_key in self.api_keys):
            raise ValueError("--admin-key must be a key of its own, and not empty")
        limits = {"requests-per-minute": self.requests_per_minute, "concurrent-requests": self.concurrent_requests}
        if not self.api_keys and any(limits.values()):
            name = next(name for name, value in limits.items() if value)
            raise ValueError(f"--{name} holds for each key; add --api-key")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError('--allow-credentials needs --allowed-origins to name them; browsers refuse "*"')


class ApiKeys:
    """Lets nobody in without a key, but to /health and to the files of the page, which asks for the key itself.

    Clients and the page send `Authorization: Bearer KEY`. Browsers that open something else, such as /docs, are asked
    for a password, which is the key. What administers has a key of its own.
    """

    def __init__(self, app: ASGIApp, access: Access, refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._digests = [_digest(key.encode()) for key in access.api_keys]
        self._admin = [] if access.admin_key is None else [_digest(access.admin_key.encode())]
        self._quotas = {
            digest.hex(): Quota(access.requests_per_minute, access.concurrent_requests) for digest in self._digests
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(route_path(scope)):
            await self._app(scope, receive, send)
            return
        is_admin = route_path(scope) in ADMIN_PATHS
        known = self._admin if is_admin else self._digests
        given = _digest(_credential(Headers(scope=scope)))
        if route_path(scope).startswith(REQUESTS) and _among(given, self._admin):
            scope[CALLER] = ADMIN
            await self._app(scope, receive, send)
            return
        if not _among(given, known) and (is_admin or known):
            await self._refuse(scope, receive, send, is_admin)
            return
        quota = self._quotas.get(given.hex())
        if quota is None:
            await self._app(scope, receive, send)
            return
        scope[CALLER] = given.hex()
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            with quota.taken():
                await self._app(scope, receive, send)
        except OverQuota as over:
            self._refused(scope, over)
            await over.response(route_path(scope))(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, is_admin: bool) -> None:
        browses = "text/html" in Request(scope).headers.get("accept", "")
        error = ApiError(
            401,
            f"{'the admin' if is_admin else 'an API'} key is needed: send it as Authorization: Bearer KEY, "
            "or as X-Api-Key",
            kind="authentication_error",
            code="invalid_api_key",
        )
        self._refused(scope, error)
        response = error.response(route_path(scope))
        # Only who opens a page is asked for a password; a script's request must not pop up a dialogue.
        response.headers["WWW-Authenticate"] = (
            'Basic realm="Windowpane: any name, the API key as password"' if browses else "Bearer"
        )
        await response(scope, receive, send)


class OverQuota(ApiError):
    """A key has asked for more than it may; others are not concerned."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


class Quota:
    """What one key may ask for: so many requests a minute, in any rhythm, and so many at once."""

    def __init__(self, per_minute: int | None, at_once: int | None) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._left = float(per_minute or 0)
        self._looked_at = time.monotonic()
        self._running = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A place for one request; raises OverQuota where there is none."""
        if self._at_once is not None and self._running >= self._at_once:
            raise OverQuota(f"this key may run {self._at_once} requests at once; wait until one has ended", 1.0)
        self._take_one()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _take_one(self) -> None:
        if self._per_minute is None:
            return
        now = time.monotonic()
        gained = (now - self._looked_at) * self._per_minute / 60
        self._left, self._looked_at = min(self._left + gained, float(self._per_minute)), now
        if self._left < 1:
            wait_s = (1 - self._left) * 60 / self._per_minute
            raise OverQuota(f"this key may send {self._per_minute} requests a minute; try again later", wait_s)
        self._left -= 1


def _among(given: bytes, known: Sequence[bytes]) -> bool:
    """Compares digests with every key: how long it takes tells nothing about any of them."""
    return sum(hmac.compare_digest(given, one) for one in known) > 0


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
            await error.response(route_path(scope))(scope, receive, send)
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
