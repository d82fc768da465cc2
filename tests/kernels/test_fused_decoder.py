"""The decoder that GPUs run, in Triton's interpreter, against the plain one: whole greedy runs of tiny models.

`python3 -m bench.gpu_check engine` does the same on a GPU, with graphs, overlapping steps and every model family.
"""

from __future__ import annotations

import pytest

from tests.kernels.interpreting import run_interpreted

CHAINED = ("gemma4 int4 chained", "gemma4 int4 unchained")
EXPERTS = ("gemma4 experts routed", "gpt-oss mxfp4")  # others: `interpreted_decoder NAME`, and on a GPU


DRAFTED = (
    "gemma4 drafted",
    "gemma4 assisted",
    "gemma4 drafting",
    "qwen3.5 layered",
    "nemotron-h drafted",
    "lfm2 drafted",
)  # a window, K = V and shared KV; one of each kind of state


ADAPTED = ("gemma4 int4 adapted", "gpt-oss adapted")  # a latent and packed weights; experts


@pytest.mark.parametrize("name", ["llama", "gemma4", "llama int4", *CHAINED, *EXPERTS, *DRAFTED, *ADAPTED])
def test_greedy_tokens_equal_the_plain_decoders(name):
    run_interpreted("tests.kernels.interpreted_decoder", name)


def test_what_coded_values_attend_is_turned_back_before_a_chain():
    run_interpreted("tests.kernels.interpreted_decoder", "gemma4 int4 chained", "int4_per_token_head")


def test_two_ranks_say_what_one_does():
    """Of the headline's kind: int4, K = V in full layers. Others are run by hand: `interpreted_ranks NAME`."""
    run_interpreted("tests.kernels.interpreted_ranks", "gemma4 int4")
