"""Adapters that clients name as models: those of `--lora-modules`, and those that are loaded while the server runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from windowpane.server.errors import ApiError, bad_request, unavailable
from windowpane.server.service import Service


class LoadBody(BaseModel):
    """As vLLM's /v1/load_lora_adapter takes it."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadBody(BaseModel):
    """As vLLM's /v1/unload_lora_adapter takes it."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_int_id: int | None = None


def parse_modules(texts: list[str]) -> dict[str, str]:
    """Paths by name: each text is name=path, or JSON with both, as vLLM takes it."""
    modules: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if text.lstrip().startswith("{"):
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise ValueError(f"--lora-modules {text}: {error}") from None
            name, path = str(fields.get("name") or ""), str(fields.get("path") or "")
        if not name or not path:
            raise ValueError(f"--lora-modules {text}: an adapter is name=path")
        if name in modules:
            raise ValueError(f"--lora-modules names {name!r} twice")
        modules[name] = path
    return modules


async def load_adapter(service: Service, body: LoadBody, directory: Path | None) -> dict[str, Any]:
    """From the named directory alone: who may administer a server need not see all of its files."""
    adapters = service.engine.adapters
    if adapters is None:
        raise bad_request("the server was started without --enable-lora")
    if directory is None:
        raise bad_request("the server was started without --lora-dir, the one directory adapters are loaded from")
    path = (directory / body.lora_path).resolve()
    if not path.is_relative_to(directory.resolve()) or not path.is_dir():
        raise bad_request(f"{body.lora_path!r} is no directory below --lora-dir", "lora_path")
    if service.asleep:
        raise unavailable("the engine sleeps; POST /wake_up, and load it then", retry_after_s=5)
    if body.lora_name in service.names or body.lora_name in adapters.loaded:
        raise bad_request(f"{body.lora_name!r} is served already; unload it first", "lora_name")
    try:
        read = await service.off_loop(adapters.read, path)
        await service.loop.ask(lambda _: adapters.add(body.lora_name, path, read))
    except ValueError as error:
        raise bad_request(str(error).replace(f"{directory.resolve()}/", ""), "lora_path") from None
    return {"status": "loaded", "lora_name": body.lora_name}


async def unload_adapter(service: Service, body: UnloadBody) -> dict[str, Any]:
    """Requests that run with it go on to their ends."""
    adapters = service.engine.adapters
    if adapters is None or body.lora_name not in adapters.loaded:
        raise ApiError(404, f"no adapter {body.lora_name!r} is loaded", param="lora_name", code="model_not_found")
    if service.asleep:
        raise unavailable("the engine sleeps; POST /wake_up, and unload it then", retry_after_s=5)
    await service.loop.ask(lambda _: adapters.remove(body.lora_name))
    return {"status": "unloaded", "lora_name": body.lora_name}
