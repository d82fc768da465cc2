"""Timing on the device and error against a reference."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Row:
    """One line of the table: what ran, how long, at which rate, and how far from the reference (None: not compared)."""

    part: str
    case: str
    microseconds: float
    rate: float
    unit: str
    error: float | None = None

    def line(self) -> str:
        error = "" if self.error is None else f"  err {self.error:.1e}"
        return f"{self.part:8s} {self.case:66s} {self.microseconds:10.1f} us {self.rate:8.2f} {self.unit}{error}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


WARM_MICROSECONDS = 30_000


def microseconds(step: Callable[[], None], repeat: int = 5, rounds: int = 9) -> float:
    """Median time of one `step`, from replays of a graph that holds `repeat` of them: launch gaps stay out.

    A GPU that just idled or freed memory is slow for a while (seen: 3.6 instead of 4.0 TB/s), so it warms up first.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            step()
    warm = 0.0
    while warm < WARM_MICROSECONDS:
        warm += _replay_microseconds(graph)
    return statistics.median(_replay_microseconds(graph) for _ in range(rounds)) / repeat


def _replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def exclusive_times(profile: torch.profiler.profile) -> dict[str, list[float]]:
    """Microseconds of each launch by kernel. One that overlaps another takes only the time from when that one ended."""
    ran = [event for event in profile.events() if str(event.device_type) == "DeviceType.CUDA"]
    spent: dict[str, list[float]] = defaultdict(list)
    ended = 0.0
    for event in sorted(ran, key=lambda event: event.time_range.end):
        spent[event.name].append(event.time_range.end - max(event.time_range.start, ended))
        ended = event.time_range.end
    return spent


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got.float() - reference).norm() / reference.norm())


def require(error: float, limit: float, what: str) -> float:
    """NaN never passes."""
    if not error <= limit:
        raise AssertionError(f"{what}: relative error {error:.3g} exceeds {limit}")
    return error


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Reference attention in float32: q [heads, rows, dim], k and v [kv heads, tokens, dim], scale 1."""
    group = q.shape[0] // k.shape[0]
    q = q.float().reshape(k.shape[0], group * q.shape[1], q.shape[2])
    scores = q @ k.float().transpose(1, 2)
    if hidden is not None:
        scores.masked_fill_(hidden.repeat(group, 1), float("-inf"))
    return (scores.softmax(-1) @ v.float()).view(k.shape[0] * group, -1, v.shape[-1])
