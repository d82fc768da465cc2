"""What the user asks of the engine: flags by the names people know from `vllm serve`, checked once, never mutated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsFloat, SupportsIndex, get_args, get_origin, get_type_hints

from windowpane.drafts.config import DraftConfig, tokens_each
from windowpane.models.adapters import DEFAULT_RANK, MOST_RANK, AdapterRoom
from windowpane.plan.sizes import parse_bytes, parse_gib, parse_tokens

DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_NUM_SEQS = 256
DEFAULT_DISK_SIZE = "16GiB"
STATE_DTYPES = ("auto", "float32", "bfloat16")
_NO_LORA = (1, DEFAULT_RANK, None)


class ConfigError(ValueError):
    """A flag that cannot be honoured; the message names it and what works instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Memory and scheduling flags. None means: choose for me.

    `kv_cache_dtype` is `auto`, one format, or one per group (`full=int8_per_token_head,window=bfloat16`). `swa_full`
    keeps sliding layers at full length. `max_itl_ms` is how long a step may take that others decode in: prompts are cut
    to that (0 or None: not at all). `enforce_eager` runs a GPU's steps launch by launch, without graphs;
    `enable_layer_chain` False leaves out the one launch that int4 layers of a single row take on Hopper. `fit`
    (`16x131072`) chooses the least lossy KV formats with which so many sequences of that length fit.
    `mamba_ssm_cache_dtype` is that of recurrent states (`auto`: what the config says, else the compute dtype).
    `enable_return_routed_experts` keeps which experts every token visits, for requests that ask for them.
    `enable_lora` makes room for `max_loras` adapters at a time of a rank up to `max_lora_rank`; `lora_target_modules`
    are the modules that they may change (None: all projections).
    `speculative_config` names a drafter: a `DraftConfig`, a mapping or JSON with its fields.
    `kv_offloading_size` is host memory for restore points, over all ranks, in GiB or with a unit.
    With `kv_disk_path` they are kept in that directory too, and found again after a restart: `kv_disk_size` of them.
    `block_tokens` and `slab_bytes` override the layout search.
    """

    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int | None = None
    max_itl_ms: float | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    fit: str | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    enforce_eager: bool = False
    enable_layer_chain: bool = True
    swa_full: bool = False
    enable_return_routed_experts: bool = False
    kv_offloading_size: float | str | None = None
    kv_disk_path: str | None = None
    kv_disk_size: float | str = DEFAULT_DISK_SIZE
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = DEFAULT_RANK
    lora_target_modules: Sequence[str] | None = None
    speculative_config: DraftConfig | Mapping[str, Any] | str | None = None
    block_tokens: int | None = None
    slab_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", DraftConfig.of(self.speculative_config))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} must be at least 1, not {value}")
        if self.kv_offloading_size is not None:
            self._check_offloading()
        if self.kv_disk_path is not None:
            self._check_disk()
        if self.fit is not None and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"--fit chooses the KV formats and --kv-cache-dtype {self.kv_cache_dtype} names them; leave one out"
            )
        if self.mamba_ssm_cache_dtype not in STATE_DTYPES:
            raise ConfigError(
                f"--mamba-ssm-cache-dtype {self.mamba_ssm_cache_dtype!r} is not known; use {', '.join(STATE_DTYPES)}"
            )
        if self.tensor_parallel_size is not None and self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, not {self.tensor_parallel_size}")
        if self.max_itl_ms is not None and self.max_itl_ms < 0:
            raise ConfigError(f"--max-itl-ms is a time, not {self.max_itl_ms}; 0 is no limit")
        if self.max_loras < 1:
            raise ConfigError(f"--max-loras is a number of adapters, not {self.max_loras}")
        if not 1 <= self.max_lora_rank <= MOST_RANK:
            raise ConfigError(f"--max-lora-rank is a rank from 1 to {MOST_RANK}, not {self.max_lora_rank}")
        if not self.enable_lora and (self.max_loras, self.max_lora_rank, self.lora_target_modules) != _NO_LORA:
            raise ConfigError(
                "--max-loras, --max-lora-rank and --lora-target-modules are for --enable-lora; add that too"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization is a share between 0 and 1, not {self.gpu_memory_utilization}; try 0.9"
            )

    def _check_offloading(self) -> None:
        try:
            offloading_bytes = self.offloading_bytes
        except ValueError as error:
            raise ConfigError(f"--kv-offloading-size: {error}") from None
        if offloading_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"--kv-offloading-size {self.kv_offloading_size} keeps restore points, and "
                "--no-enable-prefix-caching leaves none; leave one out"
            )

    def _check_disk(self) -> None:
        try:
            parse_gib(self.kv_disk_size)
        except ValueError as error:
            raise ConfigError(f"--kv-disk-size: {error}") from None
        if not self.offloading_bytes:
            raise ConfigError(
                f"--kv-disk-path {self.kv_disk_path} takes pages from host memory; add --kv-offloading-size, as in 8"
            )

    @property
    def offloading_bytes(self) -> int:
        """Host memory for restore points, over all ranks."""
        return 0 if self.kv_offloading_size in (None, 0, "0") else parse_gib(self.kv_offloading_size)

    @property
    def adapter_room(self) -> AdapterRoom | None:
        targets = None if self.lora_target_modules is None else tuple(self.lora_target_modules)
        return AdapterRoom(self.max_loras, self.max_lora_rank, targets) if self.enable_lora else None

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest step: a step never holds fewer than one, and its drafts, per running sequence."""
        return self.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS, self.max_num_seqs * (1 + self.draft_tokens))

    @property
    def drafting(self) -> DraftConfig | None:
        return None if self.speculative_config is None else DraftConfig.of(self.speculative_config)

    @property
    def state_slots(self) -> int:
        """Slots of each sequence's recurrent states: a second one keeps the state before a step that is in flight, or
        whose drafts may not be accepted.
        """
        return 2 if self.async_scheduling or self.draft_tokens else 1

    @property
    def draft_tokens(self) -> int:
        """The most that a step verifies of one sequence."""
        return 0 if self.drafting is None else self.drafting.num_speculative_tokens


def config_of(flags: Mapping[str, Any]) -> EngineConfig:
    """A config of flags by name: sizes may be text, and a step too small for the default of sequences lowers it."""
    given = {name: _typed(name, value) for name, value in flags.items()}
    step = given.get("max_num_batched_tokens")
    if step is not None and step >= 1 and "max_num_seqs" not in given:
        given["max_num_seqs"] = max(1, min(DEFAULT_NUM_SEQS, step // tokens_each(given.get("speculative_config"))))
    return EngineConfig(**given)


def for_device(config: EngineConfig, flags: Mapping[str, Any], *, on_cpu: bool) -> EngineConfig:
    """With what the device decides where no flag does: steps overlap only where it computes by itself."""
    return config if "async_scheduling" in flags else replace(config, async_scheduling=not on_cpu)


_SIZES: dict[str, Callable[[str], int]] = {
    "max_model_len": parse_tokens,
    "max_num_batched_tokens": parse_tokens,
    "kv_cache_memory_bytes": parse_bytes,
    "slab_bytes": parse_bytes,
}
_KINDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None",
    Mapping: "a mapping", Sequence: "a list", DraftConfig: "a DraftConfig",
}  # fmt: skip


def _typed(name: str, value: Any) -> Any:
    """The value as its field has it; a wrong type is one line."""
    if isinstance(value, str) and name in _SIZES:
        try:
            return _SIZES[name](value)
        except ValueError as error:
            raise ConfigError(f"{flag(name)}: {error}") from None
    expected = get_type_hints(EngineConfig)[name]
    kinds = tuple(get_origin(kind) or kind for kind in get_args(expected) or (expected,))
    if bool not in kinds and isinstance(value, bool):
        pass
    elif isinstance(value, kinds):
        return value
    elif isinstance(value, SupportsIndex) and (int in kinds or float in kinds):
        return index(value)
    elif float in kinds and isinstance(value, SupportsFloat):
        return float(value)
    raise ConfigError(f"{flag(name)} takes {' or '.join(_KINDS.get(k, str(k)) for k in kinds)}, not {value!r}")


def flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
