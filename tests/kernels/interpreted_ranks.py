"""The decoder that GPUs run, on two ranks in Triton's interpreter, against the plain one on one. Run by its test.

Both processes run the same scheduler over the same requests and see the same logits, so that no orders are needed.

    python -m tests.kernels.interpreted_ranks NAME          # rank 0, which starts rank 1
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from bench.gpu_checks.engine import Setting, greedy, run
from tests.kernels.interpreted_decoder import TINY
from tests.running.small_models import CONFIGS, QUANTIZED, spec_of, weights_of
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampler
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.lowering.linear import Weights
from windowpane.models.tensors import RankPlace
from windowpane.models.weights import text_tensors
from windowpane.parallel.process_group import HERE, ProcessGroup, host_store, join_store
from windowpane.runners.cuda import CudaRunner
from windowpane.schedule.scheduler import Scheduler
from windowpane.weights import load_weights

CPU = torch.device("cpu")
LENGTHS, NEW_TOKENS, CHUNK_TOKENS = (2, 11), 3, 10  # a chunk, a mixed step and decoding ones
# So that a rank's half of a head or MLP is a whole group of quantized inputs.
WIDER = {"intermediate_size": 64, "head_dim": 32}


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1]
    (QUANTIZED if name in QUANTIZED else CONFIGS)[name] = {**TINY[name], **WIDER}
    if len(sys.argv) > 2:
        answers(name, RankPlace(1, 2), join_store(HERE, int(sys.argv[2])))
        return
    store, port = host_store()
    other = subprocess.Popen([sys.executable, "-m", "tests.kernels.interpreted_ranks", name, str(port)])
    found = answers(name, RankPlace(0, 2), store)
    expected = run(name, Setting(False, False, False, CHUNK_TOKENS), "cpu", LENGTHS, NEW_TOKENS)
    if other.wait() or found != expected:
        sys.exit(f"{name}: one rank in plain torch has {expected}, two ranks of kernels have {found}")


def answers(name: str, place: RankPlace, store: Any) -> list[list[int]]:
    """As `bench.gpu_checks.engine.run`, by one of two ranks."""
    spec, slots, length = spec_of(name), len(LENGTHS), max(LENGTHS) + NEW_TOKENS
    caches = [cache.shard(place.ranks) for cache in spec.caches]
    layout = plan_layout(caches, resolve_formats("float32", group_caches(caches), "float32"), "float32")
    slabs = (slots + 1) * Capacity(layout, 0).slabs_for(1, length)
    group = ProcessGroup(place, "gloo", store)
    sizes = (spec, part_of(name, place), layout, slabs, slots, length)
    runner = CudaRunner(*sizes, device=CPU, dtype=torch.float32, use_graphs=False, group=group)
    runner.arena.fill_(0xFF)  # whatever is read before it is written is NaN
    scheduler = Scheduler(KVManager(layout, slabs, slots, length), max(CHUNK_TOKENS, slots), growth_tokens=32)
    engine = Engine(scheduler, runner, Sampler(spec.vocab_size, CPU), async_scheduling=False)
    return greedy(engine, LENGTHS, NEW_TOKENS)


def part_of(name: str, place: RankPlace) -> Weights:
    spec = spec_of(name)
    if name in QUANTIZED:
        return load_weights(None, spec, dtype=torch.float32, device=CPU, load_format="dummy", seed=7, place=place)
    whole = weights_of(name)
    for tensor in text_tensors(spec):
        cut, weight = tensor.cut(place), whole[tensor.name]
        if cut is not None:
            assert isinstance(weight, torch.Tensor)
            index = torch.cat([torch.arange(some.start, some.stop) for some in cut.ranges])
            whole[tensor.name] = weight.index_select(cut.axis, index)
    return whole


if __name__ == "__main__":
    main()
