"""Errors in the shape that OpenAI clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as AnyHttpException
from starlette.types import Scope

from windowpane.server.loop import EngineDied
from windowpane.server.protocol import UNSUPPORTED

log = logging.getLogger("windowpane.server")


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def route_path(scope: Scope) -> str:
    """The path without that which a proxy serves this server under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class ApiError(HTTPException):
    """A request that is refused. `param` is the field at fault, `retry_after_s` when to come again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, message)
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def document(self, path: str = "") -> dict[str, Any]:
        """In the form of the API that the path belongs to: Anthropic's, Ollama's or OpenAI's."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_KINDS.get(self.status_code, self.kind)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if path.startswith("/api/"):
            return {"error": self.message}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.document(path), self.status_code, headers)


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """How every refusal looks."""

    error: ErrorBody


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


B = TypeVar("B", bound=BaseModel)


def translated(form: type[B], fields: dict[str, Any]) -> B:
    """What one API asks for in the words of another. A value that passed there and not here is refused by name."""
    try:
        return form.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _explain([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from None


def unavailable(message: str, retry_after_s: float | None = None) -> ApiError:
    return ApiError(503, message, kind="server_error", code="service_unavailable", retry_after_s=retry_after_s)


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")


def install(app: FastAPI, refused: Callable[[Scope, ApiError], None]) -> None:
    """Every way in which a request can go wrong ends in the same shape, and is told to `refused`."""

    def refuse(request: Request, error: ApiError) -> JSONResponse:
        log.info("%s %s refused: %d %s", request.method, request.url.path, error.status_code, error.message)
        refused(request.scope, error)
        return error.response(route_path(request.scope))

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> JSONResponse:
        return refuse(request, error)

    @app.exception_handler(EngineDied)
    async def _engine_died(request: Request, error: EngineDied) -> JSONResponse:
        return refuse(request, unavailable(str(error)))

    @app.exception_handler(RequestValidationError)
    async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return refuse(request, _explain(error.errors()))

    @app.exception_handler(AnyHttpException)
    async def _http_error(request: Request, error: AnyHttpException) -> JSONResponse:
        response = refuse(request, ApiError(error.status_code, _http_message(request, error)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failed(f"the server failed on this request: {type(error).__name__}").response(route_path(request.scope))


def _http_message(request: Request, error: AnyHttpException) -> str:
    if error.status_code == 404:
        there_is = sorted({r.path for r in request.app.routes if getattr(r, "include_in_schema", False)})
        return f"there is no {request.method} {request.url.path}; there is {', '.join(there_is)} (see /docs)"
    if error.status_code == 405:
        return f"{request.url.path} does not take {request.method}"
    return str(error.detail)


def _explain(errors: Sequence[Any]) -> ApiError:
    """The first thing wrong with a body, by name.

    Where a field may have several forms, each of them has something to say: what lies deepest is what was meant.
    """
    first = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
    error = max(first, key=lambda e: (len(_place(e)), _part_kind(e) is not None))
    where = _place(error)
    param = ".".join(where) or None
    kind = error["type"]
    if kind == "json_invalid":
        return bad_request(f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}")
    if kind == "extra_forbidden":
        return bad_request(_unknown(where), param, "unsupported_parameter")
    if (part := _part_kind(error)) is not None:
        return _unknown_part(param or "", part, error)
    if param is None:
        return bad_request("the body must be a JSON object, sent with Content-Type: application/json")
    said = dict.fromkeys(_lower(e["msg"].removeprefix("Value error, ")) for e in first if _place(e) == where)
    return bad_request(f"{param}: {' or '.join(said)}", param, "invalid_value")


MEDIA = ("image", "audio", "video", "file", "document", "pdf")


def _part_kind(error: Any) -> str | None:
    """The `type` of a part of the body, where that is what is wrong with it."""
    if error["type"] == "union_tag_invalid":
        return str(error["ctx"]["tag"])
    is_type = error["type"] == "literal_error" and error["loc"][-1] == "type"
    return error["input"] if is_type and isinstance(error["input"], str) else None


def _unknown_part(param: str, kind: str, error: Any) -> ApiError:
    if any(word in kind for word in MEDIA):
        return bad_request(
            f"{param}: {kind[:64]} parts cannot be read; this server reads text only", param, "unsupported_parameter"
        )
    there_is = error["ctx"].get("expected_tags") or error["ctx"].get("expected")
    return bad_request(f"{param}: there is no type {kind[:64]!r} here; there is {there_is}", param, "invalid_value")


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _place(error: Any) -> list[str]:
    parts = error["loc"][1:]
    names = [str(part) for part in parts if not _is_a_form(part)]
    if error["type"] == "extra_forbidden" and _is_a_form(parts[-1]):
        names.append(str(parts[-1]))  # a name that nobody knows may look like anything
    return names


def _is_a_form(part: object) -> bool:
    """Whether this part of a place is no field but one of the forms it may have, such as `list[str]` or a class."""
    return isinstance(part, str) and (
        part in ("str", "bool", "int", "constrained-str") or "[" in part or part[:1].isupper()
    )


def _unknown(where: Sequence[str]) -> str:
    name = where[-1]
    if len(where) == 1 and name in UNSUPPORTED:
        return f"{name} is not supported here: {UNSUPPORTED[name]}"
    if name.rstrip("s") in MEDIA:
        return f"{'.'.join(where)} cannot be read; this server reads text only"
    return f"unknown field {'.'.join(where)}; leave it out"
