"""Decoding steps as CUDA graphs: one per batch size of a ladder, captured once and replayed with one launch.

A batch is padded to the next size up. All graphs share one pool of memory, since only one runs at a time, and all read
the same input tensors and write the same logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from windowpane.lowering.gpu.adapters import AdapterTables
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import DeviceStep, padding, tokens_of
from windowpane.runners.compiling import compiling_ahead
from windowpane.schedule.step import Segment

WARM_UPS = 1  # before a capture: kernels are loaded and libraries take their workspaces

Progress = Callable[[int, int], None]


def ladder(most_rows: int) -> list[int]:
    """Batch sizes worth a graph: close together where a padded row costs much, 16 apart where it costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most_rows + 1, 16)]
    return [size for size in sizes if size < most_rows] + [most_rows]


def next_size(sizes: Sequence[int], rows: int) -> int | None:
    """The size that so many rows are padded to; None where there are too many."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


def capture(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What `run` launches, as a graph whose memory is of this pool."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


class DraftGraphs:
    """What `run` does for so many sequences: a graph for each size of a ladder, or launch by launch."""

    def __init__(self, run: Callable[[int], None], slots: int, *, use_graphs: bool) -> None:
        self._sizes, self._graphs = ladder(slots), dict[int, torch.cuda.CUDAGraph]()
        if use_graphs:
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(self._sizes):  # the largest takes the memory for all
                self._graphs[size] = capture(partial(run, size), pool)

    def size(self, count: int) -> int:
        """How many so many are padded to."""
        size = next_size(self._sizes, count) if self._graphs else count
        assert size is not None  # there is one for all slots
        return size

    def run(self, run: Callable[[int], None], size: int) -> None:
        """`run` again. It is not kept: it is its owner's, who would never be freed by count."""
        if self._graphs:
            self._graphs[size].replay()
        else:
            run(size)


class DecodeGraphs:
    """`inputs` is the tensor that steps are read from (`DeviceStep.decoding`); `sampled` has each slot's last token.

    With `segments`, each size has a second graph for steps in which sequences have several rows, up to `most_rows`.
    `hidden` takes the rows' final hidden states, where a drafter wants them. With `adapters`, graphs are for steps in
    which rows have some.
    """

    def __init__(
        self,
        model: GpuModel,
        inputs: torch.Tensor,
        sampled: torch.Tensor,
        logits: torch.Tensor,
        sizes: Sequence[int],
        progress: Progress | None = None,
        segments: torch.Tensor | None = None,
        most_rows: int = 1,
        hidden: torch.Tensor | None = None,
        adapters: AdapterTables | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self._logits = logits
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        inputs.copy_(torch.from_numpy(padding(inputs)))
        kinds = [(size, False) for size in sizes]
        if segments is not None:
            kinds += [(size, True) for size in sizes if size > 1]
            segments.copy_(torch.tensor(Segment(0, -1, -1, 0, 0, 0), dtype=torch.int32))

        def run_of(size: int, several: bool) -> Callable[[], None]:
            together = segments[:size] if several and segments is not None else None
            on_rows = None
            if adapters is not None:
                adapters.clear(size)
                on_rows = adapters.decoding(size)
            step = DeviceStep.decoding(inputs[:, :size], together, most_rows, on_rows)

            def run() -> None:
                normed = model.final_hidden(step, tokens_of(inputs[:, :size], sampled))
                if hidden is not None:
                    hidden[:size].copy_(normed)
                model.logits(normed, logits[:size])

            return run

        kinds.sort(reverse=True)  # the largest takes the memory for all
        with compiling_ahead():
            for kind in kinds:
                run_of(*kind)()
        for done, kind in enumerate(kinds):
            self._graphs[kind] = capture(run_of(*kind), pool)
            if progress is not None:
                progress(done + 1, len(kinds))

    def padded(self, rows: int) -> int | None:
        """The graph that a batch of so many rows runs in; None where it is too large."""
        return next_size(self.sizes, rows)

    def replay(self, rows: int, *, several: bool = False) -> torch.Tensor:
        """float32 logits [rows, vocabulary], valid until the next replay; `several`: sequences have several rows."""
        size = self.padded(rows)
        assert size is not None
        self._graphs[size, several].replay()
        return self._logits[:rows]
