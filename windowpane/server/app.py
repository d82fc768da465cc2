"""The routes. What each of them does is in a module of its own; here they are named and described."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from windowpane import __version__
from windowpane.engine.engine import Engine
from windowpane.server import errors, page, stats
from windowpane.server.adapters import LoadBody, UnloadBody, load_adapter, unload_adapter
from windowpane.server.auth import ADMIN, Access, ApiKeys, BodyLimit, caller
from windowpane.server.chat import chat, render
from windowpane.server.completions import complete
from windowpane.server.embeddings import embed
from windowpane.server.errors import ApiError, ErrorDocument, bad_request, unavailable
from windowpane.server.json_body import JsonRoute
from windowpane.server.loop import EngineDied
from windowpane.server.messages import CountBody, MessagesBody, answer_messages, count_tokens
from windowpane.server.ollama import GenerateBody, OllamaChatBody, ollama_chat, ollama_generate, tags
from windowpane.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeChat,
    TokenizeCompletion,
)
from windowpane.server.responses import ResponseStore, respond
from windowpane.server.responses_protocol import ResponsesBody
from windowpane.server.service import ClientGone, Replicas, Service
from windowpane.server.turnstile import Entrance, Turnstile

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorDocument, "description": "A field is wrong or not supported; `param` names it."},
    401: {"model": ErrorDocument, "description": "An API key is needed."},
    404: {"model": ErrorDocument, "description": "No such model."},
    413: {"model": ErrorDocument, "description": "The body is too large."},
    429: {"model": ErrorDocument, "description": "The queue is full; `Retry-After` says when to come again."},
    500: {"model": ErrorDocument, "description": "A step failed."},
    503: {"model": ErrorDocument, "description": "The engine died, or the server is shutting down."},
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}}
}


EVERYBODY = Access()
MIN_BODY_VALUES = 2**18  # that a body may hold, however short the model's context is
MIN_BODY_NAMES = 2**14  # of fields: those of some thousand messages
MAX_TOKENIZED = 2**18  # tokens that /tokenize writes out, where the model does not take more


def make_app(service: Service, access: Access = EVERYBODY) -> FastAPI:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Windowpane",
        version=__version__,
        description="The OpenAI API over Windowpane: see docs/server.md.",
        lifespan=life,
        responses=REFUSALS,
    )
    app.router.route_class = JsonRoute
    app.state.max_body_values = max(MIN_BODY_VALUES, 2 * service.max_model_len)
    app.state.max_body_names = max(MIN_BODY_NAMES, service.max_model_len // 8)
    app.state.large_bodies = Turnstile(1)
    errors.install(app, service.note_refused)
    _add_api(app, service)
    _add_responses(app, service)
    _add_messages(app, service)
    _add_ollama(app, service)
    _add_tokenizer(app, service)
    _add_operations(app, service)
    if access.admin_key is not None:
        _add_administration(app, service)
    facts = stats.ModelFacts(service.name, service.max_model_len, service.can_chat, *service.hardware)

    async def snapshot() -> dict[str, Any]:
        # Streams of /stats would keep a server open for ever: they end with the last request.
        if service.draining and not service.loop.jobs:
            raise unavailable("the server is shutting down")
        made = await service.watch(
            lambda engine: stats.snapshot(engine, service.loop.meter, facts, service.loop.times_of)
        )
        return made if service.replicas is None else service.replicas.add_to(made)

    async def history() -> dict[str, Any]:
        return await service.watch(lambda engine: stats.history(engine, service.loop.meter, service.loop.journal))

    app.include_router(stats.router(snapshot, history))
    if service.replicas is not None:
        _add_replicas(app, service.replicas)
    app.include_router(page.router())
    app.add_middleware(BodyLimit, max_bytes=service.limits.max_body_bytes, refused=service.refused)
    app.add_middleware(Entrance)
    guard(app, access, service)
    return app


def guard(app: Starlette, access: Access, service: Service) -> None:
    """Let in who has a key, and the pages of the sites that are allowed. `service` notes who was turned away."""
    if access.api_keys or access.admin_key is not None:
        app.add_middleware(ApiKeys, access=access, refused=service.refused)
    if access.allowed_origins:  # outermost: browsers ask before they send a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )


def _add_api(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", summary="The served model, by each of its names")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_documents(service)}

    @app.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name)

    @app.post("/v1/completions", summary="Continue text", response_class=Response, responses=STREAMS)
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await _answered(complete(service, body, http), service)

    @app.post("/v1/chat/completions", summary="Answer a chat", response_class=Response, responses=STREAMS)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await _answered(chat(service, body, http), service)

    @app.post("/v1/embeddings", summary="Hidden states of prompts", response_class=Response)
    async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
        return await _answered(embed(service, body, http), service)


def _add_responses(app: FastAPI, service: Service) -> None:
    store = ResponseStore()

    @app.post("/v1/responses", summary="Answer a chat, in items", response_class=Response, responses=STREAMS)
    async def create_response(body: ResponsesBody, http: Request) -> Response:
        return await _answered(respond(service, store, body, http), service)

    @app.get("/v1/responses/{id}", summary="A response that was stored", response_class=JSONResponse)
    async def stored_response(id: str, http: Request) -> Response:
        return await service.document(lambda: store.find(caller(http.scope), id).document)

    @app.delete("/v1/responses/{id}", summary="Forget a response")
    async def delete_response(id: str, http: Request) -> dict[str, Any]:
        store.delete(caller(http.scope), id)
        return {"id": id, "object": "response", "deleted": True}


def _add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", summary="Answer a chat, in blocks", response_class=Response, responses=STREAMS)
    async def messages(body: MessagesBody, http: Request) -> Response:
        return await _answered(answer_messages(service, body, http), service)

    @app.post("/v1/messages/count_tokens", summary="The length of a chat", response_class=JSONResponse)
    async def counted(body: CountBody) -> Response:
        return await count_tokens(service, body)


def _add_ollama(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", summary="Ollama's: answer a chat", response_class=Response)
    async def chat_ollama(body: OllamaChatBody, http: Request) -> Response:
        return await _answered(ollama_chat(service, body, http), service)

    @app.post("/api/generate", summary="Ollama's: answer a prompt", response_class=Response)
    async def generate_ollama(body: GenerateBody, http: Request) -> Response:
        return await _answered(ollama_generate(service, body, http), service)

    @app.get("/api/tags", summary="Ollama's: the models")
    async def tags_ollama() -> dict[str, Any]:
        return tags(service)

    @app.get("/api/version", summary="Ollama's: the version of Windowpane")
    async def version_ollama() -> dict[str, str]:
        return {"version": __version__}


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", summary="Text or a chat to token ids", response_class=JSONResponse)
    async def tokenize(body: TokenizeCompletion | TokenizeChat) -> Response:
        service.check_model(body.model)
        tokenizer = service.need_tokenizer("prompt")

        def document() -> dict[str, Any]:
            if isinstance(body, TokenizeChat):
                tokens = render(service, body, {}).token_ids
            else:
                special, most = body.add_special_tokens is not False, max(service.max_model_len, MAX_TOKENIZED)
                tokens = service.encode(body.prompt, "prompt", special, most)
            strings = [tokenizer.token_bytes(t, False).decode("utf-8", errors="replace") for t in tokens]
            return {
                "count": len(tokens),
                "max_model_len": service.max_model_len,
                "tokens": tokens,
                "token_strs": strings if body.return_token_strs else None,
            }

        return await service.document(document)

    @app.post("/detokenize", summary="Token ids to text", response_class=JSONResponse)
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        tokenizer = service.need_tokenizer("tokens")

        def document() -> dict[str, Any]:
            ids = service.tokens(body.tokens, "tokens").tolist() if body.tokens else []
            return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}

        return await service.document(document)

    @app.get("/tokenizer_info", summary="What is known of the tokenizer", response_class=JSONResponse)
    async def tokenizer_info() -> Response:
        files = service.need_tokenizer("tokenizer").files
        return await service.document(
            lambda: {
                "tokenizer_class": type(service.tokenizer).__name__,
                "source": files.source,
                "vocab_size": service.need_tokenizer("tokenizer").id_count,
                "model_max_length": service.max_model_len,
                "special_tokens": dict(files.special_tokens),
                "chat_template": files.chat_template,
            }
        )


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="200 while the engine runs, 503 when it died or shuts down")
    async def health() -> Response:
        if not service.loop.is_alive:
            return unavailable(f"the engine has stopped: {service.loop.error}").response()
        if service.draining:
            return unavailable("the server is shutting down").response()
        return JSONResponse({"status": "ok"})

    @app.get("/ping", summary="The same as /health")
    @app.post("/ping", summary="The same as /health")
    async def ping() -> Response:
        return await health()

    @app.get("/load", summary="Requests that run or wait")
    async def load() -> dict[str, int]:
        return {"server_load": sum(len(job.answers) for job in service.loop.jobs)}

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics() -> Response:
        made = service.loop.metrics

        def expose(engine: Engine) -> bytes:
            level = service.sleeper.level if service.sleeper is not None else 0
            return made.exposition(engine, alive=service.loop.is_alive, sleep_level=level)

        try:
            text = await service.loop.ask(expose)
        except EngineDied:
            text = expose(service.engine)  # nobody else looks at it any more
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.delete("/requests/{id:path}", summary="Cancel an answer that runs or waits")
    async def cancel(id: str, http: Request) -> dict[str, Any]:
        who = caller(http.scope)
        if not service.loop.cancel_for(None if who == ADMIN else who, id):
            message = f"no request {id[:128]!r} of this key runs or waits; GET /stats has their ids"
            raise ApiError(404, message, code="request_not_found")
        return {"id": id, "cancelled": True}

    @app.get("/version", summary="The version of Windowpane")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_replicas(app: FastAPI, replicas: Replicas) -> None:
    @app.get("/replicas/{id}/stats", summary="/stats of one replica")
    async def replica_stats(id: str) -> dict[str, Any]:
        try:
            return await replicas.stats(id)
        except LookupError:
            message = f"no replica {id[:128]!r} is there; GET /stats has their ids"
            raise ApiError(404, message, code="replica_not_found") from None


def _add_administration(app: FastAPI, service: Service) -> None:
    @app.post("/v1/load_lora_adapter", summary="Serve an adapter from --lora-dir; for the admin key")
    async def load_lora_adapter(body: LoadBody) -> dict[str, Any]:
        return await load_adapter(service, body, service.lora_dir)

    @app.post("/v1/unload_lora_adapter", summary="Serve an adapter no longer; for the admin key")
    async def unload_lora_adapter(body: UnloadBody) -> dict[str, Any]:
        return await unload_adapter(service, body)

    @app.post("/reset_prefix_cache", summary="Give up what is only cached; for the admin key")
    async def reset_prefix_cache() -> dict[str, int]:
        return {"dropped_restore_points": await service.loop.drop_restore_points()}

    @app.post(
        "/sleep", summary="Give memory back when all is answered: level 1 drops KV, 2 weights too; for the admin key"
    )
    async def sleep(level: int = 1) -> dict[str, int]:
        try:
            return {"level": level, "freed_bytes": await service.sleep(level)}
        except ValueError as error:
            raise bad_request(str(error), "level") from None

    @app.post("/wake_up", summary="Take the memory again; for the admin key")
    async def wake_up() -> dict[str, bool]:
        await service.wake()
        return {"is_sleeping": False}

    @app.get("/is_sleeping", summary="Whether it sleeps; for the admin key")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": service.asleep}


async def _answered(answer: Any, service: Service) -> Response:
    try:
        response: Response = await answer
        return response
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; proxies log it so
    except asyncio.CancelledError:
        if not service.draining:
            raise
        return unavailable("the server was shut down before this answer was complete").response()


def model_documents(service: Service) -> list[dict[str, Any]]:
    """The model and its adapters, each by every name."""
    return [_model(service, name) for name in [*service.names, *service.adapters]]


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "windowpane",
        "root": service.name if adapter is None else Path(adapter.path).name,
        "parent": None if adapter is None else service.name,
        "max_model_len": service.max_model_len,
    }
