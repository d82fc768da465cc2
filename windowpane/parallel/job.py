"""What a rank has to do, and the two things it does at start-up: load its part of the weights, make its runner.

One rank alone has a job too: there is no other way to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from windowpane.device.host_pages import HostHandle
from windowpane.kv.layout import Layout
from windowpane.models.adapters import AdapterRoom
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import RankPlace
from windowpane.plan.config import ConfigError
from windowpane.plan.sizes import format_bytes
from windowpane.weights import LoadedWeights, load_weights
from windowpane.weights.adapters import read_adapter

if TYPE_CHECKING:
    from windowpane.lowering.adapters import Adapters, Pair
    from windowpane.lowering.group import RankGroup
    from windowpane.lowering.scales import Calibration
    from windowpane.runners.cuda import CudaRunner
    from windowpane.runners.plain import Runner

LoadProgress = Callable[[str, int, int], None]
GraphProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The same for all ranks: sizes are the plan's, which are those of one rank. `spec` is the whole model.

    `need_bytes` is what a card must have free before anything is loaded; `calibration` is for coded KV formats.
    `drafter_source` is where a drafter with a checkpoint of its own lies; `leaves_snapshots`: prefixes are cached.
    """

    spec: ModelSpec
    source: Path | None
    load_format: str
    seed: int
    dtype: str
    layout: Layout
    num_slabs: int
    num_slots: int
    max_model_len: int
    batched_tokens: int
    use_graphs: bool
    need_bytes: int
    calibration: Calibration | None = None
    use_chain: bool = True
    draft_tokens: int = 0
    host_slabs: int = 0
    drafter_source: Path | None = None
    adapter_room: AdapterRoom | None = None
    leaves_snapshots: bool = False

    def load(self, device: torch.device, place: RankPlace, progress: LoadProgress | None = None) -> LoadedWeights:
        self._check_free(device)
        return load_weights(
            self.source,
            self.spec,
            dtype=getattr(torch, self.dtype),
            device=device,
            load_format=self.load_format,
            seed=self.seed,
            place=place,
            progress=progress,
        )

    def make_runner(
        self, weights: LoadedWeights, device: torch.device, group: RankGroup, progress: GraphProgress | None = None
    ) -> Runner | CudaRunner:
        """All ranks do this together: capturing graphs, they run steps."""
        sizes = (self.spec, weights, self.layout, self.num_slabs, self.num_slots, self.max_model_len)
        dtype = getattr(torch, self.dtype)
        if device.type == "cpu":
            from windowpane.runners.plain import Runner

            return Runner(
                *sizes,
                device=device,
                dtype=dtype,
                draft_tokens=self.draft_tokens,
                host_slabs=self.host_slabs,
                group=group,
                calibration=self.calibration,
                drafter_weights=self._load_drafter(device, group.place),
                adapter_room=self.adapter_room,
            )
        from windowpane.runners.cuda import CudaRunner

        return CudaRunner(
            *sizes,
            device=device,
            dtype=dtype,
            draft_tokens=self.draft_tokens,
            host_slabs=self.host_slabs,
            use_graphs=self.use_graphs,
            use_chain=self.use_chain,
            group=group,
            calibration=self.calibration,
            progress=progress,
            adapter_room=self.adapter_room,
            drafter_weights=self._load_drafter(device, group.place),
        )

    def read_adapter(self, path: str, adapters: Adapters, place: RankPlace) -> dict[str, Pair]:
        """An adapter as this rank's slots take it; raises AdapterError. Any thread may ask."""
        assert self.adapter_room is not None
        return adapters.arranged(read_adapter(path, self.spec, self.adapter_room, place))

    def _load_drafter(self, device: torch.device, place: RankPlace) -> LoadedWeights | None:
        drafter = self.spec.drafter
        if drafter is None or drafter.spec is None:
            return None
        dtype = getattr(torch, self.dtype)
        return load_weights(
            self.drafter_source, drafter.spec, dtype=dtype, device=device, load_format=self.load_format,
            seed=self.seed, place=place,
        )  # fmt: skip

    def rehearse(self, runner: Runner | CudaRunner) -> None:
        """Run the largest step once where it is worth it, all ranks together."""
        from windowpane.runners.plain import Runner

        if not isinstance(runner, Runner):
            runner.rehearse(self.batched_tokens, leaves_snapshots=self.leaves_snapshots)

    def _check_free(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        if self.need_bytes > free_bytes:
            share = 0.95 * free_bytes / total_bytes
            raise ConfigError(
                f"the plan needs {format_bytes(self.need_bytes)} and {format_bytes(free_bytes)} of "
                f"{torch.cuda.get_device_name(device)} are free; try --gpu-memory-utilization {share:.2f}"
            )


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank has taken. `activation_bytes` is None where they are not measured; `host` is its host memory."""

    weights_bytes: int
    arena_bytes: int
    activation_bytes: int | None
    adapter_bytes: int = 0
    host: HostHandle | None = None

    @classmethod
    def of(cls, runner: Runner | CudaRunner) -> RankReport:
        arena_bytes = runner.arena.numel() * runner.arena.element_size()
        adapter_bytes = 0 if runner.adapters is None else runner.adapters.nbytes
        activation_bytes = getattr(runner, "activation_bytes", None)
        return cls(runner.weights_bytes, arena_bytes, activation_bytes, adapter_bytes, runner.pages.host.handle)
