"""Names from the Hub, with the real client against a small Hub on localhost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.models.hub_server import SmallHub, small_hub
from tests.models.test_gguf import LLAMA, write_gguf
from windowpane.models import load, shipped_repositories
from windowpane.models.gguf import read_header
from windowpane.models.hub import INDEX, Hub, HubError, HubName, cached_models, parse_name

SHIPPED = Path(__file__).parents[2] / "windowpane" / "models" / "shipped"
CONFIG = (SHIPPED / "qwen3-0.6b.json").read_bytes()
NAME = HubName("acme/tiny-0.6b")


@pytest.fixture
def server() -> Iterator[SmallHub]:
    with small_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "headers"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return Hub(cache_dir=str(tmp_path / "cache"), endpoint=server.url)


def sharded() -> dict[str, bytes]:
    """A repository as people publish them: what is needed, and more that is not."""
    weight_map = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    return {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        "model-00001-of-00002.safetensors": b"1" * 5000,
        "model-00002-of-00002.safetensors": b"2" * 7000,
        "pytorch_model.bin": b"pickle" * 1000,
        "modeling_tiny.py": b"raise SystemExit",
        "README.md": b"# Tiny",
        "original/consolidated.safetensors": b"3" * 9000,
    }


def gguf_bytes(tmp_path: Path, tensor_bytes: int = 4 * 2**20) -> bytes:
    """The embedded llama's header sizes are too large for a test: a header of a few tokens, and tensors behind it."""
    import gguf
    import numpy as np

    path = tmp_path / "made.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 2048,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list([f"token {i}" for i in range(150_000)])  # more than a first megabyte of header
    writer.add_tensor("token_embd.weight", np.zeros((150_000, 64), dtype=np.float16)[: tensor_bytes // 128])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


class TestNames:
    def test_names_of_the_hub_are_told_from_paths(self) -> None:
        assert parse_name("google/gemma-3-4b-it") == HubName("google/gemma-3-4b-it")
        assert parse_name("acme/m-GGUF:Q4_K_M") == HubName("acme/m-GGUF", "Q4_K_M")
        for text in ("gemma-3-4b", "./acme/m", "/models/m", "a/b/c", "~/m", "acme/", "acme/m:"):
            assert parse_name(text) is None

    @pytest.mark.parametrize("name", ["google/gemma-3-4b-it", "Google/Gemma-3-4B-IT", "Gemma-3-4B"])
    def test_shipped_models_need_no_network_in_any_case(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Hub, "shape", lambda *_: pytest.fail("the Hub was asked"))
        assert shipped_repositories()["gemma-3-4b"] == "google/gemma-3-4b-it"
        assert load(name).name == "gemma-3-4b"

    def test_models_can_be_imported_without_the_client(self) -> None:
        script = (
            "import sys; import windowpane.models, windowpane.plan.planner; assert 'huggingface_hub' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


class TestFetching:
    def test_a_plan_takes_the_config_and_no_weights(self, server: SmallHub, hub: Hub) -> None:
        quantization = b'{"quantization": {"quant_algo": "FP8"}}'
        server.add(NAME.repository, sharded() | {"hf_quant_config.json": quantization})
        directory = hub.shape(NAME)
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "hf_quant_config.json"]
        assert (load(directory).num_layers, load(directory).weight_scheme) == (28, "fp8")
        assert server.sent_bytes == len(CONFIG) + len(quantization)

    def test_a_run_takes_what_the_index_names_and_nothing_else(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        directory = hub.model(NAME)
        assert sorted(p.name for p in directory.iterdir()) == [
            "chat_template.jinja",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert (directory / "model-00002-of-00002.safetensors").read_bytes() == b"2" * 7000

    def test_what_is_there_is_not_fetched_again(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        hub.model(NAME)
        sent = server.sent_bytes
        assert hub.model(NAME).is_dir()
        assert server.sent_bytes == sent

    def test_a_new_commit_is_fetched_and_only_what_changed(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        first = hub.model(NAME)
        server.add(NAME.repository, sharded() | {"tokenizer.json": b'{"new": 1}'})
        sent = server.sent_bytes
        second = hub.model(NAME)
        assert first != second and (second / "tokenizer.json").read_bytes() == b'{"new": 1}'
        assert server.sent_bytes - sent < 1000, "weights with the same ETag are kept"

    def test_a_connection_that_is_cut_is_resumed_where_it_ended(self, server: SmallHub, hub: Hub) -> None:
        weights = bytes(range(256)) * (12 * 2**20 // 256)
        server.add(NAME.repository, {"config.json": CONFIG, "model.safetensors": weights})
        server.cuts["model.safetensors"] = 11 * 2**20
        assert (hub.model(NAME) / "model.safetensors").read_bytes() == weights
        assert server.ranges == [f"bytes={10 * 2**20}-"], "the client writes pieces of 10 MiB"

    def test_without_a_network_the_cache_answers(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        online = hub.model(NAME)
        away = Hub(cache_dir=hub.cache_dir, endpoint="http://127.0.0.1:9")
        assert away.model(NAME) == away.shape(NAME) == online

    def test_a_cache_without_weights_is_no_model_to_run(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        hub.shape(NAME)
        away = Hub(cache_dir=hub.cache_dir, endpoint="http://127.0.0.1:9")
        with pytest.raises(HubError, match="without its weights"):
            away.model(NAME)

    def test_the_cache_lists_its_models(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        hub.model(NAME)
        (found,) = cached_models(hub.cache_dir)
        assert found.repository == NAME.repository and found.size_bytes > 12_000
        assert cached_models("/nowhere") == []


class TestGguf:
    def test_a_header_is_read_by_ranges(self, server: SmallHub, hub: Hub, tmp_path: Path) -> None:
        data = gguf_bytes(tmp_path)
        server.add("acme/m-GGUF", {"m-Q4_K_M.gguf": data, "m-Q8_0.gguf": data, "mmproj-m-f16.gguf": b"x" * 2000})
        path = hub.shape(HubName("acme/m-GGUF", "q4_k_m"))
        assert path.stat().st_size == len(data) and server.sent_bytes < 1.5 * len(data)
        assert read_header(path).integer("llama.block_count") == 2
        assert load(path).num_layers == 2
        assert [wanted.split("=")[1] for wanted in server.ranges][:2] == ["0-1048575", "0-4194303"]

    def test_headers_of_all_shards_are_read_by_ranges(self, server: SmallHub, hub: Hub, tmp_path: Path) -> None:
        tensors = {f"blk.0.ffn_{part}.weight": np.ones((3, 64), np.float16) for part in ("gate", "up", "down")}
        write_gguf(tmp_path / "m-Q4_K_M.gguf", "llama", LLAMA, tensors, split_max_tensors=2)
        files = {file.name: file.read_bytes() for file in tmp_path.glob("*.gguf")}
        server.add("acme/m-GGUF", files)
        path = hub.shape(HubName("acme/m-GGUF", "Q4_K_M"))
        assert path.name == "m-Q4_K_M-00001-of-00002.gguf"
        assert len(read_header(path).tensors) == 4
        assert load(path).weight_scheme == "GGUF (F16)"

    def test_all_shards_of_a_variant_are_fetched(self, server: SmallHub, hub: Hub) -> None:
        shards = {f"big/m-Q4_K_M-0000{n}-of-00002.gguf": b"GGUF" * 500 for n in (1, 2)}
        server.add("acme/m-GGUF", {**shards, "m-Q8_0.gguf": b"GGUF"})
        path = hub.model(HubName("acme/m-GGUF", "Q4_K_M"))
        assert path.name == "m-Q4_K_M-00001-of-00002.gguf"
        assert sorted(p.name for p in path.parent.iterdir()) == [Path(name).name for name in shards]

    def test_a_variant_must_be_named_and_exist(self, server: SmallHub, hub: Hub) -> None:
        server.add("acme/m-GGUF", {"m-Q4_K_M.gguf": b"GGUF", "m.UD-IQ2_M.gguf": b"GGUF"})
        for name in (HubName("acme/m-GGUF"), HubName("acme/m-GGUF", "Q5_0")):
            with pytest.raises(HubError, match=r"acme/m-GGUF:Q4_K_M. There are Q4_K_M, UD-IQ2_M"):
                hub.model(name)


class TestErrors:
    def refused(self, hub: Hub, name: HubName = NAME) -> str:
        with pytest.raises(HubError) as error:
            hub.model(name)
        message = str(error.value)
        assert "\n" not in message
        return message

    def test_no_network(self, hub: Hub) -> None:
        message = self.refused(Hub(cache_dir=hub.cache_dir, endpoint="http://127.0.0.1:9"))
        assert message.startswith("no network: http://127.0.0.1:9")

    def test_no_such_name_has_the_nearest_shipped_one(self, hub: Hub) -> None:
        message = self.refused(hub, HubName("gogle/gemma-3-4b-itt"))
        assert "there is no model gogle/gemma-3-4b-itt" in message
        assert "gemma-3-4b" in message.split("shipped")[1] and "HF_TOKEN" in message

    def test_gated_models_say_what_to_accept_and_how_to_log_in(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded(), gated=True)
        message = self.refused(hub)
        assert f"accept its terms at {server.url}/acme/tiny-0.6b" in message and "hf auth login" in message
        with_token = Hub(cache_dir=hub.cache_dir, endpoint=server.url, token="hf_good")
        assert with_token.model(NAME).is_dir()

    def test_a_token_that_is_refused(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        message = self.refused(Hub(cache_dir=hub.cache_dir, endpoint=server.url, token="hf_old"))
        assert "refuses the token" in message

    @pytest.mark.parametrize(("status", "said"), [(429, "asks to wait"), (500, "answers 500"), (403, "forbids")])
    def test_what_the_hub_answers(self, server: SmallHub, hub: Hub, status: int, said: str) -> None:
        server.failing = status
        assert said in self.refused(hub)

    def test_no_such_revision(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, sharded())
        message = self.refused(Hub(revision="v9", cache_dir=hub.cache_dir, endpoint=server.url))
        assert "no revision 'v9'" in message

    def test_pickles_are_refused(self, server: SmallHub, hub: Hub) -> None:
        server.add(NAME.repository, {"config.json": CONFIG, "pytorch_model.bin": b"pickle" * 500})
        assert "only as pickles (pytorch_model.bin)" in self.refused(hub)
        assert not any("pytorch_model.bin" in request for request in server.requests)

    def test_a_full_disk_is_told_before_the_download(
        self, server: SmallHub, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.add(NAME.repository, sharded())
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=6000))
        message = self.refused(hub)
        assert "GiB of disk" in message and "--download-dir" in message
        assert not any("safetensors" in r and "index" not in r for r in server.requests)

    def test_an_index_that_names_what_is_not_there(self, server: SmallHub, hub: Hub) -> None:
        files = sharded()
        del files["model-00002-of-00002.safetensors"]
        server.add(NAME.repository, files)
        assert "lacks model-00002-of-00002.safetensors" in self.refused(hub)


class TestConventions:
    def run(self, server: SmallHub, tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = "import sys; from windowpane.cli.main import main; sys.exit(main())"
        own = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FORCE_"))}
        return subprocess.run(
            [sys.executable, "-c", script, *words], env=clean | own | env, capture_output=True, text=True, check=False
        )

    def test_the_command_line_follows_the_usual_variables(self, server: SmallHub, tmp_path: Path) -> None:
        server.add(NAME.repository, sharded(), gated=True)
        refused = self.run(server, tmp_path, "plan", NAME.repository)
        assert (refused.returncode, refused.stdout) == (2, "") and "is gated" in refused.stderr
        done = self.run(server, tmp_path, "plan", NAME.repository, HF_TOKEN="hf_good")
        assert done.returncode == 0 and "acme/tiny-0.6b" in done.stdout
        assert (tmp_path / "home" / "hub" / "models--acme--tiny-0.6b" / "snapshots").is_dir()
        offline = self.run(server, tmp_path, "plan", NAME.repository, HF_HUB_OFFLINE="1")
        assert offline.returncode == 0 and offline.stdout == done.stdout
        listed = self.run(server, tmp_path, "models", "--json", "tiny")
        assert [m["repository"] for m in json.loads(listed.stdout)["cached"]] == [NAME.repository]
