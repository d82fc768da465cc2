"""Adapters as models of the server: named, loaded and unloaded by the real client and by vLLM's endpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.running.adapters import RANK, write_adapter
from tests.server.harness import FLAGS, Running, running
from tests.server.test_refusals import error_of
from tests.tiny_model import make_model
from windowpane import LLM, LoRARequest, SamplingParams
from windowpane.models import from_config
from windowpane.server.adapters import parse_modules
from windowpane.server.auth import Access
from windowpane.server.metrics import Metrics

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it a directory of adapters."""
    path = make_model(tmp_path_factory.mktemp("models") / "tiny")
    spec = from_config(json.loads((path / "config.json").read_text()), "tiny")
    for seed, name in enumerate(("poet", "lawyer", "cook"), start=1):
        write_adapter(path.parent / "adapters" / name, spec, seed, lora_alpha=40)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    adapters = model.parent / "adapters"
    options = {"lora_modules": {"poet": str(adapters / "poet")}, "lora_dir": adapters}
    with running(model, flags={**FLAGS, **LORA}, access=Access(admin_key="root"), **options) as up:
        yield up


def said(server: Running, name: str | None, text: str = "Hello there") -> str:
    client = server.openai.completions
    answer = client.create(model=name or "tiny", prompt=text, max_tokens=8, temperature=0)
    assert answer.model == (name or "tiny")
    return answer.choices[0].text


def load(server: Running, name: str, path: str) -> int:
    body = {"lora_name": name, "lora_path": path}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN).status_code


class TestServing:
    def test_models_name_their_parent(self, server: Running) -> None:
        listed = {found.id: found.model_dump() for found in server.openai.models.list()}
        assert listed["poet"]["parent"] == "tiny" and listed["poet"]["root"] == "poet"
        assert listed["tiny"]["parent"] is None
        assert server.openai.models.retrieve("poet").id == "poet"

    def test_answers_are_the_adapters(self, server: Running) -> None:
        text = "One prompt for all of them, long enough to be kept and found again."
        first = [said(server, name, text) for name in (None, "poet")]
        assert first[0] != first[1]
        assert [said(server, name, text) for name in (None, "poet")] == first, "what is kept is found by its own alone"
        message = {"role": "user", "content": "Hi"}
        chat = server.openai.chat.completions.create(model="poet", messages=[message], max_tokens=4)
        assert chat.model == "poet"
        assert server.openai.embeddings.create(model="poet", input="Hi").model == "poet"

    def test_they_come_and_go_while_the_server_runs(self, server: Running) -> None:
        before = said(server, None)
        assert [load(server, name, name) for name in ("lawyer", "cook")] == [200, 200]
        answers = {name: said(server, name) for name in (None, "poet", "lawyer", "cook")}  # three share two slots
        assert len(set(answers.values())) == 4 and answers[None] == before
        for name in ("lawyer", "cook"):
            body = {"lora_name": name}
            assert server.http.post("/v1/unload_lora_adapter", json=body, headers=ADMIN).status_code == 200
        with pytest.raises(openai.NotFoundError, match="there is tiny, poet"):
            said(server, "lawyer")
        assert load(server, "lawyer", "cook") == 200  # the name now stands for another one
        assert said(server, "lawyer") == answers["cook"], "nothing is left of what the name stood for"
        server.http.post("/v1/unload_lora_adapter", json={"lora_name": "lawyer"}, headers=ADMIN)
        server.wait_until_idle()

    def test_who_runs_when_one_goes_is_answered(self, server: Running) -> None:
        assert load(server, "cook", "cook") == 200
        client = server.openai.completions
        stream = client.create(model="cook", prompt="Hi", max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "cook"}, headers=ADMIN).status_code == 200
        *_, last = stream
        assert (last.choices[0].finish_reason, last.model) == ("length", "cook")
        server.wait_until_idle()


class TestRefusals:
    def test_only_the_admin_key_loads(self, server: Running) -> None:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert "admin key" in error_of(server.http.post(path, json={}), 401)["message"]

    @pytest.mark.parametrize("path", ["../tiny", "/etc", "nowhere", "poet/../../tiny"])
    def test_only_the_named_directory_is_read(self, server: Running, path: str) -> None:
        body = {"lora_name": "other", "lora_path": path}
        refused = server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert "below --lora-dir" in error_of(refused, 400)["message"]

    def test_names_are_taken_once(self, server: Running) -> None:
        assert [load(server, name, "cook") for name in ("poet", "tiny")] == [400, 400]
        gone = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"}, headers=ADMIN)
        assert error_of(gone, 404)["code"] == "model_not_found"

    def test_words_after_the_flag(self) -> None:
        assert parse_modules(["a=/x=y", '{"name": "b", "path": "/z"}']) == {"a": "/x=y", "b": "/z"}
        for wrong in (["a"], ["=b"], ['{"name": "b"}'], ["a=b", "a=c"]):
            with pytest.raises(ValueError, match="--lora-modules"):
                parse_modules(wrong)


def test_llm_has_them_by_vllms_names(model: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    poet, cook = (LoRARequest(name, i, str(model.parent / "adapters" / name)) for i, name in ((1, "poet"), (2, "cook")))
    with LLM(model, **{**FLAGS, **LORA}) as llm:
        plain, *both = llm.generate(["Hello"] * 3, greedy, lora_request=[None, poet, cook])
        assert len({one.text for one in (plain, *both)}) == 3
        assert [llm.generate("Hello", greedy, lora_request=one)[0] for one in (poet, cook)] == both
        assert "".join(llm.stream("Hello", greedy, lora_request=cook)) == both[1].text
        with pytest.raises(ValueError, match="lora_int_id 1 is"):
            llm.generate("Hello", greedy, lora_request=LoRARequest("other", 1, "nowhere"))
        with pytest.raises(ValueError, match="holds no adapter_config"):
            llm.generate("Hello", greedy, lora_request=LoRARequest("other", 3, str(tmp_path)))
        predicted, measured = llm.plan.sizing.adapter_bytes, llm.engine.adapters._held.nbytes
        assert predicted == measured > 0
    with LLM(model, **FLAGS) as llm, pytest.raises(ValueError, match="enable_lora=True"):
        llm.generate("Hello", greedy, lora_request=poet)


def test_metrics_name_those_that_run_and_wait(model: Path) -> None:
    def labels(llm: LLM) -> dict[str, str]:
        text = Metrics("tiny").exposition(llm.engine, alive=True).decode()
        found, at_s = re.findall(r"vllm:lora_requests_info\{(.*)\} (\S+)", text)[0]
        assert float(at_s) > 1e9, "seconds since 1970, as vLLM has it"
        return dict(re.findall(r'(\w+)="([^"]*)"', found))

    path = model.parent / "adapters"
    poet, cook = (LoRARequest(name, number, str(path / name)) for number, name in ((1, "poet"), (2, "cook")))
    with LLM(model, **{**FLAGS, **LORA, "max_num_seqs": 1}) as llm:
        first, second = (llm.stream("Hello", lora_request=adapter) for adapter in (poet, cook))
        next(first)
        told = labels(llm)
        assert (told["running_lora_adapters"], told["waiting_lora_adapters"]) == ("1: poet", "2: cook")
        assert told["max_lora"] == "2"
        first.close()
        second.close()
        told = labels(llm)
        assert (told["running_lora_adapters"], told["waiting_lora_adapters"]) == ("", "")
