"""Who may come in: other sites' pages, TLS, keys with limits, an admin key, a path behind a proxy."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running, running
from tests.server.test_refusals import error_of
from windowpane.server.auth import Access, OverQuota, Quota
from windowpane.server.run import ServerOptions, Tls

SITE = "https://example.com"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


def preflight(server: Running, origin: str) -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers |= {"Access-Control-Request-Headers": "authorization,content-type"}
    return server.http.options("/v1/chat/completions", headers=headers)


def test_pages_of_named_sites_may_ask(model: Path) -> None:
    with running(model, access=Access(api_keys=("k",), allowed_origins=(SITE,))) as server:
        allowed = preflight(server, SITE)  # without a key: browsers send none
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
        assert preflight(server, "https://other.example").status_code == 400
        refused = server.http.get("/v1/models", headers={"Origin": SITE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, SITE)
        given = server.http.get("/v1/models", headers={"Origin": SITE, "Authorization": "Bearer k"})
        assert (given.status_code, given.headers["access-control-allow-origin"]) == (200, SITE)


def test_unless_told_no_site_may(server: Running) -> None:
    assert preflight(server, SITE).status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/health", headers={"Origin": SITE}).headers


def test_tls(model: Path, certificate: tuple[str, str]) -> None:
    with running(model, tls=Tls(*certificate)) as server:
        assert server.url.startswith("https://")
        assert server.complete(prompt="a", max_tokens=2, stream=True).text.endswith("[DONE]\n\n")


def test_a_proxys_path_is_that_of_the_description(model: Path) -> None:
    with running(model, root_path="/llm") as server:
        assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert server.complete(prompt="a", max_tokens=1).status_code == 200
        assert "error" in server.http.post("/v1/messages", json={}).json()["type"]
        for path in ("/v1/models", "/llm/v1/models"):  # of proxies that cut it off, and of those that do not
            assert server.http.get(path).json()["data"][0]["id"] == "tiny"
        assert server.http.get("/llm/nothing").status_code == server.http.get("/llmv1/models").status_code == 404


class TestQuotas:
    def test_each_key_has_its_own(self, model: Path) -> None:
        access = Access(api_keys=("one", "two"), requests_per_minute=2, concurrent_requests=1)
        with running(model, access=access) as server:

            def status(key: str) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                return server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)

            assert [status("one").status_code for _ in range(3)] == [200, 200, 429]
            late = status("one")
            assert (error_of(late, 429)["code"], int(late.headers["retry-after"]) >= 1) == ("rate_limit_exceeded", True)
            assert status("two").status_code == 200
            assert server.http.get("/v1/models", headers={"Authorization": "Bearer one"}).status_code == 200

    def test_so_many_at_once(self) -> None:
        quota = Quota(None, 2)
        with quota.taken(), quota.taken(), pytest.raises(OverQuota, match="2 requests at once"), quota.taken():
            pass
        with quota.taken():
            pass


class TestAdministration:
    def test_the_cache_is_given_up_for_the_admin_key_alone(self, model: Path) -> None:
        with running(model, access=Access(api_keys=("k",), admin_key="root")) as server:
            user, admin = ({"Authorization": f"Bearer {key}"} for key in ("k", "root"))
            body = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 2, "temperature": 0}

            def cached() -> int:
                answer = server.http.post("/v1/chat/completions", json=body, headers=user).json()
                tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return tokens

            assert (cached(), cached() > 0) == (0, True)
            for headers in ({}, user):
                assert "admin key" in error_of(server.http.post("/reset_prefix_cache", headers=headers), 401)["message"]
            assert server.http.get("/v1/models", headers=admin).status_code == 401
            assert server.http.post("/reset_prefix_cache", headers=admin).json()["dropped_restore_points"] > 0
            assert cached() == 0
            server.wait_until_idle()

    def test_it_is_not_there_unless_enabled(self, server: Running) -> None:
        error_of(server.http.post("/reset_prefix_cache"), 404)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Access(api_keys=("",)), "--api-key is empty"),
        (lambda: Access(api_keys=("a",), admin_key="a"), "key of its own"),
        (lambda: Access(requests_per_minute=5), "add --api-key"),
        (lambda: Access(allowed_origins=("*",), allow_credentials=True), "--allowed-origins"),
        (lambda: Tls("nowhere.pem"), "nowhere.pem cannot be used"),
        (lambda: ServerOptions(root_path="x"), "begins with a slash"),
        (lambda: ServerOptions(uvicorn_log_level="loud"), "--uvicorn-log-level"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
