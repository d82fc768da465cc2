"""POST /v1/embeddings: the final hidden states of prompts, pooled."""

from __future__ import annotations

import time
from base64 import b64encode
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from windowpane.schedule.request import SamplingParams
from windowpane.server.auth import caller
from windowpane.server.completions import several_prompts
from windowpane.server.errors import bad_request
from windowpane.server.job import Job, job_id
from windowpane.server.protocol import EmbeddingsBody
from windowpane.server.service import Service
from windowpane.server.usage import usage
from windowpane.text.answer import Answer

# A prompt takes a step, and a step samples: the token that comes of it is not shown.
ONE_STEP = SamplingParams(max_tokens=1, temperature=0.0)


async def embed(service: Service, body: EmbeddingsBody, http: HttpRequest) -> Response:
    arrived = time.monotonic()
    service.check_model(body.model)
    several = several_prompts(body.input, "input")
    with service.admitted(len(several)):
        id = job_id("embd", None, http.headers)
        job = await service.off_loop(_job, service, body, several, id, arrived)
    job.caller, job.traceparent = caller(http.scope), http.headers.get("traceparent")
    await service.finished(job, http.receive)
    return await service.document(lambda: _document(service, body, job), job.headers)


def _job(service: Service, body: EmbeddingsBody, several: Any, id: str, arrived: float) -> Job:
    answers: list[Answer] = []
    for one in several:
        tokens = service.prompt_tokens(one, "input", body.add_special_tokens is not False)
        request = service.request(
            f"{id}-{len(answers)}",
            tokens,
            ONE_STEP,
            "input",
            priority=body.priority or 0,
            pooling=body.pooling or "last",
            adapter=service.adapter_of(body.model),
        )
        answers.append(Answer(request, None))
    return Job(id, answers, False, arrived, body.user)


def _document(service: Service, body: EmbeddingsBody, job: Job) -> dict[str, Any]:
    data = []
    for index, request in enumerate(job.requests):
        vector = request.embedding(body.dimensions)
        if body.dimensions is not None and body.dimensions > len(vector):
            raise bad_request(
                f"dimensions {body.dimensions} exceeds the model's {len(vector)} hidden values", "dimensions"
            )
        in_base64 = body.encoding_format == "base64"
        embedding = b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    counts = usage(job, generates=False)
    return {
        "id": job.id,
        "object": "list",
        "model": service.name_of(job),
        "data": data,
        "usage": {"prompt_tokens": counts["prompt_tokens"], "total_tokens": counts["prompt_tokens"]},
    }
