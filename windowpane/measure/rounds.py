"""Running a workload with a stopwatch, and counting the bytes that each step cannot avoid to read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowpane.engine.engine import Engine, Output, StepRunner
from windowpane.kv.layout import Layout
from windowpane.kv.retention import Cross, Routes, State
from windowpane.models.blocks import Experts, each
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import loaded_bytes, text_tensors
from windowpane.schedule.batch import Batch
from windowpane.schedule.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from windowpane.engine.start import Started

ROOF_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}  # well beyond any cache
ROOF_RUNS = 5


@dataclass(slots=True)
class Timing:
    """One round: when it began and ended, and for each request when its tokens came. Seconds."""

    seconds: float = 0.0
    read_bytes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.read_bytes / self.seconds


def run_round(engine: Engine, requests: list[Request], on_token: Callable[[int], None] | None = None) -> Timing:
    """Answer these requests, all handed in at once. Raises what a failed step raised."""
    counter = engine.runner if isinstance(engine.runner, CountingRunner) else None
    bytes_before = counter.read_bytes if counter else 0
    timing = Timing(input_tokens=sum(len(r.prompt) for r in requests))
    began = time.perf_counter()
    last: dict[Request, float] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.finish_reason is FinishReason.FAILED:
                raise RuntimeError(f"a step failed: {output.request.error}") from output.request.error
            if output.request in last:
                timing.between_tokens.append(now - last[output.request])
            else:
                timing.first_token.append(now - began)
            last[output.request] = now
        timing.output_tokens += len(outputs)
        if on_token is not None:
            on_token(len(outputs))
    timing.seconds = time.perf_counter() - began
    timing.read_bytes = (counter.read_bytes if counter else 0) - bytes_before
    return timing


def warm_up(engine: Engine, vocab_size: int) -> None:
    """Two small requests, so that what happens once (kernels, allocations) is not measured."""
    prompts = np.random.default_rng(0).integers(vocab_size, size=(2, 16))
    run_round(
        engine, [Request(f"warm {i}", p, SamplingParams(max_tokens=4, temperature=0)) for i, p in enumerate(prompts)]
    )


class CountingRunner:
    """A runner that adds up what its steps read at least: the weights once, and the past that each sequence sees.

    Of experts, those that so many tokens visit if they choose among all alike. Bytes are those of one rank, as is the
    roof they are compared with.
    """

    def __init__(self, started: Started) -> None:
        self._runner: StepRunner = started.engine.runner
        self._layout: Layout = started.plan.sizing.layout
        rank_spec = started.spec.on_rank(started.plan.sizing.ranks)
        self._weights_bytes, self._experts_bytes = read_weights_bytes(rank_spec, started.runner.dtype)
        routers = [experts.router for experts in each(rank_spec.decoder, Experts)]
        self._visited_share = routers[0].chosen / routers[0].experts if routers else 0.0
        self.read_bytes = 0

    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int]) -> Output:
        starts = [*batch.decode_positions.tolist(), *(c.start for c in batch.chunks)]
        tokens = len(batch.decode_positions) + sum(len(c.tokens) for c in batch.chunks)
        experts_bytes = int(self._experts_bytes * (1 - (1 - self._visited_share) ** tokens))
        past = sum(past_bytes(self._layout, start) for start in starts)
        self.read_bytes += self._weights_bytes + experts_bytes + past
        return self._runner.forward(batch, all_logits_slots=all_logits_slots)

    def take_sampled(self, slots: Tensor, tokens: Tensor) -> None:
        self._runner.take_sampled(slots, tokens)

    def landed(self) -> list[tuple[int, float]]:
        return self._runner.landed()

    def read_routes(self, slot: int, start: int, stop: int) -> Callable[[], NDArray[np.integer[Any]]]:
        return self._runner.read_routes(slot, start, stop)


def past_bytes(layout: Layout, length: int) -> int:
    """KV bytes that one step of a sequence with `length` past tokens reads."""
    total = 0.0
    for group in layout.groups:
        if isinstance(group.retention, Routes):
            continue  # it is only written
        if isinstance(group.retention, State):
            total += group.stripes * group.page_bytes
        elif isinstance(group.retention, Cross):
            total += group.max_pages(length) * group.page_bytes
        else:
            total += len(group.retention.held(length)) * group.bytes_per_token
    return int(total)


def read_weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Weights that a step reads in full, and those of all experts.

    Embeddings are looked up, unless the output layer is one.
    """
    tensors, name = text_tensors(spec), str(dtype).removeprefix("torch.")
    head = next((t.name for t in tensors if t.name.endswith("lm_head.weight")), None)
    read = [
        t
        for t in tensors
        if t.part != "embedding" or (t.name == head if head else t.name.endswith("embed_tokens.weight"))
    ]
    of_experts, others = (
        sum(loaded_bytes(spec, t, name) for t in read if (t.part == "experts") == is_expert)
        for is_expert in (True, False)
    )
    return others, of_experts


def roof_bytes_per_second(device: torch.device) -> float:
    """How fast the device reads memory: the best of some sums over more than any cache holds."""
    values = torch.ones(ROOF_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(ROOF_RUNS + 1):
        began = time.perf_counter()
        values.sum().item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return ROOF_BYTES[device.type] / best
