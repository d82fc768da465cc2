"""TensorRT-LLM: one pool per distinct window, each with its own share of the memory.

    blocks of a request   ⌈(min(prompt + new, window + chunk) + sink) / block⌉, per pool

Blocks are of 32 tokens, there is no sink, and the chunk is `max_num_tokens` (8,192). A full layer's window is the
longest length. The V1 manager of the PyTorch path gives every window an equal share; V2 starts from the shares that one
sequence of 2,048 tokens would use, and is charged here by V1's rule. Source: TensorRT-LLM's `kvCacheManager` and
`resource_manager.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from windowpane.kv.caches import TokenCache
from windowpane.kv.formats import kv_format
from windowpane.kv.retention import Full, Window, ceil_div
from windowpane.plan.peers.report import PeerGroup, PeerReport
from windowpane.plan.peers.setting import Setting, stored_bytes
from windowpane.plan.sizes import format_bytes

BLOCK_TOKENS = 32
SINK_TOKENS = 0
MAX_NUM_TOKENS = 8192
TYPICAL_TOKENS = 2048
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class Pool:
    """All layers of one window; `window` is None for full layers."""

    window: int | None
    layers: int
    block_bytes: int

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window-{self.window}"

    def request_blocks(self, length: int, chunk_tokens: int) -> int:
        kept = length if self.window is None else min(length, self.window + chunk_tokens)
        return ceil_div(kept + SINK_TOKENS, BLOCK_TOKENS)


def reports(setting: Setting) -> tuple[PeerReport, ...]:
    return tuple(report(setting, manager) for manager in ("V1", "V2"))


def report(setting: Setting, manager: str) -> PeerReport:
    chunk_tokens = setting.max_num_batched_tokens if setting.batched_tokens_given else MAX_NUM_TOKENS
    blank = PeerReport(
        engine="TensorRT-LLM",
        version="",
        covers=manager,
        async_scheduling=None,
        max_num_batched_tokens=chunk_tokens,
    )
    if setting.kv_dtype not in KV_DTYPES:
        return replace(blank, error=f"it has no KV cache dtype {setting.kv_dtype}")
    others = sorted({c.retention.kind for c in setting.caches} - {"full", "window"})
    if others:
        return replace(blank, unknown=f"how it divides memory with {' and '.join(others)} layers")

    pools = _pools(setting)
    length = setting.max_model_len
    shares = _shares(pools, manager, chunk_tokens)
    blocks = [int(setting.kv_cache_bytes * s) // p.block_bytes for p, s in zip(pools, shares, strict=True)]
    charges = [pool.request_blocks(length, chunk_tokens) for pool in pools]
    fits = {p.name: have / need for p, have, need in zip(pools, blocks, charges, strict=True)}
    scarce = min(fits, key=lambda name: fits[name])
    return replace(
        blank,
        groups=tuple(
            PeerGroup(p.name, p.layers, 0, BLOCK_TOKENS, n, n * p.block_bytes)
            for p, n in zip(pools, charges, strict=True)
        ),
        bytes_per_request=sum(n * p.block_bytes for n, p in zip(charges, pools, strict=True)),
        concurrency=fits[scarce],
        charge_note=_charge_note(setting, manager, dict(zip(fits, shares, strict=True)), scarce),
        report_note="It logs blocks per window and no tokens; concurrency is computed here, by the scarcest pool.",
    )


def _pools(setting: Setting) -> list[Pool]:
    bits = kv_format(setting.kv_dtype).element_bits
    by_window: dict[int | None, list[TokenCache]] = {}
    for cache in setting.caches:
        assert isinstance(cache, TokenCache) and isinstance(cache.retention, Full | Window)
        window = cache.retention.tokens if isinstance(cache.retention, Window) else None
        # A window as long as the longest sequence is no window.
        window = None if window is not None and window >= setting.max_model_len else window
        by_window.setdefault(window, []).append(cache)
    return [
        Pool(window, len(caches), BLOCK_TOKENS * sum(stored_bytes(c, bits) for c in caches))
        for window, caches in by_window.items()
    ]


def _shares(pools: list[Pool], manager: str, chunk_tokens: int) -> list[float]:
    if manager == "V1":
        return [1 / len(pools)] * len(pools)
    typical = [pool.request_blocks(TYPICAL_TOKENS, chunk_tokens) * pool.block_bytes for pool in pools]
    return [size / sum(typical) for size in typical]


def _charge_note(setting: Setting, manager: str, shares: dict[str, float], scarce: str) -> str:
    if len(shares) == 1:
        return "Every layer keeps every token, in one pool."
    rule = "an equal share" if manager == "V1" else f"at first the share that {TYPICAL_TOKENS:,} tokens would use"
    sizes = ", ".join(f"{name} {format_bytes(int(setting.kv_cache_bytes * share))}" for name, share in shares.items())
    return f"Gives each window a pool with {rule} ({sizes}); the {scarce} pool runs out first."
