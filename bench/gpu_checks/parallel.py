"""Two ranks on GPUs against one: the same tokens. Over NCCL where there are two cards, else both on one, over gloo.

NCCL refuses two ranks on one card, so that there its calls are checked in a group of one, in graphs and outside.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from bench.gpu_checks.engine import NEW_TOKENS, Checks, Setting, greedy, run
from tests.parallel.checkpoints import twin_config, write_checkpoint
from tests.parallel.ranks import RANKS, Model, start_on
from tests.running.small_models import CONFIGS, WINDOW
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampler
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.lowering.group import ALONE
from windowpane.models import from_config
from windowpane.models.tensors import RankPlace
from windowpane.models.weights import weight_bytes
from windowpane.parallel.launch import Workers
from windowpane.parallel.process_group import ProcessGroup, host_store
from windowpane.schedule.scheduler import Scheduler

LENGTHS = (1, 5, WINDOW, 3 * WINDOW + 7, 130)


def checks() -> Checks:
    return [
        ("parallel: NCCL's calls", nccl_calls),
        *((f"parallel fp32: {name}", partial(same_tokens, name)) for name in CONFIGS),
        ("parallel fp32: the int4 twin of Gemma 4 31B", same_tokens_of_the_twin),
    ]


def same_tokens(name: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        model = Model.named(name, Path(directory))
        expected = run(name, Setting(graphs=False), lengths=LENGTHS)
        return _compare(model, expected)


def same_tokens_of_the_twin() -> str:
    spec = from_config(twin_config(), "twin")
    with tempfile.TemporaryDirectory() as directory:
        model = Model(spec, write_checkpoint(spec, Path(directory) / "twin"))
        return _compare(model, greedy(_engine(model, None), LENGTHS, NEW_TOKENS))


def nccl_calls() -> str:
    """In a group of one, every call gives back what it was given, also when a graph is replayed."""
    store, _ = host_store()
    group = ProcessGroup(RankPlace(0, 1), "nccl", store)
    values = torch.randn(64, 128, device="cuda")
    expected = values.clone()
    everything = [group.all_reduce(values.clone()), group.all_gather(values), group.broadcast(values.clone())]
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(values)
    with torch.cuda.graph(graph):
        out.copy_(group.all_gather(group.all_reduce(values.clone())))
    graph.replay()
    torch.cuda.synchronize()
    for found in (*everything, out):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    group.abort()
    return "sums, parts side by side and tokens, and a graph of them"


def _compare(model: Model, expected: list[list[int]]) -> str:
    workers = _workers()
    for overlapped in (False, True):
        got = greedy(_engine(model, workers, overlapped=overlapped), LENGTHS, NEW_TOKENS)
        if got != expected:
            raise AssertionError(f"overlapped {overlapped}: two ranks say {got}, one says {expected}")
    how = "NCCL, two cards" if workers.group.in_graphs else "gloo, one card"
    return f"{sum(map(len, expected))} tokens × 2 ways over {how}"


@cache
def _workers() -> Workers:
    cards = torch.cuda.device_count()
    return Workers([torch.device("cuda", rank if cards >= RANKS else 0) for rank in range(RANKS)])


def _engine(model: Model, workers: Workers | None, *, overlapped: bool = False) -> Engine:
    """On two ranks, or on one where there are no workers."""
    spec, device = model.spec, torch.device("cuda", 0)
    slots, length = len(LENGTHS), max(LENGTHS) + NEW_TOKENS
    ranks = 1 if workers is None else RANKS
    caches = [cache.shard(ranks) for cache in spec.caches]
    layout = plan_layout(caches, resolve_formats("float32", group_caches(caches), "float32"), "float32")
    slabs = (slots + 1) * Capacity(layout, 0).slabs_for(1, length)
    job = model.job(layout, slabs, slots, length, use_graphs=workers is not None and workers.group.in_graphs)
    if workers is None:
        runner = job.make_runner(job.load(device, RankPlace(0, 1)), device, ALONE)
    else:
        runner, reports = start_on(workers, job)
        planned = (weight_bytes(spec, RANKS), slabs * layout.slab_bytes)
        assert [(r.weights_bytes, r.arena_bytes) for r in reports] == [planned] * RANKS
    scheduler = Scheduler(KVManager(layout, slabs, slots, length), 64, growth_tokens=32)
    return Engine(scheduler, runner, Sampler(spec.vocab_size, device), async_scheduling=overlapped)
