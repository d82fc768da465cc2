"""Flags by name, as the command line and `LLM` give them: those of the engine's config, and a few beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from windowpane.plan.config import ConfigError, EngineConfig, config_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What the engine's own flags do not say: where to run, in which dtype, where weights come from, and the seed.

    `auto` is the first CUDA card or else the CPU; the model's own dtype, or float32 on a CPU; and whatever weights lie
    with the model. `dummy` makes random ones from the config alone. A model on the Hub is fetched at `revision` (None:
    its main branch) to `download_dir` (None: the shared cache). `quantization` names how the checkpoint is quantized,
    which its own config says too: another name is an error.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    revision: str | None = None
    download_dir: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", OTHER_DTYPES.get(self.dtype, self.dtype))


# Arguments of vLLM's that ask for what is so here, and are taken: with values that match in full, or as switches where
# the pattern is empty.
SO_ANYWAY: dict[str, str] = {
    "trust_remote_code": "",
    "enable_chunked_prefill": "",
    "disable_log_stats": "",
    "disable_uvicorn_access_log": "",
    "disable_frontend_multiprocessing": "",
    "disable_custom_all_reduce": "",
    "disable_cascade_attn": "",
    "kv_sharing_fast_prefill": "",
    "scheduler_reserve_full_isl": "",
    "language_model_only": "",
    "skip_mm_profiling": "",
    "enable_prompt_tokens_details": "",
    "enable_server_load_tracking": "",
    "enable_tokenizer_info_endpoint": "",
    "enable_request_id_headers": "",
    "use_tqdm_on_load": "",
    "task": "auto|generate",
    "runner": "auto|generate",
    "tokenizer_mode": "auto|hf",
    "config_format": "auto|hf",
    "model_impl": "auto",
    "chat_template_content_format": "auto",
    "response_role": "assistant",
    "logprobs_mode": "raw_logprobs",
    "stream_interval": "1",
    "scheduling_policy": "fcfs",
    "preemption_mode": "recompute",
    "num_scheduler_steps": "1",
    "cpu_offload_gb": "0",
    "swap_space": "0",
    "kv_offloading_backend": "native",
    "distributed_executor_backend": "mp|uni",
    "pipeline_parallel_size": "1",
    "decode_context_parallel_size": "1",
    "prefill_context_parallel_size": "1",
    "data_parallel_size": "1",
    "data_parallel_size_local": "1",
    "api_server_count": "1",
    "nnodes": "1",
    "node_rank": "0",
    "limit_mm_per_prompt": "[^1-9]*",  # none of any kind
}

# vLLM's other names.
OTHER_DTYPES = {"half": "float16", "float": "float32"}


def read_flags(flags: Mapping[str, Any]) -> tuple[StartOptions, EngineConfig]:
    """Flags by name; an unknown one is an error that names what may have been meant."""
    flags = {name: value for name, value in flags.items() if not _is_so_anyway(name, value)}
    options = {f.name for f in fields(StartOptions)}
    engine = {f.name for f in fields(EngineConfig)}
    for name in flags:
        if name not in options | engine:
            close = get_close_matches(name, options | engine, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(options | engine))}"
            raise ConfigError(f"unknown argument {name!r}; {hint}")
    given = {name: value for name, value in flags.items() if name in engine}
    config = config_of(given)
    return StartOptions(**{name: value for name, value in flags.items() if name in options}), config


def _is_so_anyway(name: str, value: Any) -> bool:
    pattern = SO_ANYWAY.get(name)
    if pattern is None:
        return False
    return re.fullmatch(pattern, str(value)) is not None if pattern else value is True
