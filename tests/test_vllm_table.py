"""docs/vllm.md: every flag and field of `vllm serve`, with what happens here.

`python -m tests.test_vllm_table` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import typer

from windowpane.cli import main as cli
from windowpane.cli.vllm_flags import HOLDS, HOLDS_OF_KEPT, INSTEAD, KEPT, SHORT
from windowpane.cli.words import NO_REQUEST_LOG
from windowpane.server.protocol import UNSUPPORTED, ChatBody, CompletionBody

PAGE = Path(__file__).parent.parent / "docs" / "vllm.md"

# Of vLLM 0.27.
CHAT = re.findall(
    r"\w+",
    """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
    repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
    bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
    """,
)
COMPLETION = re.findall(
    r"\w+",
    """
    model prompt prompt_embeds best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed
    stop stream stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs add_special_tokens
    response_format structured_outputs priority request_id return_tokens_as_token_ids return_token_ids cache_salt
    kv_transfer_params vllm_xargs
    """,
)


INTRODUCTION = (
    "Every flag and every request field of `vllm serve` 0.27, with what happens here. In a start script, `vllm`",
    "becomes `windowpane`, or `python -m vllm.entrypoints.openai.api_server` becomes `windowpane serve`. A flag that",
    "asks for what is so here anyway is taken. One that is not here is an error that says what to use instead, with",
    "exit code 2, and a field is a 400 that does; none is read and ignored. Underscores are dashes, and `--config`",
    "reads flags from a YAML file, as there. `VLLM_API_KEY` is read where `WINDOWPANE_API_KEY` is not set.",
)


def page() -> str:
    flags = [(f"`{flag}`", "the same") for flag in KEPT]
    flags += [("`--model`", "the same as the model without a flag")]
    flags += [(f"`{flag}`", "the same as `--log-level warning`") for flag in NO_REQUEST_LOG[:1]]
    flags += [(f"`{flag}`", _answer(flag, instead)) for flag, instead in INSTEAD.items() if flag not in NO_REQUEST_LOG]
    short = {long: name for name, long in SHORT.items()} | {"--tensor-parallel-size": "-tp", "--quantization": "-q"}
    flags = [(f"{name}, `{short[name[1:-1]]}`" if name[1:-1] in short else name, what) for name, what in flags]
    return "\n".join(
        [
            "# From `vllm serve`",
            "",
            *INTRODUCTION,
            "",
            "## Flags",
            "",
            *_table("flag", sorted(flags)),
            "",
            "## Fields of /v1/chat/completions and /v1/completions",
            "",
            *_table("field", ((f"`{name}`", _field(name)) for name in sorted({*CHAT, *COMPLETION}))),
            "",
        ]
    )


def _answer(flag: str, instead: str) -> str:
    why = instead.removesuffix("; leave it out")
    pattern = HOLDS.get(flag)
    if pattern is None:
        return f"an error: {instead}"
    if not pattern:
        return f"so anyway, and taken: {why}"
    values = (
        "where every number is 0" if pattern.startswith("[") else " and ".join(f"`{v}`" for v in pattern.split("|"))
    )
    return f"taken with {values}, else an error: {why}".replace("with where", "where")


def _field(name: str) -> str:
    kept = [path for path, known in _BODIES if name in known]
    if len(kept) == 2 or (kept and name not in UNSUPPORTED):
        return "the same"
    refused = f"a 400: {UNSUPPORTED[name]}"
    return f"the same for {kept[0]}; elsewhere {refused}" if kept else refused


_BODIES = (("chats", ChatBody.model_fields), ("completions", CompletionBody.model_fields))


def _table(what: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {what} | here |", "|---|---|", *(f"| {name} | {says} |" for name, says in rows)]


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.test_vllm_table"


def test_flags_that_are_kept_are_here() -> None:
    serve = typer.main.get_command(cli.app).get_command(None, "serve")  # type: ignore[attr-defined]
    here = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert here >= set(KEPT) and not set(KEPT) & INSTEAD.keys()
    assert HOLDS.keys() <= INSTEAD.keys() and HOLDS_OF_KEPT.keys() <= set(KEPT)


def test_every_field_has_an_answer() -> None:
    for names, known in ((CHAT, ChatBody.model_fields), (COMPLETION, CompletionBody.model_fields)):
        assert {name for name in names if name not in known} <= UNSUPPORTED.keys()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
