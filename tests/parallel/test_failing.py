"""A rank that fails takes the engine with it, at once and with its reason, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.parallel.ranks import CPU, Model, start_on
from tests.running.harness import Knobs, layout_of
from tests.running.small_models import spec_of
from tests.server.test_life import SMALL, serving
from tests.tiny_model import make_model
from windowpane import LLM, SamplingParams
from windowpane.kv.changes import NO_CHANGES
from windowpane.parallel.job import RankJob
from windowpane.parallel.launch import RankRefused, RanksLost, Workers
from windowpane.parallel.messages import Load, Loaded, Start
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.text.answer import RequestFailed
from windowpane.weights import LoadedWeights

PATIENCE_S = 10.0
FLAGS = {"device": "cpu", "load_format": "dummy", "kv_cache_memory_bytes": 4 * 2**20, "max_num_seqs": 4}
ENDLESS = SamplingParams(max_tokens=10_000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=16384)


def children(parent: int) -> list[int]:
    """Processes that this one has started and that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, after = entry.read_text().rpartition(")")
        except OSError:
            continue
        state, ppid, *_ = after.split()
        if int(ppid) == parent and state != "Z":
            found.append(int(entry.parent.name))
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "a rank outlived its engine"
        time.sleep(0.05)


def new_pair() -> tuple[Workers, list[int]]:
    """Two ranks of their own, and the processes they have started."""
    before = children(os.getpid())
    workers = Workers([CPU, CPU])
    return workers, [pid for pid in children(os.getpid()) if pid not in before]


def some_job() -> RankJob:
    spec = spec_of("llama int4")
    layout = layout_of([cache.shard(2) for cache in spec.caches], Knobs())
    return Model(spec, None).job(layout, 4, 2, 64)


class TestDying:
    def test_in_the_middle_of_an_answer(self, model: Path) -> None:
        before = children(os.getpid())
        llm = LLM(model, tensor_parallel_size=2, **FLAGS)
        (rank,) = set(children(os.getpid())) - set(before)
        stream = llm.stream([1, 2, 3], ENDLESS)
        next(stream)
        os.kill(rank, signal.SIGKILL)
        with within(PATIENCE_S), pytest.raises(RequestFailed, match="rank 1 was ended by SIGKILL"):
            for _ in stream:
                pass
        with within(1), pytest.raises(RequestFailed, match="rank 1"):  # and it stays so
            llm.generate([1, 2, 3], ENDLESS)
        assert not llm.engine.has_work and not runs(rank)

    def test_while_it_serves_ends_the_server(self, model: Path) -> None:
        """At once, though nobody asks it anything."""
        with serving(str(model), *SMALL, "--tensor-parallel-size", "2") as server:
            assert server.url
            (rank,) = children(server.process.pid)
            os.kill(rank, signal.SIGKILL)
            with within(PATIENCE_S):
                assert server.end() == 1
            assert "rank 1 was ended by SIGKILL" in server.said


class TestRaising:
    def test_what_a_user_can_mend_is_the_ranks_own_message(self) -> None:
        workers, ranks = new_pair()
        workers.send(Load(replace(some_job(), source=Path("/nowhere"), load_format="auto")))
        with within(PATIENCE_S), pytest.raises(RankRefused, match=r"^rank 1: no weights at /nowhere"):
            workers.answers(Loaded)
        assert not any(map(runs, ranks))

    def test_a_bug_in_a_rank_is_told_by_its_name(self, capfd: pytest.CaptureFixture[str]) -> None:
        workers, _ = new_pair()
        told = threading.Event()
        workers.when_lost(lambda _: told.set())
        workers.send(Start())  # nothing was loaded
        with within(PATIENCE_S), pytest.raises(RanksLost, match="rank 1: AssertionError"):
            workers.answers(Loaded)
        assert told.wait(PATIENCE_S)
        assert "Traceback" in capfd.readouterr().err

    def test_one_in_rank_0_ends_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        workers, ranks = new_pair()
        runner, _ = start_on(workers, some_job())

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("out of luck")

        nobody = np.zeros(0, dtype=np.int64)
        chunk = PromptChunk(0, 0, np.zeros(4, dtype=np.int32), samples=True)
        batch = Batch(0, nobody, nobody, [chunk], np.zeros(1, dtype=np.int8), NO_CHANGES)
        monkeypatch.setattr(runner._own, "forward", broken)  # the other rank waits for it in a sum
        with within(PATIENCE_S), pytest.raises(RanksLost, match="rank 0 failed: RuntimeError: out of luck"):
            runner.forward(batch)
        assert not any(map(runs, ranks))


class TestStarting:
    def test_a_missing_tensor_is_told_once_and_leaves_nobody(
        self, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
        ranks = children(os.getpid())
        with pytest.raises(ValueError, match=r"missing: model\.embed_tokens.weight"):
            LLM(tmp_path, tensor_parallel_size=2, **(FLAGS | {"load_format": "auto"}))
        assert children(os.getpid()) == ranks
        assert "Traceback" not in capfd.readouterr().err

    def test_a_rank_that_dies_while_it_loads(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = children(os.getpid())

        def deadly(self: RankJob, *_: object) -> LoadedWeights:
            (rank,) = set(children(os.getpid())) - set(before)
            os.kill(rank, signal.SIGKILL)
            return load(self, *_)  # type: ignore[arg-type]

        load = RankJob.load
        monkeypatch.setattr(RankJob, "load", deadly)
        with within(PATIENCE_S), pytest.raises(RankRefused, match="rank 1 was ended by SIGKILL"):
            LLM(model, tensor_parallel_size=2, **FLAGS)

    def test_heads_that_do_not_divide_are_refused_by_the_plan(self, model: Path) -> None:
        with pytest.raises(ValueError, match="--tensor-parallel-size works with 1, 2"):
            LLM(model, tensor_parallel_size=3, **FLAGS)


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ranks_end_with_their_engine_however_that_ends(model: Path) -> None:
    """Killed or interrupted in the middle of an answer. An interrupt ends the answer, and then there is no more to do.

    A plain SIGTERM is like SIGKILL: Python ends without a word.
    """
    command = [sys.executable, "-c", "import sys; from windowpane.cli.main import main; sys.exit(main())", "generate"]
    command += [str(model), *SMALL, "--tensor-parallel-size", "2", "-p", "a", "--max-tokens", "10000", "--ignore-eos"]
    signals = (signal.SIGKILL, signal.SIGINT)
    processes = [
        # A shell's job in the background ignores interrupts, and so would all that it starts.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts)
        for _ in signals
    ]
    try:
        for number, process in zip(signals, processes, strict=True):
            assert process.stdout is not None and process.stdout.read(1), "it never began"
            ranks = children(process.pid)
            assert len(ranks) == 1
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == (0 if number == signal.SIGINT else -number)
            wait_until_gone(ranks)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
