"""Failures by their words, and four reports as people wrote them: markdown, tables and all."""

from __future__ import annotations

import pytest

from windowpane.doctor.diagnosis import diagnose
from windowpane.doctor.failures import Failure
from windowpane.doctor.log import LogFacts


def only(text: str, **given: object) -> Failure:
    (failure,) = diagnose(text, LogFacts(**given)).failures  # type: ignore[arg-type]
    return failure


class TestWords:
    def test_pages_that_cannot_be_padded_are_not_sent_to_the_release_that_says_so(self) -> None:
        failure = only(
            "NotImplementedError: Layer model.layers.0.attn: page size is not divisible by the maximum page size and "
            "cannot be padded. Padding is only supported for attention layers whose backend indexes KV pages by stride."
        )
        assert failure.key == "page_size_not_divisible"
        assert not any("0.24 or newer" in way for way in failure.ways_out)
        assert any("0.29" in way for way in failure.ways_out)

    @pytest.mark.parametrize(
        ("kernel", "key"),
        [
            ("def reshape_and_cache_kernel_flash(", "fp8e4nv_not_supported"),
            ("File fused_moe.py, line 12, in fused_moe_kernel", "fp8e4nv_in_weights"),
            ("def _w8a8_block_fp8_matmul(", "fp8e4nv_in_weights"),
        ],
    )
    def test_kv_advice_is_given_only_where_kv_failed(self, kernel: str, key: str) -> None:
        failure = only(
            f"CompilationError: at 1:0: {kernel} ValueError: type fp8e4nv not supported in this architecture."
        )
        assert failure.key == key
        assert any("--kv-cache-dtype" in way for way in failure.ways_out) == (key == "fp8e4nv_not_supported")

    def test_fp8_weights_without_fp8_kv_are_enough_to_tell(self) -> None:
        text = "ValueError: type fp8e4nv not supported in this architecture."
        assert only(text, quantization="fp8", kv_cache_dtype="auto").key == "fp8e4nv_in_weights"
        assert only(text, quantization="fp8", kv_cache_dtype="fp8").key == "fp8e4nv_not_supported"

    def test_negative_memory_says_by_how_much(self) -> None:
        text = "INFO 05-05 05:05:05 [gpu_worker.py:1] Available KV cache memory: -24.42 GiB\n"
        assert "24.42 GiB short" in only(text).cause
        assert only(f"{text}ValueError: No available memory for the cache blocks.").key == "no_kv_memory"

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("Turning off hybrid kv cache manager because `--kv-transfer-config` is set.", "--kv-transfer-config"),
            ("Disabling it because chunked local attention is slower. ", "chunked local attention"),
            ("non-default args: {'disable_hybrid_kv_cache_manager': True}", "--disable-hybrid-kv-cache-manager"),
            ("", "does not name"),
        ],
    )
    def test_a_disabled_hybrid_manager_has_a_reason(self, line: str, why: str) -> None:
        failure = only(
            f"{line}\nWARNING 05-05 05:05:05 [a.py:1] Hybrid KV cache manager is disabled for this hybrid model"
        )
        assert failure.key == "hybrid_manager_disabled" and why in failure.cause

    def test_out_of_memory_before_and_after_kv_was_set_aside(self) -> None:
        message = (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.68 GiB of which 512.00 MiB is free."
        )
        before = only(message)
        after = only(f"GPU KV cache size: 1,024 tokens\n{message}")
        assert before.key == after.key == "cuda_out_of_memory"
        assert "weights and activations" in before.cause and "already set aside" in after.cause
        assert "512.00 MiB were free" in before.cause

    def test_a_card_that_someone_else_uses(self) -> None:
        failure = only(
            "ValueError: Free memory on device cuda:0 (11.20/23.68 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 21.31 GiB). Decrease GPU memory utilization or end other processes."
        )
        assert failure.key == "less_free_than_asked"
        assert failure.ways_out[0].startswith("--gpu-memory-utilization 0.46")

    @pytest.mark.parametrize(("model", "slides"), [(None, True), ("gemma-3-27b", True), ("qwen3-32b", False)])
    def test_windows_are_blamed_only_where_there_may_be_some(self, model: str | None, slides: bool) -> None:
        failure = only(
            "▎ ValueError: To serve at least one request with the model's max seq len (40960),\n"
            "▎ 10.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.25 GiB).",
            model=model,
        )
        assert failure.key == "kv_cache_too_small"
        assert any("--max-num-batched-tokens" in way for way in failure.ways_out) is slides

    def test_what_one_request_needs_tells_the_release_and_a_small_step_is_not_made_smaller(self) -> None:
        """4.54 GiB are 73 blocks for each window of 128 tokens and steps of 1,024; two steps in flight would be 137."""
        text = (
            "$ vllm serve openai/gpt-oss-120b --max-num-batched-tokens 1024\n\nValueError: To serve at least one "
            "request with the model's max seq len (131072), 4.54 GiB KV cache is needed, which is larger than the "
            "available KV cache memory (2.10 GiB)."
        )
        found = diagnose(text, LogFacts())
        (failure,) = found.failures
        assert not any("--max-num-batched-tokens" in way for way in failure.ways_out)
        assert found.explanation is not None
        assert [g.blocks_per_request for g in found.explanation.report.groups] == [73, 8192]

    def test_old_words_for_a_cache_that_is_too_small(self) -> None:
        failure = only(
            "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be "
            "stored in KV cache (23648)."
        )
        assert failure.key == "kv_cache_too_small" and "--max-model-len 23648" in failure.ways_out[0]


TWO_3090S = """## KV cache far too small on 2x RTX 3090?

Hi! I start it like this:

```bash
vllm serve google/gemma-4-31B-it \\
  --tensor-parallel-size 2 --max-model-len 131072 \\
  --gpu-memory-utilization 0.95
```

and the log (vLLM 0.20.0) ends with

> ```
> (Worker_TP0 pid=331) INFO 04-12 09:16:40 [gpu_worker.py:436] Available KV cache memory: 11.54 GiB
> (EngineCore pid=297) INFO 04-12 09:16:41 [kv.py:1314] GPU KV cache size: 25,200 tokens
> (EngineCore pid=297) INFO 04-12 09:16:41 [kv.py:1319] Maximum concurrency for 131,072 tokens per request: 1.87x
> ```

Environment: `pip list` says vllm==0.20.0. Why only 25k tokens?
"""

SCALES = """### What happens

With `--kv-cache-dtype int8_per_token_head` the engine does not come up:

```sh
vllm serve <any-gemma-4> --kv-cache-dtype int8_per_token_head
```

<details><summary>Trace</summary>

```text
(Worker_TP1 pid=248) ERROR 04-19 14:16:08 [executor.py:971]   in unify_kv_cache_spec_page_size
(Worker_TP1 pid=248) ERROR 04-19 14:16:08 [executor.py:971] NotImplementedError: The page size of the layer is
(Worker_TP1 pid=248) not divisible by the maximum page size. Cannot unify by adjusting block_size.
```
</details>

Local layers have head_dim 256, global ones 512.
"""

JUMP = """**Ten times more KV cache after an upgrade?** Same flags, same A100,
[this checkpoint](https://huggingface.co/some-org/gemma-4-31B-it-AWQ-4bit):

| release | KV cache |
| :-- | --: |
| v0.20.0 | ~55k tokens |
| **v0.21.0** | ~525k tokens |

The memory for it is about 50 GB in both.
"""

EXPERTS = """### Environment

- vLLM version: 0.18.1
- Model: Qwen3.5-35B-A3B (attention and states)
- Flags: `--tensor-parallel-size 4 --enable-return-routed-experts`

`RoutedExpertsCapturer` overflows under load. Its buffer is sized by

```python
tokens = (kv_cache_config.num_blocks // num_groups) * min_block_size
```

```
IndexError: index 1733400 is out of bounds for axis 0 with size 523776
```
"""


class TestReports:
    def test_25_200_tokens_on_two_3090s(self) -> None:
        found = diagnose(TWO_3090S, LogFacts())
        assert found.explanation is not None and found.explanation.exact
        assert found.facts.version == "0.20.0" and found.facts.tensor_parallel_size == 2
        assert [g.layers for g in found.explanation.report.groups] == [10] * 6

    def test_page_sizes_with_scales_per_token_and_head(self) -> None:
        found = diagnose(SCALES, LogFacts())
        assert [f.key for f in found.failures] == ["page_size_not_divisible"]
        assert found.facts.model is None and "1,032 is no multiple of 520" in found.failures[0].cause

    def test_55k_that_became_525k(self) -> None:
        found = diagnose(JUMP, LogFacts())
        assert [f.key for f in found.failures] == ["report_formula_changed"]
        assert "55,000 tokens in 0.20.0 and 525,000 in 0.21.0" in found.failures[0].cause
        assert found.spec is not None and "window" in found.failures[0].cause

    def test_two_releases_that_print_alike_are_no_story(self) -> None:
        same = JUMP.replace("~525k", "~56k")
        assert diagnose(same, LogFacts()).failures == ()

    def test_states_and_routed_experts(self) -> None:
        found = diagnose(EXPERTS, LogFacts())
        assert [f.key for f in found.failures] == ["routed_experts_out_of_bounds"]
        assert "index 1,733,400 is beyond its 523,776 rows" in found.failures[0].cause
        assert found.spec is not None and found.spec.name == "qwen3.5-35b-a3b"
