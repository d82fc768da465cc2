"""How many replicas a model needs, by what its replicas say of their queues and memory.

Ray Serve's controller runs the policy, from a copy of this module: it imports nothing of the project. A replica says

    load      the larger of the shares of its sequences and of its KV memory that are in use
    queue     requests that wait there, as a multiple of those that run: work for so many more replicas

and the model needs Σ (load + queue) / target_load replicas. A request that holds a long context thus weighs what it
takes, and one that waits counts although it takes nothing yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

POLICY = f"{__name__}:ByQueueAndMemory"
MOST_QUEUED = 4.0  # replicas that the queue of one can ask for at once


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds, and how fast: a need must last for a delay before replicas are started or ended."""

    min_replicas: int
    max_replicas: int
    target_load: float = 0.8
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"autoscaling: min_replicas {self.min_replicas} and max_replicas {self.max_replicas}: the fewest are "
                "at least 1, and the most no less than the fewest"
            )
        if not 0 < self.target_load <= 1:
            raise ValueError(f"autoscaling: target_load {self.target_load} is a share, above 0 and up to 1")
        if min(self.upscale_delay_s, self.downscale_delay_s) < 0 or self.look_back_period_s <= 0:
            raise ValueError("autoscaling: delays are not negative, and look_back_period_s is above 0")


def stats_of(*, running: int, waiting: int, most_running: int, kv_share: float) -> dict[str, float]:
    """What a replica says."""
    queue = waiting / max(1, running)
    return {"load": max(kv_share, running / most_running), "queue": min(queue, MOST_QUEUED)}


class ByQueueAndMemory:
    """An autoscaling policy as Ray Serve takes it; Ray applies bounds and delays to what it says."""

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        said = context.aggregated_metrics or {}
        load = said.get("load") or {}
        if not load:  # nobody has said anything yet
            return context.target_num_replicas, {}
        asked = sum(load.values()) + sum((said.get("queue") or {}).values())
        silent = max(0, context.current_num_replicas - len(load))  # starting: what they will take is not known
        return max(1, math.ceil(asked / self._target_load - 1e-9), min(silent, 1)), {}
