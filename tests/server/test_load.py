"""Many streams at once: each says what it says alone. `bench/server.py` measures what they cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import FLAGS, Running, running
from windowpane.server import service

STREAMS, PROMPTS, TOKENS = 128, 8, 32
MIXED, ENDPOINTS, FEW_TOKENS = 1002, 6, 6


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[Running]:
    with running(model, flags={**FLAGS, "max_num_seqs": 48, "kv_cache_memory_bytes": 2 * 2**20}) as server:
        yield server
        server.wait_until_idle()


def body(index: int) -> dict[str, Any]:
    """Greedy and seeded requests with prompts of several lengths."""
    sampling: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index % PROMPTS}
    return {"prompt": "window " * (1 + index % PROMPTS), "max_tokens": TOKENS, "ignore_eos": True, **sampling}


async def read(client: httpx.AsyncClient, index: int) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json={**body(index), "stream": True}) as got:
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def test_every_text_equals_its_solo_run(wide: Running) -> None:
    alone = [wide.complete(**body(index)).json()["choices"][0]["text"] for index in range(PROMPTS)]

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=wide.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(read(client, index) for index in range(STREAMS)))

    texts = asyncio.run(all_at_once())
    assert texts == [alone[index % PROMPTS] for index in range(STREAMS)]
    assert len(set(alone)) == PROMPTS


def words(index: int) -> str:
    """Prompts that end differently, so that answers to them do at once."""
    return f"window {chr(ord('a') + index % PROMPTS) * 3}"


def bodies(index: int) -> list[tuple[str, dict[str, Any]]]:
    """The same chat or text over every endpoint that streams."""
    text = words(index)
    messages = [{"role": "user", "content": text}]
    drawn: dict[str, Any] = {"temperature": 0, "stream": True, "ignore_eos": True}
    options = {"temperature": 0, "num_predict": FEW_TOKENS}
    return [
        ("/v1/completions", {**drawn, "prompt": text, "max_tokens": FEW_TOKENS}),
        ("/api/generate", {"model": "tiny", "prompt": text, "raw": True, "options": options}),
        ("/v1/chat/completions", {**drawn, "messages": messages, "max_tokens": FEW_TOKENS}),
        ("/v1/responses", {**drawn, "input": text, "max_output_tokens": FEW_TOKENS}),
        ("/v1/messages", {**drawn, "messages": messages, "max_tokens": FEW_TOKENS}),
        ("/api/chat", {"model": "tiny", "messages": messages, "options": options}),
    ]


def text_of(path: str, line: str) -> str:
    """What one line of a stream adds to the text."""
    if path == "/api/chat":
        said: str = json.loads(line)["message"]["content"]
        return said
    if path == "/api/generate":
        return str(json.loads(line)["response"])
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    if path == "/v1/completions":
        return str(event["choices"][0]["text"])
    if path == "/v1/chat/completions":
        return event["choices"][0]["delta"].get("content") or ""
    if path == "/v1/responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return event["delta"]["text"] if event["type"] == "content_block_delta" else ""


def test_nor_do_a_thousand_over_every_streaming_endpoint(wide: Running) -> None:
    async def read_one(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> str:
        async with client.stream("POST", path, json=asked) as got:
            assert got.status_code == 200
            return "".join([text_of(path, line) async for line in got.aiter_lines() if line])

    asked = [each for index in range(MIXED // ENDPOINTS) for each in bodies(index)]

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=MIXED)
        async with httpx.AsyncClient(base_url=wide.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(read_one(client, path, given) for path, given in asked))

    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": FEW_TOKENS, "ignore_eos": True}
    chats, texts = [], []
    for index in range(PROMPTS):
        chats.append(wide.chat(words(index), **greedy).json()["choices"][0]["message"]["content"])
        texts.append(wide.complete(prompt=words(index), **greedy).json()["choices"][0]["text"])
    expected = [
        (chats if path not in ("/v1/completions", "/api/generate") else texts)[i // ENDPOINTS % PROMPTS]
        for i, (path, _) in enumerate(asked)
    ]
    assert asyncio.run(all_at_once()) == expected and len(expected) == MIXED
    assert len(set(chats)) > PROMPTS // 2 and set(chats).isdisjoint(texts)


def test_memory_is_given_back_after_requests_and_only_then(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies leave holes in the C library's heap, which it would keep for as long as the server runs."""
    given_back: list[float] = []
    monkeypatch.setattr(service, "GIVE_BACK_S", 0.02)
    monkeypatch.setattr(service.heap, "give_back", lambda: given_back.append(time.monotonic()))
    with running(model) as server:
        time.sleep(0.1)
        assert not given_back, "nobody has asked for anything"
        for body in ({"prompt": "Hello", "max_tokens": 1}, {"prompt": 5}):
            before = len(given_back)
            server.complete(**body)
            server.wait_until(lambda before=before: len(given_back) > before, "answered or refused")
        time.sleep(0.1)
        assert len(given_back) <= 3
