"""llama.cpp: a base cache of n_ctx cells for full layers, and a smaller one for sliding layers.

    sliding cells = pad(min(n_ctx, window × sequences + n_ubatch), 256)

with one sequence per stream where the cache is not unified, as here. K and V are f16 and n_ubatch is 512 unless set;
`--swa-full` makes the sliding cache as long as the base one. Layers that share KV own nothing. Source: llama.cpp's
`llama-kv-cache-iswa.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Full, Window, ceil_div
from windowpane.plan.peers.report import PeerGroup, PeerReport
from windowpane.plan.peers.setting import Setting, stored_bytes
from windowpane.plan.sizes import format_bytes

N_UBATCH = 512
PAD_CELLS = 256
F16_BITS = 16
F16_NAMES = ("auto", "float16", "bfloat16")


def reports(setting: Setting) -> tuple[PeerReport, ...]:
    return (report(setting),)


def swa_cells(n_ctx: int, window: int, sequences: int = 1, n_ubatch: int = N_UBATCH) -> int:
    """Cells of the sliding cache; `sequences` is n_seq_max where one cache serves them all, else 1."""
    return ceil_div(min(n_ctx, window * sequences + n_ubatch), PAD_CELLS) * PAD_CELLS


def report(setting: Setting) -> PeerReport:
    blank = PeerReport(
        engine="llama.cpp",
        version="",
        covers="",
        async_scheduling=None,
        max_num_batched_tokens=N_UBATCH,
    )
    if setting.kv_cache_dtype not in F16_NAMES:
        return replace(
            blank, unknown=f"its own quantized caches (-ctk q8_0 and others) are not {setting.kv_cache_dtype}"
        )
    others = sorted({c.retention.kind for c in setting.caches} - {"full", "window"})
    if others:
        return replace(blank, unknown=f"how it sizes {' and '.join(others)} layers")
    caches = [c for c in setting.caches if isinstance(c, TokenCache)]
    if any(not c.value_dim for c in caches):
        return replace(blank, unknown="how it stores latents and index keys")

    length = setting.max_model_len
    cells: dict[str, int] = {}
    sizes: dict[str, list[int]] = {}
    for cache in caches:
        keeps = cache.retention
        assert isinstance(keeps, Full | Window)
        cells[keeps.name] = swa_cells(length, keeps.tokens) if isinstance(keeps, Window) else length
        sizes.setdefault(keeps.name, []).append(stored_bytes(cache, F16_BITS))
    groups = tuple(
        PeerGroup(name, len(layers), 0, 1, cells[name], cells[name] * sum(layers)) for name, layers in sizes.items()
    )
    need_bytes = sum(g.bytes_per_request for g in groups)
    both = " K and V are both stored where one vector would do." if any(c.latent for c in caches) else ""
    return replace(
        blank,
        groups=groups,
        bytes_per_request=need_bytes,
        concurrency=setting.kv_cache_bytes / need_bytes,
        charge_note=_charge_note(groups, need_bytes, length) + both,
        report_note="It logs the size of its buffers and no tokens; concurrency is computed here.",
    )


def _charge_note(groups: tuple[PeerGroup, ...], need_bytes: int, length: int) -> str:
    shares = ", ".join(f"{g.name} {format_bytes(g.bytes_per_request)}" for g in groups)
    sliding = any(g.name.startswith("window") for g in groups)
    why = f": a sliding layer keeps its window and {N_UBATCH} tokens, rounded up to {PAD_CELLS}" if sliding else ""
    return f"Allocates {format_bytes(need_bytes)} per sequence of {length:,} tokens, in f16 ({shares}){why}."
