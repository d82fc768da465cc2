"""`LLM.sleep` and `wake_up`: memory goes and comes back, with adapters and a host tier, and answers stay the same."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_checks.sleep import WAYS, Sizes, sleeps
from tests.tiny_model import make_model
from windowpane import LLM, SamplingParams

ARENA_BYTES, HOST_BYTES = 4 * 2**20, 2**26
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": ARENA_BYTES,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}
SIZES = Sizes({}, arena_bytes=64 * 2**20, stays_bytes=8 * 2**20)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "a prompt that is long enough to be kept and found again " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def holes() -> Iterator[None]:
    """Freed memory in the middle of the C library's heap, as a process that has run for long has it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(libc.malloc(31 * 2**20))  # glibc maps what is larger than anything that was freed, up to 32 MiB
    blocks = [libc.malloc(30 * 2**20) for _ in range(64)]
    for k, block in enumerate(blocks):
        if k % 4 != 3:
            libc.free(block)
    yield
    for block in blocks[3::4]:
        libc.free(block)


def test_memory_that_came_from_the_heap_goes_too(holes: None) -> None:
    sleeps(2, WAYS["graphs"], "cpu", SIZES)


@pytest.mark.parametrize(("level", "way"), [(1, "graphs"), (2, "adapters, drafts and a host tier")])
def test_answers_are_the_same_afterwards(level: int, way: str) -> None:
    """What `bench.gpu_check sleep` checks on a GPU."""
    sleeps(level, WAYS[way], "cpu", SIZES)


def test_the_file_of_a_host_tier_is_emptied(model: Path) -> None:
    with LLM(model, **FLAGS, kv_offloading_size="64MiB") as llm:
        runner: Any = llm.engine.runner
        pages = runner.pages.host
        pages.memory.fill_(1)
        assert os.fstat(pages.handle.file).st_blocks * 512 >= HOST_BYTES
        assert llm.sleep() >= 0.99 * (ARENA_BYTES + HOST_BYTES)
        assert os.fstat(pages.handle.file).st_blocks * 512 < 2**20
        with pytest.raises(ValueError, match=r"the model sleeps; wake_up\(\)"):
            llm.generate(PROMPT, GREEDY)
        llm.wake_up()
        assert llm.generate(PROMPT, GREEDY) == llm.generate(PROMPT, GREEDY)


def test_what_cannot_be_done_is_told(model: Path, tmp_path: Path) -> None:
    with LLM(model, **FLAGS, kv_offloading_size="64MiB", kv_disk_path=str(tmp_path)) as llm:
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
