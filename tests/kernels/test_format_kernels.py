"""Coded KV in kernels, in Triton's interpreter and float32: over the codecs' own pages, and whole runs of tiny models.

`python3 -m bench.gpu_check formats` checks the same compiled, at real sizes, on a GPU.
"""

from __future__ import annotations

import pytest

from tests.kernels.interpreting import run_interpreted


@pytest.mark.parametrize("check", ["decode", "prefill"])
def test_attention_over_coded_pages(check):
    run_interpreted("tests.kernels.interpreted_formats", check)


# int8 is the next test's; the others are run by hand, `interpreted_decoder gemma4 FORMAT`, and on a GPU.
@pytest.mark.parametrize("kv_cache_dtype", ["int4_per_token_head", "fp8_e4m3"])
def test_a_model_makes_stores_and_reads_codes_as_plain_torch_does(kv_cache_dtype):
    run_interpreted("tests.kernels.interpreted_decoder", "gemma4", kv_cache_dtype)


def test_biases_and_full_attention_alone():
    run_interpreted("tests.kernels.interpreted_decoder", "llama", "int8_per_token_head")
