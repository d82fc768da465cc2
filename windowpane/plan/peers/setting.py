"""What is compared: one rank's caches and flags. Every peer is a module with `reports(setting)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windowpane.kv.caches import Cache, TokenCache
from windowpane.kv.formats import OTHER_NAMES
from windowpane.kv.retention import ceil_div

MambaCacheMode = Literal["none", "align", "all"]
MAMBA_CACHE_MODES: tuple[MambaCacheMode, ...] = ("none", "align", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One rank's caches (already sharded) and the flags that size memory, as every peer takes them.

    `shared_caches` are those that layers which share KV do without. `family` is the model's. `kv_cache_dtype` is what
    the user asked for: `auto`, one format, or a list per group, which no peer can do. `max_num_batched_tokens` is the
    flag, or vLLM's default on this card where `batched_tokens_given` is false. `mamba_cache_mode`: vLLM uses `none`
    without prefix caching and `align` with it; `all` must be asked for. `draft_tokens` are drafted per step; the layers
    and wider convolutions of drafts stand in `caches`. `base_block_tokens` is vLLM's --block-size.
    `quantized_checkpoint` and `capability` (None: unknown) only decide whether an engine would start.
    """

    caches: tuple[Cache, ...]
    kv_cache_dtype: str
    compute_dtype: str
    kv_cache_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    shared_caches: tuple[TokenCache, ...] = ()
    family: str = ""
    batched_tokens_given: bool = True
    async_scheduling: bool = True
    mamba_cache_mode: MambaCacheMode = "none"
    draft_tokens: int = 0
    base_block_tokens: int = 16
    quantized_checkpoint: bool = False
    capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.caches:
            raise ValueError("other engines' formulas need at least one cache; this model owns none")
        if min(self.max_model_len, self.max_num_batched_tokens) < 1:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) and max_num_batched_tokens ({self.max_num_batched_tokens}) "
                "must be at least 1"
            )

    @property
    def kv_dtype(self) -> str:
        asked = OTHER_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        return self.compute_dtype if asked == "auto" else asked


def stored_bytes(cache: TokenCache, element_bits: int, scale_bytes: int = 0) -> int:
    """One token of one layer. Other engines store K and V even where one projection makes both; only where there is no
    V (MLA, index keys) do they keep one vector.
    """
    sides = (cache.key_dim, cache.value_dim) if cache.value_dim else (cache.key_dim,)
    return cache.kv_heads * sum(ceil_div(dim * element_bits, 8) + scale_bytes for dim in sides)
