"""Streams over every endpoint that has them, all at once: does each say what its prompt says alone?

    python3 -m bench.streams                  # 1,002 of them, against `windowpane serve` on a tiny random model

Exit status 1 when one says something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import machine_line
from bench.server import Served, stream
from tests.tiny_model import make_model

PROMPTS, TOKENS = 8, 6
RAW = ("/v1/completions", "/api/generate")  # no chats
CHAT = "/v1/chat/completions"
ENDPOINTS = (*RAW, CHAT, "/v1/responses", "/v1/messages", "/api/chat")


def words(index: int) -> str:
    """Prompts that end differently, so that answers to them do at once."""
    return f"window {chr(ord('a') + index % PROMPTS) * 3}"


def body(path: str, index: int) -> dict[str, Any]:
    """The same chat or text over every endpoint."""
    text = words(index)
    messages = [{"role": "user", "content": text}]
    drawn: dict[str, Any] = {"temperature": 0, "stream": True, "ignore_eos": True}
    options = {"temperature": 0, "num_predict": TOKENS}
    asked = {
        "/v1/completions": {**drawn, "prompt": text, "max_tokens": TOKENS},
        "/api/generate": {"model": "tiny", "prompt": text, "raw": True, "options": options},
        "/v1/chat/completions": {**drawn, "messages": messages, "max_tokens": TOKENS},
        "/v1/responses": {**drawn, "input": text, "max_output_tokens": TOKENS},
        "/v1/messages": {**drawn, "messages": messages, "max_tokens": TOKENS},
        "/api/chat": {"model": "tiny", "messages": messages, "options": options},
    }
    return asked[path]


def text_of(path: str, line: str) -> str:
    """What one line of a stream adds to the text."""
    if path == "/api/chat":
        return str(json.loads(line)["message"]["content"])
    if path == "/api/generate":
        return str(json.loads(line)["response"])
    event = json.loads(line.removeprefix("data: "))
    if path == "/v1/completions":
        return str(event["choices"][0]["text"])
    if path == "/v1/chat/completions":
        return event["choices"][0]["delta"].get("content") or ""
    if path == "/v1/responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return event["delta"]["text"] if event["type"] == "content_block_delta" else ""


async def mixed_up(port: int, streams: int) -> int:
    """How many of so many streams say something else than their prompt alone."""
    asked = [(ENDPOINTS[i % len(ENDPOINTS)], i // len(ENDPOINTS) % PROMPTS) for i in range(streams)]
    alone = {(path, index): await _said(port, path, index) for path in (RAW[0], CHAT) for index in range(PROMPTS)}
    assert len(set(alone.values())) > PROMPTS, "prompts that say the same"
    texts = await asyncio.gather(*(_said(port, path, index) for path, index in asked))
    expected = [alone[RAW[0] if path in RAW else CHAT, index] for path, index in asked]
    return sum(text != wanted for text, wanted in zip(texts, expected, strict=True))


async def _said(port: int, path: str, index: int) -> str:
    return "".join(text_of(path, line) for line in await stream(port, path, body(path, index), []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1002)
    streams = parser.parse_args().streams
    with tempfile.TemporaryDirectory() as folder:
        served = Served(make_model(Path(folder) / "tiny"))
        try:
            began = time.perf_counter()
            wrong = asyncio.run(mixed_up(served.port, streams))
            seconds = time.perf_counter() - began
        finally:
            served.stop()
    print(f"{streams:,} streams over {len(ENDPOINTS)} endpoints in {seconds:.0f} s: {wrong} mixed up\n{machine_line()}")
    print(json.dumps({"bench": "streams", "streams": streams, "endpoints": len(ENDPOINTS), "mixed_up": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
