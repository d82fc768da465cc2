"""SGLang: two static pools, one for full and one for sliding layers, split by a fixed ratio.

    cell         = full bytes per token × full layers + ratio × sliding bytes per token × sliding layers
    full tokens  = KV bytes // cell
    sliding ones = ratio × full tokens

`swa_full_tokens_ratio` is 0.8 and the page size 1 unless set. Layers that share KV are given memory all the same, and
Gemma 2 and 3 run with hybrid memory off: every layer keeps every token. Source: SGLang's `model_runner` memory pools.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.kv.formats import kv_format
from windowpane.kv.retention import Full, Window
from windowpane.plan.peers.report import PeerGroup, PeerReport
from windowpane.plan.peers.setting import Setting, stored_bytes
from windowpane.plan.sizes import format_bytes

SWA_FULL_TOKENS_RATIO = 0.8
WITHOUT_HYBRID_MEMORY = ("gemma2", "gemma3")
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")


def reports(setting: Setting) -> tuple[PeerReport, ...]:
    return (report(setting),)


def report(setting: Setting) -> PeerReport:
    """Full tokens are what its log calls max_total_num_tokens."""
    blank = PeerReport(
        engine="SGLang",
        version="",
        covers="",
        async_scheduling=None,
        max_num_batched_tokens=setting.max_num_batched_tokens,
    )
    if setting.kv_dtype not in KV_DTYPES:
        return replace(blank, error=f"it has no --kv-cache-dtype {setting.kv_dtype}")
    caches = [c for c in setting.caches if isinstance(c, TokenCache) and isinstance(c.retention, Full | Window)]
    if len(caches) < len(setting.caches):
        others = sorted({c.retention.kind for c in setting.caches} - {"full", "window"})
        return replace(blank, unknown=f"how it divides memory with {' and '.join(others)} layers")

    bits = kv_format(setting.kv_dtype).element_bits
    charged = [*caches, *setting.shared_caches]
    windows = {c.retention.tokens for c in caches if isinstance(c.retention, Window)}
    if setting.family in WITHOUT_HYBRID_MEMORY:
        windows = set()
    full_bytes = sum(stored_bytes(c, bits) for c in charged if not windows or isinstance(c.retention, Full))
    sliding_bytes = sum(stored_bytes(c, bits) for c in charged) - full_bytes
    if not full_bytes:
        return replace(blank, unknown="how it divides memory where every layer slides")
    full_tokens = int(setting.kv_cache_bytes // (full_bytes + SWA_FULL_TOKENS_RATIO * sliding_bytes))
    length = setting.max_model_len
    # A sequence needs its whole length of full tokens, and of sliding ones as many as it can see.
    fits = [full_tokens / length]
    if windows:
        fits.append(SWA_FULL_TOKENS_RATIO * full_tokens / min(length, max(windows)))
    concurrency = min(fits)
    return replace(
        blank,
        reported_tokens=full_tokens,
        concurrency=concurrency,
        groups=_groups(charged, bool(windows), length, full_bytes, sliding_bytes),
        bytes_per_request=int(setting.kv_cache_bytes / concurrency),
        charge_note=_charge_note(setting, full_tokens, full_bytes, sliding_bytes, bool(windows)),
        report_note="Logs max_total_num_tokens, the tokens of the full pool; concurrency is computed here from both.",
    )


def _groups(
    charged: list[TokenCache], hybrid: bool, length: int, full_bytes: int, sliding_bytes: int
) -> tuple[PeerGroup, ...]:
    """The two pools, with pages of one token; a sequence's share of the sliding pool is the ratio's, used or not."""
    sliding = sum(isinstance(c.retention, Window) for c in charged) if hybrid else 0
    pools = [PeerGroup("full", len(charged) - sliding, 0, 1, length, length * full_bytes)]
    if sliding:
        tokens = int(SWA_FULL_TOKENS_RATIO * length)
        pools.append(PeerGroup("sliding", sliding, 0, 1, tokens, tokens * sliding_bytes))
    return tuple(pools)


def _charge_note(setting: Setting, full_tokens: int, full_bytes: int, sliding_bytes: int, hybrid: bool) -> str:
    if not hybrid:
        off = setting.family in WITHOUT_HYBRID_MEMORY
        why = ": hybrid memory is off for this model, so every layer keeps every token" if off else ""
        return f"Keeps {full_bytes:,} B for every token{why}."
    pool = format_bytes(int(SWA_FULL_TOKENS_RATIO * full_tokens * sliding_bytes))
    shared = ", layers that share KV included" if setting.shared_caches else ""
    return (
        f"Gives sliding layers a pool of their own, {SWA_FULL_TOKENS_RATIO:g} × as many tokens as full ones "
        f"({pool}{shared}), however little of it a window needs."
    )
