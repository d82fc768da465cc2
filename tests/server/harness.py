"""A real server on a real port, in a thread of this process, so that tests can look into its engine."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from windowpane.engine.start import start
from windowpane.server.app import make_app
from windowpane.server.auth import Access
from windowpane.server.run import ServerOptions, http_config, make_service
from windowpane.server.service import Service

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": 4 * 2**20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PATIENCE_S = 90.0


class Running:
    """What tests need of a server: its address, its engine, and clients."""

    def __init__(self, service: Service, port: int, verify: ssl.SSLContext | None = None) -> None:
        self.service = service
        self.port = port
        self.url = f"http{'s' if verify else ''}://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=verify or True)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=fields)

    def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})

    @property
    def live_bytes(self) -> int:
        manager = self.service.engine.manager
        return sum(manager.group_bytes(g).live for g in range(len(manager.layout.groups)))

    def wait_until(self, condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
        give_up = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < give_up, f"not so after {patience_s} s: {what}"
            time.sleep(0.005)

    @contextmanager
    def engine_held(self) -> Iterator[None]:
        """The engine's thread is kept from its next step until the block is left."""
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(PATIENCE_S)

        self.service.loop._send(hold)
        assert held.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()

    def post_in_thread(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> threading.Thread:
        def post() -> None:
            httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S)

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        return thread

    def wait_until_idle(self) -> None:
        """Nothing runs, nothing waits, and every byte is free or only cached."""
        self.wait_until(lambda: not self.service.loop.jobs, "no job is left")
        self.wait_until(lambda: not self.service.engine.has_work, "the engine is idle")
        self.wait_until(lambda: self.live_bytes == 0, "nothing is live")


@contextmanager
def running(model: Path | str, *, flags: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """Serve a model until the block is left. `options` are those of `ServerOptions`."""
    if "api_keys" in options:
        options["access"] = Access(api_keys=options.pop("api_keys"))
    chosen = ServerOptions(**options)
    with serving(make_service(start(model, FLAGS if flags is None else flags), chosen), chosen) as up:
        yield up


@contextmanager
def serving(service: Service, chosen: ServerOptions, app: Any = None) -> Iterator[Running]:
    """Serve what was made already; `app` is an application around the service's own."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = uvicorn.Server(http_config(app or make_app(service, chosen.access), chosen))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        try:
            verify = None if chosen.tls is None else ssl.create_default_context(cafile=chosen.tls.certfile)
            up = Running(service, listener.getsockname()[1], verify)
            up.wait_until(lambda: server.started, "the server is up")
            yield up
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            up.http.close()
            up.openai.close()


def no_thoughts(server: Running) -> dict[str, float]:
    """A logit bias against beginning to think (`<th…`), and against spaces without end."""
    tokenizer = server.service.need_tokenizer("")
    return {str(tokenizer.encode(text, add_special_tokens=False)[0]): -100 for text in "<h \n\t\r"}


def prompts(server: Running) -> list[str]:
    """The prompts of the requests that come from now on, as text."""
    seen: list[str] = []
    loop, tokenizer = server.service.loop, server.service.need_tokenizer("")
    submit = loop.submit

    def submitted(job: Any) -> None:
        seen.extend(tokenizer.decode(request.prompt.tolist()) for request in job.requests)
        submit(job)

    loop.submit = submitted  # type: ignore[method-assign]
    return seen
