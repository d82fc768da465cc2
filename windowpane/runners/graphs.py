"""Decoding steps as CUDA graphs: one per batch size of a ladder, captured once and replayed with one launch.

A batch is padded to the next size up. All graphs share one pool of memory, since only one runs at a time, and all read
the same input tensors and write the same logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from windowpane.lowering.gpu.adapters import AdapterTables
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import DeviceStep, padding, tokens_of

WARM_UPS = 1  # before a capture: kernels are compiled and libraries take their workspaces

Progress = Callable[[int, int], None]


def ladder(most_rows: int) -> list[int]:
    """Batch sizes worth a graph: close together where a padded row costs much, 16 apart where it costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most_rows + 1, 16)]
    return [size for size in sizes if size < most_rows] + [most_rows]


class DecodeGraphs:
    """`inputs` is the tensor that steps are read from (`DeviceStep.decoding`); `sampled` has each slot's last token.

    With `adapters`, for steps in which rows have some.
    """

    def __init__(
        self,
        model: GpuModel,
        inputs: torch.Tensor,
        sampled: torch.Tensor,
        logits: torch.Tensor,
        sizes: Sequence[int],
        progress: Progress | None = None,
        adapters: AdapterTables | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self._logits = logits
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        inputs.copy_(torch.from_numpy(padding(inputs)))
        for done, size in enumerate(sorted(sizes, reverse=True)):  # the largest takes the memory, others fit into it
            step = DeviceStep.decoding(inputs[:, :size], None if adapters is None else adapters.decoding(size))

            def run(step: DeviceStep = step, size: int = size) -> None:
                tokens = tokens_of(inputs[:, :size], sampled)
                model.forward(step, tokens, out=logits[:size])

            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run()
            self._graphs[size] = graph
            if progress is not None:
                progress(done + 1, len(self.sizes))

    def padded(self, rows: int) -> int | None:
        """The graph that a batch of so many rows runs in; None where it is too large."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, rows: int) -> torch.Tensor:
        """float32 logits [rows, vocabulary], valid until the next replay."""
        size = self.padded(rows)
        assert size is not None
        self._graphs[size].replay()
        return self._logits[:rows]
