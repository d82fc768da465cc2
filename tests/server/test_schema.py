"""Whatever the OpenAPI schema allows, and whatever it does not: never an answer of the server's own failing."""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.server.harness import Running

EXAMPLES = 25
SEED = 8


def test_no_request_fails_the_server(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    paths = {operation.path for operation in operations}
    assert paths >= {"/v1/responses", "/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate"}
    assert paths >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"}
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.POSITIVE or list(operation.body):  # others have no wrong form
                _try(operation, mode)
    server.wait_until_idle()
    assert server.complete(prompt="a", max_tokens=1).status_code == 200


def _try(operation: object, mode: schemathesis.GenerationMode) -> None:
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))  # type: ignore[attr-defined]
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            _keep_small(case.body, case.operation.path)
        response = case.call(timeout=30)
        case.validate_response(response, checks=[not_a_server_error])

    check()


def _keep_small(body: dict[str, object], path: str) -> None:
    """Long answers are tested elsewhere; here many requests are what finds something."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value > 8:
            body[name] = 8
    if path == "/v1/responses" and not body.get("max_output_tokens"):
        body["max_output_tokens"] = 8
    if path.startswith("/api/"):
        options = body.get("options")
        body["options"] = {**options, "num_predict": 8} if isinstance(options, dict) else {"num_predict": 8}
    elif "messages" in body and not (body.get("max_tokens") or body.get("max_completion_tokens")):
        body["max_tokens"] = 8
    n = body.get("n")
    if isinstance(n, int) and n > 2:
        body["n"] = 2


BODIES: list[dict[str, Any]] = [
    {"prompt": "Hi", "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}, "stream": True},
    {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 4, "response_format": {"type": "json_object"}},
]


def test_mangled_bodies_are_refused_and_leave_nothing(server: Running) -> None:
    @seed(SEED)
    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        body=st.sampled_from(BODIES).map(lambda body: json.dumps(body).encode()),
        cut=st.one_of(st.none(), st.integers(0, 200)),
        changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    )
    def check(body: bytes, cut: int | None, changes: list[tuple[int, int]]) -> None:
        mangled = bytearray(body[:cut])
        for at, byte in changes:
            if mangled:
                mangled[at % len(mangled)] = byte
        path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
        headers = {"Content-Type": "application/json"}
        answer = server.http.post(path, content=bytes(mangled), headers=headers)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    check()
    server.wait_until_idle()
