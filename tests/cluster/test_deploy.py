"""`windowpane deploy`: the file, the policy that scales, and several models behind one address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.server.harness import FLAGS, Running, serving
from tests.tiny_model import make_model
from windowpane.cli.deploy import read_deployment
from windowpane.cli.errors import UserError
from windowpane.cluster.autoscaling import Autoscaling, ByQueueAndMemory, stats_of
from windowpane.cluster.front import make_front
from windowpane.cluster.ingress import Served
from windowpane.engine.start import start
from windowpane.server.auth import Access
from windowpane.server.run import ServerOptions, make_service


class TestTheFile:
    def read(self, place: Path, document: Any) -> tuple[list[Served], str | None]:
        file = place / "config.yaml"
        file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return read_deployment(str(file))

    def test_flags_are_those_of_serve(self, tmp_path: Path) -> None:
        models, address = self.read(
            tmp_path,
            {
                "ray_address": "auto",
                "port": 9000,
                "api_key": ["sesame"],
                "models": [
                    {"model": "gemma-3-1b", "served_model_name": "small", "max_model_len": "8k", "replicas": 2},
                    {"model": "gemma-4-31b", "autoscaling": {"min_replicas": 1, "max_replicas": 4}},
                ],
            },
        )
        assert address == "auto"
        assert [each.deployment for each in models] == ["small", "gemma-4-31b"]
        assert [each.replicas for each in models] == [2, Autoscaling(1, 4)]
        assert models[0].flags["max_model_len"] == 8000
        assert all(each.options.port == 9000 and each.options.access.api_keys == ("sesame",) for each in models)

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ("models: [", "cannot be read"),
            ("- 1", "maps `models:` to a list"),
            ({"port": 1}, "`models:` is missing"),
            ({"models": [{"replicas": 2}]}, "model 1 of `models:` has no `model:`"),
            ({"models": [{"model": "gemma-3-1b"}], "max_model_len": 1}, "'max-model-len' is no flag of the server"),
            ({"models": [{"model": "gemma-3-1b", "port": 1}]}, "port holds for all models"),
            ({"models": [{"model": "gemma-3-1b", "ray_address": "auto"}]}, "ray-address stands at the top"),
            ({"models": [{"model": "gemma-3-1b", "max_modle_len": 1}]}, "gemma-3-1b: No such option: --max-modle-len"),
            ({"models": [{"model": "gemma-3-1b", "replicas": 0}]}, "replicas is a whole number from 1 on, not 0"),
            (
                {"models": [{"model": "gemma-3-1b", "replicas": 1, "autoscaling": {}}]},
                "give replicas .* or autoscaling .*, not both",
            ),
            ({"models": [{"model": "gemma-3-1b", "autoscaling": {"min_replicas": 1}}]}, "has min_replicas, max_rep"),
            (
                {"models": [{"model": "gemma-3-1b", "autoscaling": {"min_replicas": 3, "max_replicas": 2}}]},
                "min_replicas 3 and max_replicas 2",
            ),
            (
                {"models": [{"model": "gemma-3-1b", "autoscaling": {"min_replicas": "a", "max_replicas": 2}}]},
                "min_replicas is a whole number, not 'a'",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, tmp_path: Path, document: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            self.read(tmp_path, document)


class TestThePolicy:
    def asked(self, *replicas: dict[str, float], starting: int = 0) -> int:
        said = {name: dict(enumerate(each[name] for each in replicas)) for name in ("load", "queue")}
        now = len(replicas) + starting
        context = SimpleNamespace(aggregated_metrics=said, current_num_replicas=now, target_num_replicas=now)
        return ByQueueAndMemory(target_load=0.8)(context)[0]

    def test_memory_counts_where_few_requests_hold_it(self) -> None:
        assert self.asked(stats_of(running=1, waiting=0, most_running=64, kv_share=0.9)) == 2
        assert self.asked(stats_of(running=1, waiting=0, most_running=64, kv_share=0.1)) == 1

    def test_a_queue_counts_before_it_takes_memory(self) -> None:
        full = stats_of(running=8, waiting=8, most_running=8, kv_share=0.5)
        assert self.asked(full) == 3
        assert self.asked(stats_of(running=8, waiting=800, most_running=8, kv_share=0.5)) == 7, "not all at once"

    def test_idle_replicas_are_too_many(self) -> None:
        idle = stats_of(running=0, waiting=0, most_running=8, kv_share=0.0)
        assert self.asked(idle, idle, idle) == 1

    def test_who_has_said_nothing_changes_nothing(self) -> None:
        context = SimpleNamespace(aggregated_metrics={}, current_num_replicas=2, target_num_replicas=2)
        assert ByQueueAndMemory(0.8)(context)[0] == 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny")
    options = ServerOptions(access=Access(api_keys=("sesame",)))
    services = [
        make_service(start(model, FLAGS), replace(options, served_model_names=(name,))) for name in ("one", "two/b")
    ]
    with serving(services[0], options, make_front(services, options.access)) as server:
        server.http.headers["Authorization"] = "Bearer sesame"
        server.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0)
        yield server


class TestOneAddress:
    """Two servers in this process stand for two models; what is before them knows no difference."""

    def test_a_request_goes_to_the_model_that_it_names(self, models: Running) -> None:
        assert [each.id for each in models.openai.models.list()] == ["one", "two/b"]
        for name in ("one", "two/b"):
            answer = models.openai.completions.create(model=name, prompt="x" * 20, max_tokens=2)
            assert answer.model == name
        assert models.complete(prompt="hi", max_tokens=1).json()["model"] == "one"
        with pytest.raises(openai.NotFoundError, match="'three' is not served here; there is one, two/b"):
            models.openai.completions.create(model="three", prompt="hi")
        assert models.http.post("/v1/completions", content=b"{").status_code == 400

    def test_each_has_its_own_page_and_figures(self, models: Running) -> None:
        assert models.http.get("/models/two/b/stats").json()["model"]["name"] == "two/b"
        assert models.http.get("/stats").json()["model"]["name"] == "one"
        assert models.http.get("/models/one").headers["Location"] == "/models/one/"
        assert httpx.get(f"{models.url}/models/one/").status_code == 200, "the page asks for the key itself"
        assert httpx.get(f"{models.url}/models/one/stats").status_code == 401
        shown = models.http.get("/metrics").text
        assert len(re.findall(r"^# HELP windowpane:prompt_tokens_total ", shown, re.MULTILINE)) == 1
        assert set(re.findall(r'^windowpane:prompt_tokens_total\{model_name="(.*)"\}', shown, re.MULTILINE)) == {
            "one", "two/b",
        }  # fmt: skip
