"""Restore points on disk: found again after a restart or `kill -9`, and harmless when files or the disk are not."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import windowpane
from tests.running.adapters import RANK, write_adapter
from tests.tiny_model import make_model
from windowpane import LLM, SamplingParams
from windowpane.engine.adapters import LoRARequest
from windowpane.kv.disk import DiskInUse, DiskStore
from windowpane.models import load
from windowpane.plan.config import ConfigError

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": 2**21,
    "kv_offloading_size": "16MiB",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [f"chat {index}: " + "abcdefghij" * 15 for index in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


class Chats(NamedTuple):
    """Second turns: all tokens of the first ones, and what is answered to them."""

    turns: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def chats(model: Path) -> Chats:
    llm = LLM(model, **FLAGS)
    turns = [c.prompt_token_ids + c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    return Chats(turns, [c.token_ids for c in LLM(model, **FLAGS).generate(turns, GREEDY)])


@contextmanager
def engine(model: Path, path: Path, **flags: Any) -> Iterator[LLM]:
    with LLM(model, **{**FLAGS, "kv_disk_path": str(path), **flags}) as llm:
        yield llm


def cached(llm: LLM, chats: Chats) -> list[int]:
    """How much of each second turn is found. Answers are the same, whatever is."""
    found = llm.generate(chats.turns, GREEDY)
    assert [c.token_ids for c in found] == chats.answers
    llm.engine.manager.check_idle()
    return [c.cached_tokens for c in found]


def test_chats_go_on_after_a_restart(model: Path, tmp_path: Path, chats: Chats) -> None:
    kept = tmp_path / "kept"
    with engine(model, kept) as llm:
        llm.generate(PROMPTS, GREEDY)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept.iterdir()} == {0o600}
    with engine(model, kept) as llm:
        assert cached(llm, chats) == [len(turn) - 1 for turn in chats.turns]
        tier = llm.engine.scheduler.tier
        assert tier is not None and tier.stats.disk_hit_tokens > 0
        tier.check_integrity()


def test_another_model_finds_nothing(
    model: Path, tmp_path: Path, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, tmp_path, seed=1) as llm:
        llm.generate(PROMPTS, GREEDY)
    with caplog.at_level(logging.WARNING), engine(model, tmp_path) as llm:
        assert cached(llm, chats) == [0, 0, 0]
    assert [r.message for r in caplog.records if "of another model, layout or release" in r.message]
    assert len(caplog.records) == 1


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def replace(path: Path) -> None:
    path.write_bytes(b"hello")


@pytest.mark.parametrize("damage", [tear, flip, replace, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_computed_again(
    model: Path, tmp_path: Path, chats: Chats, damage: Callable[[Path], Any]
) -> None:
    with engine(model, tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY)
    for file in tmp_path.glob("*.kv"):
        damage(file)
    with engine(model, tmp_path) as llm:
        assert cached(llm, chats) == [0, 0, 0]


def test_a_file_that_cannot_be_read_is_one_line(
    model: Path, tmp_path: Path, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    """The files vanish beneath a running engine, as with a mount that is lost."""
    with engine(model, tmp_path) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
    with caplog.at_level(logging.WARNING), engine(model, tmp_path) as llm:
        for file in tmp_path.glob("*.kv"):
            file.unlink()
        assert llm.generate(chats.turns[:1], GREEDY)[0].token_ids == chats.answers[0]
    assert len(caplog.records) == 1 and "cannot be read and is computed again" in caplog.records[0].message


@pytest.mark.parametrize("how", ["full", "gone"])
def test_a_disk_that_cannot_be_written_is_one_line(
    model: Path, tmp_path: Path, chats: Chats, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    kept, limits = tmp_path / "kept", resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING), engine(model, kept) as llm:
        try:
            if how == "full":  # no file grows beyond this, so writing fails in its middle
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            else:
                shutil.rmtree(kept)
            assert cached(llm, chats) == [0, 0, 0]
            assert all(cached(llm, chats)), "host and device go on"
            llm.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1 and "cannot be written, nor is anything after it" in caplog.records[0].message
    assert not list(kept.glob("*.tmp"))


def test_no_more_is_kept_than_was_asked_for(model: Path, tmp_path: Path, chats: Chats) -> None:
    with engine(model, tmp_path, kv_disk_size="200KiB") as llm:
        llm.generate(PROMPTS, GREEDY)
        for index in range(6):
            llm.generate([f"another {index} " * 15], GREEDY)
    assert 0 < sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 220 * 1024
    with engine(model, tmp_path) as llm:
        assert cached(llm, chats) == [0, 0, 0], "the oldest are gone"


def test_two_servers_never_share_a_directory(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path), pytest.raises(DiskInUse, match="is used by another server; give each a directory"):
        LLM(model, **FLAGS, kv_disk_path=str(tmp_path))
    with engine(model, tmp_path):
        pass


def test_flags_say_what_they_need(model: Path, tmp_path: Path) -> None:
    without = {**FLAGS, "kv_offloading_size": None}
    with pytest.raises(ConfigError, match="takes pages from host memory; add --kv-offloading-size, as in 8"):
        LLM(model, **without, kv_disk_path=str(tmp_path))
    with pytest.raises(ConfigError, match="--kv-disk-size: unknown unit"):
        LLM(model, **FLAGS, kv_disk_path=str(tmp_path), kv_disk_size="3 miles")


def test_a_mount_that_is_lost_while_chats_are_read_and_written_is_one_line(
    model: Path, tmp_path: Path, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    with engine(model, kept) as llm:
        llm.generate(PROMPTS, GREEDY)
    with caplog.at_level(logging.WARNING), engine(model, kept) as llm:
        shutil.rmtree(kept)
        assert cached(llm, chats) == [0, 0, 0]
        assert all(cached(llm, chats)), "host and device go on"
    assert len(caplog.records) == 1 and "KV on disk" in caplog.records[0].message


def test_an_adapter_finds_what_it_left_under_another_number(model: Path, tmp_path: Path) -> None:
    """Numbers are given as adapters are loaded, so files are keyed by what an adapter holds."""
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    one, other = (LoRARequest(name, i, str(tmp_path / name)) for i, name in ((7, "one"), (8, "other")))
    for seed, adapter in enumerate((one, other)):
        write_adapter(Path(adapter.lora_path), load(model), seed)
    with engine(model, tmp_path / "kept", **flags) as llm:
        first = llm.generate(PROMPTS[0], GREEDY, lora_request=one)[0]
    turn = first.prompt_token_ids + first.token_ids
    with engine(model, tmp_path / "kept", **flags) as llm:
        assert llm.generate(turn, GREEDY, lora_request=other)[0].cached_tokens == 0
        assert llm.generate(turn, GREEDY)[0].cached_tokens == 0
        again = llm.generate(turn, GREEDY, lora_request=one)[0]
    assert again.cached_tokens == len(turn) - 1
    assert again.token_ids == LLM(model, **{**FLAGS, **flags}).generate(turn, GREEDY, lora_request=one)[0].token_ids


CHATTER = """
import sys
from tests.test_disk import FLAGS, GREEDY, PROMPTS
from windowpane import LLM
llm = LLM(sys.argv[1], **FLAGS, kv_disk_path=sys.argv[2])
for turn in range(1000):
    llm.generate([f"{prompt} {turn}" for prompt in PROMPTS], GREEDY)
    print(turn, flush=True)
"""


def test_a_server_that_is_killed_while_it_writes_starts_again(model: Path, tmp_path: Path) -> None:
    root = str(Path(windowpane.__file__).parents[1])
    for turns in (1, 3, 4):
        command = [sys.executable, "-c", CHATTER, str(model), str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root})
        assert process.stdout is not None
        for _ in range(turns):
            process.stdout.readline()
        time.sleep(0.01 * turns)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    left = len(list(tmp_path.glob("*.kv")))
    assert left > 0
    with engine(model, tmp_path) as llm:
        tier = llm.engine.scheduler.tier
        assert tier is not None and tier._disk is not None
        assert len(tier._disk.index.points()) == left, "a file that is there is whole"
        found = llm.generate([f"{prompt} 0" + "x" * 9 for prompt in PROMPTS], GREEDY)
        assert all(c.cached_tokens > 100 for c in found)
        assert tier.stats.disk_hit_tokens > 0


def test_what_is_written_is_what_was_there(tmp_path: Path) -> None:
    """Pages of a point go to other places of the host's memory and are the same bytes there."""
    import numpy as np

    from tests.kv.test_layout import layout_of
    from tests.test_restore import MIXES

    layout = layout_of(MIXES["everything"], block_tokens=16)
    memory = np.random.default_rng(0).integers(256, size=64 * layout.slab_bytes, dtype=np.uint8)
    before = memory.copy()
    units = [group.page_units for group in layout.groups]
    pages = [np.arange(3, dtype=np.int32) * unit for unit in units]
    store = DiskStore(tmp_path, 2**30, "one", layout, [memory])
    tokens = np.arange(40, dtype=np.int32)
    assert store.write(1, "0:", tokens, pages)
    assert not store.write(2, "0:", tokens, pages), "it is there already"
    store.close()
    store = DiskStore(tmp_path, 2**30, "one", layout, [memory])
    (point,) = store.index.points()
    assert store.index.content(point)[0] == "0:" and store.index.content(point)[1].tolist() == tokens.tolist()
    targets = [np.array([40, 50], dtype=np.int32) * unit for unit in units]
    store.read(3, point, [(np.array([2, 0]), target) for target in targets])
    store.close()
    assert store.done() == [(3, True)]
    for group, target in zip(layout.groups, targets, strict=True):
        for index, offset in zip((2, 0), target.tolist(), strict=True):
            page = memory[offset * 256 : offset * 256 + group.page_bytes]
            assert (page == before[index * group.page_bytes : (index + 1) * group.page_bytes]).all()
