"""Small models on two ranks, through the real scheduler, and beside one rank."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.running.harness import Knobs, Run, generate_by, generate_with
from tests.running.small_models import QUANTIZED, save, spec_of
from windowpane.kv.caches import Cache
from windowpane.kv.layout import Layout
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import ONLY_RANK
from windowpane.models.weights import weight_bytes
from windowpane.parallel.job import RankJob, RankReport
from windowpane.parallel.launch import Workers
from windowpane.parallel.messages import Load, Loaded, Ready, Start
from windowpane.parallel.runner import ParallelRunner

RANKS = 2
CPU = torch.device("cpu")


class Model:
    """A small model and where its weights lie: None where they are made up, packed. It may have a drafter."""

    def __init__(self, spec: ModelSpec, source: Path | None, drafter_source: Path | None = None) -> None:
        self.spec, self.source, self.drafter_source = spec, source, drafter_source

    @classmethod
    def named(cls, name: str, directory: Path) -> Model:
        """Of `small_models`, saved as a checkpoint so that each rank reads its own part."""
        if name in QUANTIZED:
            return cls(spec_of(name), None)
        path = directory / name.replace(" ", "-")
        if not path.exists():
            path.mkdir()
            save(name, path)
        return cls(spec_of(name), path)

    def job(
        self, layout: Layout, slabs: int, slots: int, length: int, *, use_graphs: bool = False, draft_tokens: int = 0
    ) -> RankJob:
        return RankJob(
            spec=self.spec,
            source=self.source,
            load_format="auto" if self.source else "dummy",
            seed=7,
            dtype="float32",
            layout=layout,
            num_slabs=slabs,
            num_slots=slots,
            max_model_len=length,
            batched_tokens=slots,
            use_graphs=use_graphs,
            need_bytes=0,
            draft_tokens=draft_tokens,
            drafter_source=self.drafter_source,
        )

    def alone(self, prompts: list[list[int]], new_tokens: int, knobs: Knobs) -> Run:
        weights = self.job(None, 0, 0, 0).load(CPU, ONLY_RANK)  # type: ignore[arg-type]
        return generate_with(self.spec, weights, prompts, new_tokens, knobs)

    def on_ranks(self, workers: Workers, prompts: list[list[int]], new_tokens: int, knobs: Knobs) -> Run:
        """Greedy answers of both ranks, whose bytes are those of the plan."""

        def make_runner(layout: Layout, slabs: int, length: int) -> ParallelRunner:
            job = self.job(layout, slabs, knobs.num_slots, length, draft_tokens=knobs.drafts)
            runner, reports = start_on(workers, job)
            planned = RankReport(weight_bytes(self.spec, RANKS), slabs * layout.slab_bytes, None)
            assert reports == [planned] * RANKS
            return runner

        caches: list[Cache] = [cache.shard(RANKS) for cache in self.spec.caches]
        return generate_by(make_runner, caches, prompts, new_tokens, knobs)  # type: ignore[arg-type]


def start_on(workers: Workers, job: RankJob) -> tuple[ParallelRunner, list[RankReport]]:
    device = workers.devices[0]
    workers.send(Load(job))
    weights = job.load(device, workers.group.place)
    workers.answers(Loaded)
    workers.send(Start())
    own = job.make_runner(weights, device, workers.group)
    job.rehearse(own)
    return ParallelRunner(own, workers), [RankReport.of(own), *(ready.report for ready in workers.answers(Ready))]


def assert_same(run: Run, alone: Run) -> None:
    """Equal logits and tokens. Where the top two logits are too close to call, the outputs may part there."""
    for index, expected in enumerate(alone.outputs):
        same = [a == b for a, b in zip(run.outputs[index], expected, strict=True)]
        parted_at = same.index(False) if False in same else len(same)
        logits, computed = torch.stack(alone.logits[index]), torch.stack(run.logits[index])
        if parted_at < len(same):
            first, second = logits[parted_at].topk(2).values
            assert first - second <= 2e-4, f"token {parted_at} of {index} differs although its margin is clear"
        assert parted_at >= len(same) // 2, "hardly anything is equal"
        assert (computed[:parted_at] - logits[:parted_at]).abs().max() <= 1e-4
