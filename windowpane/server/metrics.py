"""What Prometheus scrapes at /metrics. Names mirror vLLM's, with `windowpane:` in front: see docs/server.md.

Counts are kept in the engine's thread as plain numbers; labels and text are made when someone scrapes. All that
concerns memory is read from the engine's own books at that moment.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from windowpane.drafts.speculator import DraftStats
from windowpane.engine.engine import Engine, TokenOutput
from windowpane.kv.tier import TierStats
from windowpane.schedule.request import FinishReason, Request

if TYPE_CHECKING:
    from windowpane.engine.start import Started
    from windowpane.server.job import Times

PREFIX = "windowpane:"
VLLM_PREFIX = "vllm:"

# Told under vLLM's names too, with its labels: the meaning is the same.
SAME_AS_VLLM = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
        *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds", "lora_requests_info"),
        *("request_params_n", "request_params_max_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", "iteration_tokens_total"),
        *("cache_config_info", "engine_sleep_state", "request_prefill_kv_computed_tokens", "prompt_tokens_cached"),
        "prompt_tokens_by_source",
    }
)

# Bounds in seconds, those of the vLLM histograms of the same names.
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_CHOICES = (1, 2, 5, 10, 20)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_STEP_TOKENS = _TOKENS[:13]
# How vLLM calls its levels of sleep.
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Histogram:
    """Counts by upper bound. Not locked: one thread observes, and who reads may miss the latest."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = PREFIX + name
        self.help = help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, labels: dict[str, str]) -> Metric:
        below, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class Metrics:
    """Counts of one server. The engine's thread tells it of steps, tokens and ends."""

    def __init__(self, model_name: str, cache_config: Mapping[str, str] | None = None) -> None:
        """`cache_config` is told as `cache_config_info`: see the function of that name."""
        self.cache_config = cache_config
        self.labels = {"model_name": model_name}
        self._started = time.monotonic()
        self.steps = 0
        self.output_cpu_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.ended_requests: Counter[FinishReason] = Counter()
        self.rejected_requests: Counter[str] = Counter()  # by reason; the event loop's own
        self.first_token_s = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.token_s = Histogram("inter_token_latency_seconds", "From one token to the next.", _TOKEN_S)
        self.request_s = Histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S)
        self.queue_s = Histogram("request_queue_time_seconds", "From arrival to admission.", _REQUEST_S)
        self.prefill_s = Histogram("request_prefill_time_seconds", "From admission to the first token.", _REQUEST_S)
        self.decode_s = Histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST_S)
        self.inference_s = Histogram("request_inference_time_seconds", "From admission to the last token.", _REQUEST_S)
        self.mean_token_s = Histogram(
            "request_time_per_output_token_seconds", "Mean time from token to token, per request.", _TOKEN_S
        )
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_generated_tokens = Histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self.longest_answer = Histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest of a call's choices.", _TOKENS
        )
        self.computed_tokens = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens per request that were not cached.", _TOKENS
        )
        self.step_tokens = Histogram("iteration_tokens_total", "Tokens per step, of prompts and answers.", _STEP_TOKENS)
        self.params_n = Histogram("request_params_n", "Choices per call.", _CHOICES)
        self.params_max_tokens = Histogram("request_params_max_tokens", "max_tokens per request.", _TOKENS)
        self.loop_lag_s = Histogram("event_loop_lag_seconds", "How late the event loop woke a timer.", _LAG_S)

    # -- told by the engine's thread -------------------------------------------------------------------------------

    def stepped(self, outputs: Sequence[TokenOutput], sent_tokens: int) -> None:
        """`sent_tokens` are those of the step that was sent off meanwhile; 0 where none was."""
        self.steps += 1
        if sent_tokens:
            self.step_tokens.observe(sent_tokens)
        self.generated_tokens += sum([output.token is not None and not output.is_dropped for output in outputs])

    def token_came(self, request: Request, times: Times, now: float) -> None:
        if times.last_token is None:
            times.first_token = now
            self.first_token_s.observe(now - times.submitted)
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached_tokens
        else:
            self.token_s.observe(now - times.last_token)
        times.last_token = now

    def ended(self, request: Request, reason: FinishReason | None, times: Times) -> None:
        """A request is over, and all its times are known that ever will be."""
        self.ended_requests[reason or FinishReason.CANCELLED] += 1
        if times.ended is not None:
            self.request_s.observe(times.ended - times.submitted)
        self.queue_s.observe((times.admitted or times.ended or times.submitted) - times.submitted)
        if times.admitted is not None and times.first_token is not None:
            self.prefill_s.observe(times.first_token - times.admitted)
        if times.first_token is not None and times.last_token is not None:
            self.decode_s.observe(times.last_token - times.first_token)
            if times.admitted is not None:
                self.inference_s.observe(times.last_token - times.admitted)
            if len(request.output) > 1:
                self.mean_token_s.observe((times.last_token - times.first_token) / (len(request.output) - 1))
        self.params_max_tokens.observe(request.params.max_tokens)
        self.request_prompt_tokens.observe(len(request.prompt))
        self.request_generated_tokens.observe(len(request.output))
        self.computed_tokens.observe(len(request.prompt) - request.cached_tokens)

    def job_ended(self, requests: Sequence[Request]) -> None:
        """All choices of a call are over."""
        self.params_n.observe(len(requests))
        self.longest_answer.observe(max(len(request.output) for request in requests))

    def seconds_to_serve(self, waiting: int) -> float:
        """How long a queue of this length takes at the pace of this server's life so far: a guess, for Retry-After."""
        ended = sum(self.ended_requests.values())
        pace = ended / (time.monotonic() - self._started) if ended else 1.0
        return min(max(waiting / pace, 1.0), 60.0)

    # -- scraped ---------------------------------------------------------------------------------------------------

    def exposition(self, engine: Engine, *, alive: bool, sleep_level: int = 0) -> bytes:
        """The text that Prometheus reads. Between steps only: it looks into the engine's books."""
        registry = CollectorRegistry(auto_describe=False)
        families = [*self.engine_families(engine, alive), *self._families(), self._sleep_family(sleep_level)]
        ProcessCollector(registry=registry)
        registry.register(_Collected([*families, *_named_as_in_vllm(families)]))
        return generate_latest(registry)

    def _families(self) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.", self.cached_tokens)
        yield self._labelled_counter(
            "prompt_tokens_by_source",
            "Prompt tokens that were computed, and those found in the cache.",
            "source",
            {"local_compute": self.prompt_tokens - self.cached_tokens, "local_cache_hit": self.cached_tokens},
        )
        yield self._counter("generation_tokens", "Tokens generated.", self.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", self.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", self.cached_tokens)
        yield self._counter("engine_steps", "Steps computed.", self.steps)
        yield self._counter(
            "output_cpu_seconds", "Processor time of the engine's thread for text and delivery.", self.output_cpu_s
        )
        yield self._labelled_counter(
            "request_success",
            "Requests that ended, by reason.",
            "finished_reason",
            {reason.value: self.ended_requests[reason] for reason in FinishReason},
        )
        yield self._labelled_counter(
            "requests_rejected", "Requests turned away before they were queued.", "reason", self.rejected_requests
        )
        if self.cache_config is not None:
            info = GaugeMetricFamily(
                PREFIX + "cache_config_info",
                "How KV is kept: labels of a 1.",
                labels=[*self.labels, *self.cache_config],
            )
            info.add_metric([*self.labels.values(), *self.cache_config.values()], 1)
            yield info
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield value.family(self.labels)

    def _sleep_family(self, level: int) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "engine_sleep_state",
            "1 for the state that the engine is in.",
            labels=[*self.labels, "sleep_state"],
        )
        for of_level, state in enumerate(_SLEEP_STATES):
            family.add_metric([*self.labels.values(), state], int(level == of_level))
        return family

    def engine_families(self, engine: Engine, alive: bool) -> Iterator[Metric]:
        scheduler, manager = engine.scheduler, engine.manager
        yield self.gauge("engine_up", "1 while the engine runs, 0 when it died.", int(alive))
        yield self.gauge("num_requests_running", "Requests in the batch.", len(scheduler.running))
        yield self.gauge("num_requests_waiting", "Requests that wait to be admitted.", len(scheduler.waiting))
        yield self._counter("num_preemptions", "Requests sent back to the queue.", scheduler.preemptions)
        if engine.adapters is not None:
            yield self._adapters_family(engine)
        if engine.speculator is not None:
            yield from self._draft_families(engine.speculator.stats)
        if scheduler.tier is not None:
            yield from self._tier_families(scheduler.tier.stats)
        groups = {group.name: manager.group_bytes(index) for index, group in enumerate(manager.layout.groups)}
        live = sum(held.live for held in groups.values())
        yield self.gauge(
            "kv_cache_usage_perc", "Live bytes over arena bytes; 1 is full.", live / manager.arena.total_bytes
        )
        yield self.gauge("kv_arena_bytes", "Bytes of the arena.", manager.arena.total_bytes)
        held_bytes = GaugeMetricFamily(
            PREFIX + "kv_bytes",
            "Bytes of the arena by group and state; free ones belong to no group. All of them add up to the arena.",
            labels=[*self.labels, "group", "state"],
        )
        for name, held in groups.items():
            for state in ("live", "cached", "stranded"):
                held_bytes.add_metric([*self.labels.values(), name, state], getattr(held, state))
        held_bytes.add_metric([*self.labels.values(), "", "free"], manager.free_bytes)
        yield held_bytes

    def _adapters_family(self, engine: Engine) -> Metric:
        """As vLLM tells it: names in labels, and as the value when that was."""
        assert engine.adapters is not None
        scheduler, names = engine.scheduler, engine.adapters.names
        family = GaugeMetricFamily(
            PREFIX + "lora_requests_info",
            "Adapters of requests that run and that wait, by name; the value is the time of the scrape.",
            labels=[*self.labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running, waiting = (
            ",".join(sorted({names.get(request.adapter, "") for request in requests} - {""}))
            for requests in (scheduler.running.values(), scheduler.waiting)
        )
        slots = str(engine.adapters.slots)
        family.add_metric([*self.labels.values(), slots, running, waiting], time.time())
        return family

    def _tier_families(self, stats: TierStats) -> Iterator[Metric]:
        yield self.gauge("host_arena_bytes", "Bytes of the host tier.", stats.total_bytes)
        yield self.gauge("host_cached_bytes", "Bytes of the host tier that hold pages.", stats.cached_bytes)
        yield self.gauge("host_restore_points", "Restore points in the host tier.", stats.restore_points)
        yield self._counter("host_hits", "Prompt tokens that were fetched from the host.", stats.hit_tokens)
        yield self._counter("host_fetches", "Restore points fetched from the host.", stats.fetches)
        yield self._counter("host_spilled_bytes", "Bytes copied to the host.", stats.spilled_bytes)
        yield self._counter("host_fetched_bytes", "Bytes copied from the host.", stats.fetched_bytes)
        yield self._counter("host_fetch_seconds", "Seconds that requests waited for those copies.", stats.fetch_seconds)
        yield self._counter("host_evictions", "Restore points that the host gave up for room.", stats.evictions)
        yield self.gauge("disk_bytes", "Bytes of restore points on disk.", stats.disk_bytes)
        yield self._counter("disk_hits", "Prompt tokens that were read from disk.", stats.disk_hit_tokens)
        yield self._counter("disk_written_bytes", "Bytes written to disk.", stats.disk_written_bytes)
        yield self._counter("disk_read_bytes", "Bytes read from disk.", stats.disk_read_bytes)

    def _draft_families(self, stats: DraftStats) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Requests' steps with drafts.", stats.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", stats.accepted_tokens)
        yield self._labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by their place among a request's drafts of a step.",
            "position",
            {str(position): count for position, count in enumerate(stats.accepted_by_position)},
        )

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def _labelled_counter(self, name: str, help: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=[*self.labels, label])
        for key, value in values.items():
            family.add_metric([*self.labels.values(), key], value)
        return family

    def gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family


def cache_config(started: Started) -> dict[str, str]:
    """Labels of vLLM's metric of that name, as far as they have a meaning here.

    Groups have pages of their own, so that `num_gpu_blocks` is what vLLM's own figure amounts to: blocks of the tokens
    of as many sequences of the longest length as fit.
    """
    plan = started.plan
    assert plan.capacity is not None
    config = plan.sizing.config
    blocks = [group.block_tokens for group in plan.sizing.layout.groups if group.block_tokens]
    block_tokens = max(blocks, default=1)
    tokens = plan.capacity.byte_ratio(plan.max_model_len) * plan.max_model_len
    return {
        "block_size": str(block_tokens),
        "num_gpu_blocks": str(int(tokens) // block_tokens),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(plan.capacity.arena_bytes),
    }


def _named_as_in_vllm(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        if family.name.removeprefix(PREFIX) not in SAME_AS_VLLM:
            continue
        other = Metric(family.name.replace(PREFIX, VLLM_PREFIX, 1), family.documentation, family.type)
        other.samples = [
            sample._replace(name=sample.name.replace(PREFIX, VLLM_PREFIX, 1), labels={**sample.labels, "engine": "0"})
            for sample in family.samples
        ]
        yield other


class _Collected:
    """What prometheus_client asks for metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families
