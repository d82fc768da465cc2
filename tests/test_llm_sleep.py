"""`LLM.sleep` and `wake_up`: memory goes and comes back, with adapters and a host tier, and answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.running.adapters import RANK, write_adapter
from tests.tiny_model import make_model
from windowpane import LLM, LoRARequest, SamplingParams
from windowpane.models import from_config

ARENA_BYTES, HOST_BYTES = 4 * 2**20, 2**26
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": ARENA_BYTES,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kv_offloading_size": "64MiB",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "a prompt that is long enough to be kept and found again " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def test_answers_are_the_same_afterwards(model: Path, tmp_path: Path) -> None:
    spec = from_config(json.loads((model / "config.json").read_text()), "tiny")
    write_adapter(tmp_path / "poet", spec, 1, lora_alpha=40)
    poet = LoRARequest("poet", 1, str(tmp_path / "poet"))
    with LLM(model, **FLAGS, enable_lora=True, max_lora_rank=RANK) as llm:
        before = llm.generate([PROMPT] * 2, GREEDY, lora_request=[None, poet])
        assert before[0].text != before[1].text
        (tmp_path / "poet" / "adapter_model.safetensors").unlink()  # adapters are read once
        for level in (1, 2):
            assert llm.generate(PROMPT, GREEDY)[0].cached_tokens > 0
            assert llm.sleep(level) >= 0.99 * (ARENA_BYTES + HOST_BYTES)
            assert llm.sleep(level) == 0, "it sleeps already"
            with pytest.raises(ValueError, match=r"the model sleeps; wake_up\(\)"):
                llm.generate(PROMPT, GREEDY)
            llm.wake_up()
            after = llm.generate([PROMPT] * 2, GREEDY, lora_request=[None, poet])
            assert after == before and after[0].cached_tokens == 0
        assert llm.engine.scheduler.tier is not None
        llm.engine.scheduler.tier.check_integrity()
        llm.engine.manager.check_idle()


def test_what_cannot_be_done_is_told(model: Path, tmp_path: Path) -> None:
    with LLM(model, **FLAGS, kv_disk_path=str(tmp_path)) as llm:
        with pytest.raises(ValueError, match="level is 1"):
            llm.sleep(3)
        with pytest.raises(ValueError, match="--kv-disk-path sleeps on a CPU and at level 1 only"):
            llm.sleep(2)
        stream = llm.stream(PROMPT, GREEDY)
        with pytest.raises(ValueError, match="1 answers are not complete"):
            llm.sleep()
        stream.close()
        assert llm.sleep() > 0
        llm.wake_up()
        assert llm.generate(PROMPT, GREEDY)[0].token_ids
