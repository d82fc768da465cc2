"""Writes the answers of a chat as the API's documents: whole, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from windowpane.request import TokenLogprobs
from windowpane.server.loop import Job, Piece
from windowpane.server.protocol import ChatBody
from windowpane.server.service import Service
from windowpane.server.sse import event, to_json
from windowpane.server.usage import finish_reason, finite, stop_reason, token_text, usage

PLAIN_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatWriter:
    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        self._job = job
        self._body = body
        self._tokenizer = service.need_tokenizer("messages")
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": job.id, "object": kind, "created": int(time.time()), "model": service.name}
        before = to_json({**self._head, "choices": []})[:-2]
        # Most chunks hold nothing but text: these are put together from ready-made parts.
        plain = not (body.logprobs or self._usage_last or self._usage_always)
        self._plain_heads = (
            [b"data: " + before + b'{"index":%d,"delta":{"content":' % i for i in range(len(job.answers))]
            if plain
            else None
        )

    def document(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self._job.answers):
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": self._logprobs(answer.request.logprobs),
                    "finish_reason": finish_reason(answer.finish_reason),
                    "stop_reason": stop_reason(answer, self._body.stop_token_ids),
                }
            )
        return {**self._head, "choices": choices, "usage": usage(self._job)}

    # -- chunk by chunk --------------------------------------------------------------------------------------------

    def first(self) -> bytes:
        """Who speaks, before the first word."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, role) for choice in range(len(self._job.answers)))

    def encode(self, pieces: list[Piece]) -> bytes:
        if self._plain_heads is not None and len(pieces) == 1 and pieces[0].finish_reason is None:
            piece = pieces[0]
            if piece.text:
                return self._plain_heads[piece.choice] + to_json(piece.text) + PLAIN_TAIL
            return b""
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        return b"".join(self._pieces(choice, its) for choice, its in by_choice.items())

    def last(self) -> bytes:
        if not self._usage_last:
            return b""
        return event({**self._head, "choices": [], "usage": usage(self._job)})

    def _pieces(self, choice: int, pieces: list[Piece]) -> bytes:
        text = "".join(piece.text for piece in pieces)
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        reason = finish_reason(pieces[-1].finish_reason)
        if not text and not scored and reason is None:
            return b""
        return self._chunk(choice, {"content": text} if text or scored else {}, scored, reason)

    def _chunk(
        self, choice: int, delta: dict[str, Any], scored: Sequence[TokenLogprobs] = (), reason: str | None = None
    ) -> bytes:
        logprobs = self._logprobs(scored) if scored else None
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        document: dict[str, Any] = {**self._head, "choices": [entry]}
        if self._usage_always:
            document["usage"] = usage(self._job)
        elif self._usage_last:
            document["usage"] = None
        return event(document)

    def _logprobs(self, scored: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            {
                **self._named(entry.token, entry.logprob),
                "top_logprobs": [self._named(token, logprob) for token, logprob in entry.top],
            }
            for entry in scored
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token, skip_special_tokens=False)
        return {"token": token_text(self._tokenizer, token), "logprob": finite(logprob), "bytes": list(data)}
