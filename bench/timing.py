"""Timing on a GPU: one step from graph replays, and the kernels of a profile."""

import statistics
from collections import defaultdict
from collections.abc import Callable

import torch

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
