"""The Grafana dashboard asks for metrics that exist, and traces reach an OTLP collector."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.harness import FLAGS, running
from windowpane.server.traces import Traces

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


def test_the_dashboard_asks_for_metrics_and_labels_that_the_server_exports(model: Path) -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"windowpane:(\w+)", query)}
    with running(model, flags={**FLAGS, "speculative_config": DRAFTS}, api_keys=("k",)) as server:
        assert server.http.get("/stats").status_code == 401  # somebody has to be refused
        text = server.http.get("/metrics", headers={"Authorization": "Bearer k"}).text
    exported = set(re.findall(r"^windowpane:(\w+)\{", text, re.MULTILINE))
    assert len(asked) > 20 and asked - exported == set()
    groupings = [found for query in queries for found in re.findall(r"by \(([\w, ]+)\)", query)]
    assert {label for labels in groupings for label in labels.split(", ")} <= set(re.findall(r'(\w+)="', text))


class Collector(HTTPServer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collecting)
        self.spans: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Collecting(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_each_request_is_a_span_in_its_clients_trace(model: Path, collector: Collector) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with running(model, otlp_traces_endpoint=collector.url) as server:
        body = {"prompt": "one", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "n": 2}
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    spans = {_attributes(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert set(spans) == {"cmpl-mine-0", "cmpl-mine-1"}, "sent before the server has ended"
    for span in spans.values():
        assert (span.name, span.trace_id.hex()) == ("llm_request", trace)
        found = _attributes(span)
        assert (found["gen_ai.usage.completion_tokens"], found["gen_ai.request.temperature"]) == (5, 0.5)
        assert (found["gen_ai.response.model"], found["gen_ai.request.n"]) == ("tiny", 2)
        e2e_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert found["gen_ai.latency.e2e"] == pytest.approx(e2e_s, abs=1e-3)
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match="URL of OTLP over HTTP"):
        Traces("localhost:4317", "tiny")


def _attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
