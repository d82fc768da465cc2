"""Many streams at once: each says what it says alone. `bench/server.py` is the same with 1,000, and measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import FLAGS, Running, running

STREAMS, PROMPTS, TOKENS = 128, 8, 32


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


def chat_bodies(index: int) -> list[tuple[str, dict[str, Any]]]:
    """The same chat over every endpoint that streams one."""
    text = "window " * (1 + index % PROMPTS)
    messages = [{"role": "user", "content": text}]
    drawn: dict[str, Any] = {"temperature": 0, "stream": True, "ignore_eos": True}
    return [
        ("/v1/chat/completions", {**drawn, "messages": messages, "max_tokens": TOKENS}),
        ("/v1/responses", {**drawn, "input": text, "max_output_tokens": TOKENS}),
        ("/v1/messages", {**drawn, "messages": messages, "max_tokens": TOKENS}),
        ("/api/chat", {"model": "tiny", "messages": messages, "options": {"temperature": 0, "num_predict": TOKENS}}),
    ]


def text_of(path: str, line: str) -> str:
    """What one line of a stream adds to the text."""
    if path == "/api/chat":
        said: str = json.loads(line)["message"]["content"]
        return said
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    if path == "/v1/chat/completions":
        return event["choices"][0]["delta"].get("content") or ""
    if path == "/v1/responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return event["delta"]["text"] if event["type"] == "content_block_delta" else ""


def test_nor_do_endpoints_mix_anything_up(wide: Running) -> None:
    async def read_chat(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> str:
        async with client.stream("POST", path, json=asked) as got:
            assert got.status_code == 200
            return "".join([text_of(path, line) async for line in got.aiter_lines() if line])

    asked = [(path, given) for index in range(STREAMS // 4) for path, given in chat_bodies(index)]

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=wide.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(read_chat(client, path, given) for path, given in asked))

    alone = [
        wide.chat("window " * (1 + index), temperature=0, max_tokens=TOKENS, ignore_eos=True).json()
        for index in range(PROMPTS)
    ]
    expected = [answer["choices"][0]["message"]["content"] for answer in alone]
    assert asyncio.run(all_at_once()) == [expected[i // 4 % PROMPTS] for i in range(STREAMS)]
    assert len(set(expected)) > PROMPTS // 2
