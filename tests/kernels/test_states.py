"""Mixers with a recurrent state on the GPU lowering, in Triton's interpreter, against the reference."""

from __future__ import annotations

from tests.kernels.interpreting import run_interpreted


def test_mixers_give_what_the_reference_gives_and_leave_its_states():
    run_interpreted("tests.kernels.interpreted_states")


def test_greedy_tokens_of_hybrid_models_equal_the_plain_decoders():
    """One of each kind of state, in one slot; others are run by hand, `interpreted_decoder NAME`, and on a GPU."""
    run_interpreted("tests.kernels.interpreted_decoder", "qwen3-next;nemotron-h;lfm2")


def test_prompts_resume_from_snapshots_that_chunks_have_left():
    """In two slots."""
    run_interpreted("tests.kernels.interpreted_decoder", "lfm2 restored")
