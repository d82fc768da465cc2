"""Several models behind one address: a request goes to the application of the model that it names.

POST /v1/chat/completions {"model": "gemma", …}     the model `gemma`; the first where none is named
/models/gemma/…                                     everything of one model: its page, /stats, /metrics, /v1/…
GET /v1/models, /metrics                            of all models
anything else                                       the first model's
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from fastapi.responses import JSONResponse, Response
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windowpane.server.app import guard, make_app, model_documents
from windowpane.server.auth import Access
from windowpane.server.errors import ApiError, route_path
from windowpane.server.service import Service

SERVICE = "windowpane.service"  # in a scope: whose path was asked for
LARGE_BODY_BYTES = 2**16  # read beside the event loop


def make_front(services: Sequence[Service], access: Access) -> ASGIApp:
    """One application for all of them; that of the model itself where there is one."""
    if len(services) == 1:
        return make_app(services[0], access)
    names = [name for service in services for name in service.names]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have one name: {', '.join(names)}; give each its own served-model-name")
    inner = replace(access, api_keys=(), requests_per_minute=None, concurrent_requests=None, allowed_origins=())
    front = _Front([(service, make_app(service, inner)) for service in services])

    @asynccontextmanager
    async def life(outer: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for _, app in front.models:
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield

    outer = Starlette(routes=[Mount("/", front)], lifespan=life)
    guard(outer, access, services[0])
    return _Prefixes(outer, front.by_name)


class _Prefixes:
    """Takes /models/NAME off a path, outside of all else: who may see a path depends on what it is then."""

    def __init__(self, app: ASGIApp, by_name: dict[str, tuple[Service, Starlette]]) -> None:
        self._app = app
        self._services = {f"/models/{name}": service for name, (service, _) in by_name.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, root = route_path(scope), scope.get("root_path", "")
            for prefix, service in self._services.items():
                if path == prefix:
                    to_page = Response(status_code=307, headers={"Location": quote(f"{root}{prefix}/")})
                    await to_page(scope, receive, send)
                    return
                if path.startswith(f"{prefix}/"):
                    scope = {**scope, "root_path": root + prefix, SERVICE: service}
                    break
        await self._app(scope, receive, send)


class _Front:
    def __init__(self, models: list[tuple[Service, Starlette]]) -> None:
        self.models = models
        self.by_name = {name: model for model in models for name in model[0].names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if (asked := scope.get(SERVICE)) is not None:
            await self.by_name[asked.name][1](scope, receive, send)
        elif scope["method"] == "GET" and path == "/v1/models":
            data = [document for service, _ in self.models for document in model_documents(service)]
            await JSONResponse({"object": "list", "data": data})(scope, receive, send)
        elif scope["method"] == "GET" and path == "/metrics":
            text = merged_metrics([await self._metrics(service) for service, _ in self.models])
            await Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")(scope, receive, send)
        elif scope["method"] == "GET" and path.startswith("/v1/models/"):
            _, app = self.by_name.get(path.removeprefix("/v1/models/"), self.models[0])
            await app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._by_body(scope, receive, send)
        else:
            await self.models[0][1](scope, receive, send)

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, app = self.models[0]
        messages, body = await _read(receive, service.limits.max_body_bytes)
        name = await asyncio.to_thread(_model_of, body) if len(body) > LARGE_BODY_BYTES else _model_of(body)
        if name is not None:
            found = self.by_name.get(name) or next((m for m in self.models if name in m[0].adapters), None)
            if found is None:
                known = [document["id"] for each, _ in self.models for document in model_documents(each)]
                error = ApiError(
                    404, f"the model {name!r} is not served here; there is {', '.join(known)}", param="model",
                    code="model_not_found",
                )  # fmt: skip
                service.note_refused(scope, error)
                await error.response(route_path(scope))(scope, receive, send)
                return
            _, app = found
        await app(scope, _again(messages, receive), send)

    async def _metrics(self, service: Service) -> str:
        loop = service.loop
        return (await loop.ask(lambda engine: loop.metrics.exposition(engine, alive=loop.is_alive))).decode()


async def _read(receive: Receive, most_bytes: int) -> tuple[list[Message], bytes]:
    """A body's messages, up to its end or until there is more than anybody takes."""
    messages: list[Message] = []
    read = 0
    while read <= most_bytes:
        message = await receive()
        messages.append(message)
        read += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return messages, b"".join(message.get("body", b"") for message in messages)


def _again(messages: list[Message], receive: Receive) -> Receive:
    """What was received once more, and then what comes."""
    left = iter(messages)

    async def next_message() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return next_message


def _model_of(body: bytes) -> str | None:
    """None too where it cannot be read: the first model's application says what is wrong."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = document.get("model") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def merged_metrics(texts: Sequence[str]) -> str:
    """One exposition of several, with the samples of each family together, as the format asks."""
    families: dict[str, str] = {}
    for text in texts:
        for family in text.split("# HELP ")[1:]:
            name = family.split(" ", 1)[0]
            _help, _type, samples = family.split("\n", 2)
            families[name] = families[name] + samples if name in families else f"# HELP {family}"
    return "".join(families.values())
