"""OpenTelemetry traces (`--otlp-traces-endpoint`): one span per request, with vLLM's name and attributes.

A span is made when its request is over, of the moments that the engine's thread noted: nothing is measured for it. It
continues the trace of the client's `traceparent` header. Spans are sent in batches by a thread of the SDK's.
"""

from __future__ import annotations

import time
from typing import Any

from windowpane.schedule.request import Request
from windowpane.server.job import Job, Times

SPAN = "llm_request"


class Traces:
    """Sends spans to an OTLP collector over HTTP."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint needs {error.name}: pip install 'windowpane[otel]', or leave it out"
            ) from None
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint is a URL of OTLP over HTTP, as in http://127.0.0.1:4318/v1/traces, not "
                f"{endpoint}"
            )
        self._model_name = model_name
        self._provider = TracerProvider(resource=Resource.create({"service.name": "windowpane"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("windowpane")
        self._propagator = TraceContextTextMapPropagator()

    def job_ended(self, job: Job) -> None:
        carrier = {} if job.traceparent is None else {"traceparent": job.traceparent}
        context = self._propagator.extract(carrier)
        unix_s = time.time() - time.monotonic()
        for request, times in zip(job.requests, job.times, strict=True):
            ended = times.ended or time.monotonic()
            attributes = {name: value for name, value in self._attributes(job, request, times, ended).items() if value}
            span = self._tracer.start_span(
                SPAN, context, attributes=attributes, start_time=int((unix_s + times.submitted) * 1e9)
            )
            span.end(int((unix_s + ended) * 1e9))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

    def _attributes(self, job: Job, request: Request, times: Times, ended: float) -> dict[str, Any]:
        params, admitted, first = request.params, times.admitted, times.first_token
        last = times.last_token
        return {
            "gen_ai.request.id": request.id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": len(job.answers),
            "gen_ai.usage.prompt_tokens": len(request.prompt),
            "gen_ai.usage.cached_tokens": request.cached_tokens,
            "gen_ai.usage.completion_tokens": len(request.output),
            "gen_ai.response.finish_reasons": (
                "abort" if request.finish_reason is None else request.finish_reason.value,
            ),
            "gen_ai.latency.time_in_queue": (admitted or ended) - times.submitted,
            "gen_ai.latency.time_to_first_token": None if first is None else first - times.submitted,
            "gen_ai.latency.time_in_model_prefill": None if first is None or admitted is None else first - admitted,
            "gen_ai.latency.time_in_model_decode": None if first is None or last is None else last - first,
            "gen_ai.latency.e2e": ended - times.submitted,
        }
