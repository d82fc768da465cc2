"""/metrics and the log: what operators look at."""

from __future__ import annotations

import logging
import re

import pytest

from tests.server.harness import Running

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "request_prefill_kv_computed_tokens_bucket",
    "iteration_tokens_total_bucket",
    "prompt_tokens_cached_total",
    "prompt_tokens_by_source_total",
    "cache_config_info",
    "engine_sleep_state",
}

SOURCES = ("local_compute", "local_cache_hit")


def scrape(server: Running) -> dict[str, float]:
    text = server.http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^windowpane:(\S+) (\S+)$", text, re.MULTILINE)}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.split("{")[0] == name)


class TestMetrics:
    def test_what_vllm_has_is_told_under_its_names_too(self, server: Running) -> None:
        server.complete(prompt="a", max_tokens=3)
        text = server.http.get("/metrics").text
        own, theirs = (
            {key.replace('engine="0",', ""): value for key, value in re.findall(pattern, text, re.MULTILINE)}
            for pattern in (r"^windowpane:(\S+) (\S+)$", r"^vllm:(\S+) (\S+)$")
        )
        assert {key.partition("{")[0] for key in theirs} >= NAMES
        assert float(re.findall(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)[0]) > 2**20
        assert re.search(r'^vllm:num_requests_running{engine="0",model_name="tiny"} 0.0$', text, re.MULTILINE)
        plain = {name: value for name, value in own.items() if name.partition("{")[0] in NAMES and "le=" not in name}
        assert plain.items() <= theirs.items()

    def test_names_that_people_look_for_are_there(self, server: Running) -> None:
        assert {key.split("{")[0] for key in scrape(server)} >= NAMES

    def test_they_count_what_happened(self, server: Running) -> None:
        before = scrape(server)
        server.complete(prompt="Hello", max_tokens=5, ignore_eos=True)
        after = scrape(server)

        def grown(name: str) -> float:
            return total(after, name) - total(before, name)

        assert (grown("prompt_tokens_total"), grown("generation_tokens_total")) == (6, 5)
        assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 1
        assert grown("inter_token_latency_seconds_count") == 4
        assert (grown("request_prefill_kv_computed_tokens_sum"), grown("iteration_tokens_total_sum")) == (6, 6 + 4)
        key = 'request_success_total{finished_reason="length",model_name="tiny"}'
        assert after[key] - before[key] == 1

    def test_cached_tokens_are_told_apart(self, server: Running) -> None:
        server.complete(prompt="told apart " * 4, max_tokens=1)
        before = scrape(server)
        server.complete(prompt="told apart " * 4, max_tokens=1)
        after = scrape(server)
        sources = [f'prompt_tokens_by_source_total{{model_name="tiny",source="{name}"}}' for name in SOURCES]
        computed, cached = (after[source] - before[source] for source in sources)
        assert computed + cached == 45 and cached >= 44
        assert total(after, "prompt_tokens_cached_total") - total(before, "prompt_tokens_cached_total") == cached
        assert total(after, "request_prefill_kv_computed_tokens_sum") == after[sources[0]]

    def test_how_kv_is_kept_is_told_in_vllms_labels(self, server: Running) -> None:
        text = server.http.get("/metrics").text
        (labels,) = re.findall(r"^vllm:cache_config_info{(.*)} 1.0$", text, re.MULTILINE)
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (found["engine"], found["enable_prefix_caching"], found["cache_dtype"]) == ("0", "True", "auto")
        assert int(found["kv_cache_memory_bytes"]) == total(scrape(server), "kv_arena_bytes")
        assert int(found["num_gpu_blocks"]) * int(found["block_size"]) > server.service.max_model_len

    def test_choices_of_one_call_are_told_together(self, server: Running) -> None:
        before = scrape(server)
        server.complete(prompt="Hello", max_tokens=5, ignore_eos=True, n=3)
        after = scrape(server)
        names = ("request_params_n_sum", "request_max_num_generation_tokens_sum", "request_params_max_tokens_count")
        assert [total(after, name) - total(before, name) for name in names] == [3, 5, 3]

    def test_bytes_by_group_and_state_add_up_to_the_arena(self, server: Running) -> None:
        found = scrape(server)
        parts = {key: value for key, value in found.items() if key.startswith("kv_bytes{")}
        assert sum(parts.values()) == total(found, "kv_arena_bytes") == 4 * 2**20
        states = {re.search(r'state="(\w+)"', key)[1] for key in parts}  # type: ignore[index]
        assert states == {"live", "cached", "stranded", "free"}


class TestLog:
    def test_one_line_per_request(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        logging.getLogger("windowpane").propagate = True
        with caplog.at_level(logging.INFO, logger="windowpane.server"):
            server.complete(prompt="Hello", max_tokens=5, ignore_eos=True, user="Ada", n=2, cache_salt="x")
            server.wait_until(lambda: caplog.messages, "it is logged")
        (line,) = caplog.messages
        number = r"[\d.]+"
        assert re.fullmatch(
            rf"cmpl-\w+ length: queue {number} s, prefill {number} s, 0 cached \+ 6 new tokens "
            rf"\(no earlier request began with these tokens\), 10 generated, "
            rf"{number} tok/s, user 'Ada'",
            line,
        )
