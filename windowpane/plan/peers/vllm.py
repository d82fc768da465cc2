"""vLLM: what it reserves for a request and what its log reports, release by release.

The steps, in vLLM's own order, each a function of its own:

    layer_pages     each layer's page: KV heads × block tokens × bytes per token, or one recurrent state
    unify_pages     every page as large as the largest one, by longer blocks or by padding
    group_layers    layers of one kind dealt into groups of equal size
    block_bytes     one block of the shared pool: a page of every layer of a group
    request_blocks  blocks that one request of full length is charged, per group
    report          concurrency and the "GPU KV cache size" line

Sources: vLLM's `v1/core/kv_cache_utils.py` and `v1/kv_cache_interface.py`, its issues 43308 (0.20.0's report against
later ones), 49878 (0.26 charges more for windows) and 40388 (pages that do not divide), its pull request 45181 (padding
them), and runs of 0.26.0 on an H200. Blocks start at 16 tokens, vLLM's default on CUDA; attention backends that insist
on larger ones (some MLA kernels) round a little differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from windowpane.kv.caches import Cache, StateCache, TokenCache
from windowpane.kv.formats import kv_format
from windowpane.kv.retention import Chunk, Cross, Full, Retention, State, Window, ceil_div
from windowpane.plan.peers.report import PeerGroup, PeerReport
from windowpane.plan.peers.setting import MAMBA_CACHE_MODES, Setting, stored_bytes
from windowpane.plan.peers.vllm_releases import RELEASES, Release
from windowpane.plan.sizes import format_bytes

BASE_BLOCK_TOKENS = 16
SCALE_BYTES = 4  # one float32 per token, head and side in the *_per_token_head formats
INDEX_SCALE_DIMS = 128
FP8_DS_MLA_BYTES = 656  # 512 fp8 values, their scales, and 64 rotated dimensions in bfloat16
MLA_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One cache and the page it takes in the pool; `page_bytes` includes padding."""

    cache: Cache
    block_tokens: int
    page_bytes: int

    @property
    def retention(self) -> Retention:
        return self.cache.retention

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that vLLM puts into one bucket: same retention, shape and block."""
        if isinstance(self.cache, StateCache):
            return (self.cache.parts, self.block_tokens, self.page_bytes)
        c = self.cache
        return (c.retention, c.kv_heads, c.key_dim, c.value_dim, self.block_tokens, self.page_bytes)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers behind one block table. `places` is the group size; places without a layer are padding."""

    name: str
    pages: tuple[LayerPage, ...]
    places: int

    @property
    def retention(self) -> Retention:
        return self.pages[0].retention

    @property
    def block_tokens(self) -> int:
        return self.pages[0].block_tokens


class Refusal(Exception):
    """vLLM would stop at start-up; the message is the reason."""


def reports(setting: Setting) -> tuple[PeerReport, ...]:
    """Every release that differs, and the newest both without and with async scheduling (its default).

    Where there are states, the newest is also shown with the other ways it can keep them.
    """
    shown = [
        report(setting, release, async_scheduling)
        for release in RELEASES
        for async_scheduling in ((False, True) if release.charges_batches_in_flight else (False,))
    ]
    if any(isinstance(c, StateCache) for c in setting.caches):
        for mode in MAMBA_CACHE_MODES:
            if mode != setting.mamba_cache_mode:
                other = report(replace(setting, mamba_cache_mode=mode), RELEASES[-1], setting.async_scheduling)
                shown.append(replace(other, variant=f"states {mode}", same_flags=False, alternative=True))
    return tuple(shown)


def report(setting: Setting, release: Release, async_scheduling: bool) -> PeerReport:
    """What `release` would reserve and report. Refusals to start become `error`, never an exception."""
    in_flight_matters = release.charges_batches_in_flight
    blank = PeerReport(
        engine="vLLM",
        version=release.version,
        covers=release.covers,
        variant=("async" if async_scheduling else "sync") if in_flight_matters else "",
        async_scheduling=async_scheduling if in_flight_matters else None,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        same_flags=in_flight_matters and async_scheduling is setting.async_scheduling,
    )
    try:
        groups = form_groups(setting, release)
    except Refusal as refusal:
        return replace(blank, error=str(refusal))

    in_flight = in_flight_tokens(setting, release, async_scheduling)
    pool_block_bytes = block_bytes(groups)
    num_blocks = setting.kv_cache_bytes // pool_block_bytes
    charges = [request_blocks(g, setting, in_flight, release) for g in groups]
    sized = replace(
        blank,
        groups=tuple(_peer_group(g, n, pool_block_bytes) for g, n in zip(groups, charges, strict=True)),
        num_blocks=num_blocks,
        block_bytes=pool_block_bytes,
        bytes_per_request=sum(charges) * pool_block_bytes,
    )
    if sum(charges) > num_blocks:
        return replace(sized, error=_too_small(setting, groups, num_blocks, in_flight))
    concurrency = num_blocks / sum(charges)
    return replace(
        sized,
        concurrency=concurrency,
        reported_tokens=reported_tokens(setting, release, groups, sum(charges), num_blocks),
        charge_note=_charge_note(setting, groups, charges, in_flight),
        report_note=_report_note(release, groups),
    )


def form_groups(setting: Setting, release: Release) -> tuple[Group, ...]:
    """The groups that `release` would form; Refusal where it would not start."""
    check_kv_dtype(setting, release)
    return group_layers(unify_pages(layer_pages(setting), release), release.group_factor)


def check_kv_dtype(setting: Setting, release: Release) -> None:
    """Raise Refusal for a KV dtype that this release does not know or does not run here."""
    name = setting.kv_dtype
    if "=" in name:
        raise Refusal("it has one --kv-cache-dtype for the whole model and cannot store groups in different formats")
    if name not in release.kv_dtypes | {setting.compute_dtype}:
        raise Refusal(f"it has no --kv-cache-dtype {name}; it knows auto, {', '.join(sorted(release.kv_dtypes))}")
    if name == "fp8_e5m2" and setting.quantized_checkpoint:
        raise Refusal("fp8_e5m2 is not supported with fp8 checkpoints, which to vLLM is any quantized one")
    if name.endswith("_per_token_head") and any(isinstance(c, TokenCache) and not c.value_dim for c in setting.caches):
        raise Refusal(f"{name} exists only in its Triton attention, which has no MLA")
    if name == "fp8_per_token_head" and setting.capability is not None and setting.capability < (8, 9):
        major, minor = setting.capability
        raise Refusal(f"{name} needs Triton's E4M3, that is SM 8.9 or newer, and this card is SM {major}.{minor}")


def bytes_per_token(cache: TokenCache, kv_dtype: str) -> int:
    """Of one layer, scales included."""
    scale_bytes = SCALE_BYTES if kv_dtype.endswith("_per_token_head") else 0
    return stored_bytes(cache, kv_format(kv_dtype).element_bits, scale_bytes)


def layer_token_bytes(setting: Setting) -> dict[TokenCache, int]:
    """Bytes per token of every token cache. DeepSeek V3.2's indexers have a format of their own."""
    caches = [c for c in setting.caches if isinstance(c, TokenCache)]
    sizes = {c: bytes_per_token(c, setting.kv_dtype) for c in caches}
    if setting.family != "deepseek":
        return sizes
    widest = {layer: max(c.key_dim for c in caches if c.layer == layer) for layer in {c.layer for c in caches}}
    indexes = [c for c in caches if c.key_dim < widest[c.layer]]
    # `DeepseekV32IndexerCache`: uint8, and a float32 scale for every 128 of them.
    sizes |= {c: c.key_dim + SCALE_BYTES * ceil_div(c.key_dim, INDEX_SCALE_DIMS) for c in indexes}
    if indexes and kv_format(setting.kv_dtype).family == "fp8":
        sizes |= {c: FP8_DS_MLA_BYTES for c in caches if c not in indexes}
    return sizes


def attention_block_tokens(setting: Setting) -> int:
    """16, or as many times 16 as make an attention page at least as large as the largest recurrent state."""
    state_bytes = [c.bytes(setting.compute_dtype) for c in setting.caches if isinstance(c, StateCache)]
    token_bytes = layer_token_bytes(setting)
    if not state_bytes or not token_bytes:
        return setting.base_block_tokens
    # Blocks of latents beside states are multiples of 64, whatever the kernels could do.
    step = max(setting.base_block_tokens, MLA_STEP_TOKENS if any(not c.value_dim for c in token_bytes) else 1)
    return step * ceil_div(max(state_bytes), step * max(token_bytes.values()))


def layer_pages(setting: Setting) -> tuple[LayerPage, ...]:
    """Every cache with its own page, before pages are made equal."""
    block_tokens, token_bytes = attention_block_tokens(setting), layer_token_bytes(setting)
    # Without prefix caching a state belongs to the whole sequence: its "block" is max_model_len tokens long.
    state_tokens = setting.max_model_len if setting.mamba_cache_mode == "none" else block_tokens
    return tuple(
        LayerPage(c, state_tokens, c.bytes(setting.compute_dtype))
        if isinstance(c, StateCache)
        else LayerPage(c, block_tokens, block_tokens * token_bytes[c])
        for c in setting.caches
    )


def unify_pages(pages: Sequence[LayerPage], release: Release) -> tuple[LayerPage, ...]:
    """Make every page as large as the largest; Refusal where that needs padding that `release` does not have.

    Layers that all have one retention keep their own pages: they share a block table, so nothing needs to be equal.
    """
    if len({p.retention for p in pages}) == 1:
        return tuple(pages)
    target_bytes = max(p.page_bytes for p in pages)
    return tuple(_grow_page(p, target_bytes, release) for p in pages)


def _grow_page(page: LayerPage, target_bytes: int, release: Release) -> LayerPage:
    if isinstance(page.cache, StateCache):
        return replace(page, page_bytes=target_bytes)
    ratio, remainder = divmod(target_bytes, page.page_bytes)
    if remainder == 0:
        return replace(page, block_tokens=page.block_tokens * ratio, page_bytes=target_bytes)
    if not release.pads_odd_pages:
        raise Refusal(
            "NotImplementedError: The page size of the layer is not divisible by the maximum page size "
            f"({page.retention.name} layers have {page.page_bytes:,} bytes, the largest page is {target_bytes:,})"
        )
    return replace(page, page_bytes=target_bytes)


def group_layers(pages: Sequence[LayerPage], factor: float = 1.5) -> tuple[Group, ...]:
    """Deal each kind of layer into groups of equal size: the smallest kind's, or the largest's if that is close."""
    if len({p.retention for p in pages}) == 1:
        return (Group(pages[0].retention.name, tuple(pages), len(pages)),)
    buckets: dict[tuple[object, ...], list[LayerPage]] = {}
    for page in pages:
        buckets.setdefault(page.kind, []).append(page)
    fewest, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    places = most if most < factor * fewest else fewest
    return tuple(group for bucket in buckets.values() for group in _deal(bucket, places))


def _deal(bucket: list[LayerPage], places: int) -> list[Group]:
    """Round robin, as vLLM does it, so that pipeline stages get equal shares of every group."""
    count = ceil_div(len(bucket), places)
    name = bucket[0].retention.name
    return [
        Group(name if count == 1 else f"{name} {i + 1}/{count}", tuple(bucket[i::count]), places) for i in range(count)
    ]


def block_bytes(groups: Sequence[Group]) -> int:
    """Bytes of one block of the pool that all groups draw from."""
    if len(groups) == 1:
        return sum(p.page_bytes for p in groups[0].pages)
    return groups[0].places * groups[0].pages[0].page_bytes


def in_flight_tokens(setting: Setting, release: Release, async_scheduling: bool) -> int:
    """Tokens computed but not yet settled. A window must keep what they see, and every request is charged for all."""
    batches = 2 if release.charges_batches_in_flight and async_scheduling else 1
    return batches * setting.max_num_batched_tokens


def request_blocks(group: Group, setting: Setting, in_flight: int, release: Release = RELEASES[-1]) -> int:
    """Blocks that one request of `max_model_len` tokens is charged in this group."""
    length, block_tokens = setting.max_model_len, group.block_tokens
    match group.retention:
        case Full():
            return ceil_div(length, block_tokens)
        case Window(tokens=window):
            # One block more, because the window may start inside a block.
            return ceil_div(min(window - 1 + in_flight, length), block_tokens) + 1
        case Chunk(tokens=chunk):
            return ceil_div(min(chunk + in_flight, length), block_tokens)
        case Cross(tokens=encoder_tokens):
            return ceil_div(encoder_tokens, block_tokens)
        case State():
            drafts = setting.draft_tokens if release.charges_drafts else 0
            return {"none": 1, "align": 2, "all": ceil_div(length, block_tokens)}[setting.mamba_cache_mode] + drafts


def admission_blocks(prompt_tokens: int, window_tokens: int, block_tokens: int, chunk_tokens: int | None = None) -> int:
    """Blocks that a prompt must find free in one sliding group before it is admitted.

    Releases that do not cap the budget (`chunk_tokens` None) ask for the whole prompt, although the window forgets most
    of it.
    """
    needed = prompt_tokens if chunk_tokens is None else min(prompt_tokens, window_tokens + chunk_tokens)
    return ceil_div(needed, block_tokens)


def longest_model_len(setting: Setting, groups: Sequence[Group], num_blocks: int, in_flight: int) -> int:
    """The largest max_model_len, up to the one asked for, of which one request fits; 0 if none does."""
    low, high = 0, setting.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        shorter = replace(setting, max_model_len=middle)
        if sum(request_blocks(g, shorter, in_flight) for g in groups) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def reported_tokens(
    setting: Setting, release: Release, groups: Sequence[Group], charged_blocks: int, num_blocks: int
) -> int:
    """The "GPU KV cache size" line; `charged_blocks` are those of one request."""
    if release.reports_concurrency:
        return int(num_blocks / charged_blocks * setting.max_model_len)
    return num_blocks // len(groups) * min(g.block_tokens for g in groups)


def _peer_group(group: Group, blocks: int, pool_block_bytes: int) -> PeerGroup:
    layers = len(group.pages)
    return PeerGroup(group.name, layers, group.places - layers, group.block_tokens, blocks, blocks * pool_block_bytes)


def _too_small(setting: Setting, groups: Sequence[Group], num_blocks: int, in_flight: int) -> str:
    needed = sum(request_blocks(g, setting, in_flight) for g in groups) * block_bytes(groups)
    longest = longest_model_len(setting, groups, num_blocks, in_flight)
    way_out = (
        f"the longest max_model_len that fits is {longest:,}" if longest else "no max_model_len fits with these flags"
    )
    return (
        f"KV cache too small: one request of {setting.max_model_len:,} tokens needs {format_bytes(needed)} "
        f"and {format_bytes(setting.kv_cache_bytes)} is available; {way_out}"
    )


def _charge_note(setting: Setting, groups: Sequence[Group], charges: Sequence[int], in_flight: int) -> str:
    """Bytes per request, by retention, and why they exceed what the layers can see."""
    pool_block_bytes = block_bytes(groups)
    by_retention: dict[str, int] = {}
    for group, blocks in zip(groups, charges, strict=True):
        name = group.retention.name
        by_retention[name] = by_retention.get(name, 0) + blocks * pool_block_bytes
    shares = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_retention.items())
    total = format_bytes(sum(by_retention.values()))
    reasons = ", ".join(_reasons(setting, groups, in_flight))
    sentence = f"Reserves {total} per rank for one request of {setting.max_model_len:,} tokens ({shares})"
    return f"{sentence}: {reasons}." if reasons else f"{sentence}."


def _reasons(setting: Setting, groups: Sequence[Group], in_flight: int) -> list[str]:
    reasons = []
    pages = [p for g in groups for p in g.pages]
    local = {p.retention for p in pages if isinstance(p.retention, Window | Chunk)}
    kinds = sorted({r.kind for r in local if r.tokens < setting.max_model_len})
    if kinds:
        batches = in_flight // setting.max_num_batched_tokens
        times = f"{batches} × " if batches > 1 else ""
        reasons.append(
            f"every {' and '.join(kinds)} is charged {times}{setting.max_num_batched_tokens:,} tokens in flight"
        )
    if any(isinstance(c, TokenCache) and c.latent and c.value_dim for c in setting.caches):
        reasons.append("K and V are both stored where one vector would do")
    token_bytes = layer_token_bytes(setting)
    if any(isinstance(p.cache, TokenCache) and p.page_bytes > p.block_tokens * token_bytes[p.cache] for p in pages):
        reasons.append("pages are padded to a common size (releases before 0.24 refuse to start)")
    has_states = any(isinstance(c, StateCache) for c in setting.caches)
    if has_states and (block_tokens := attention_block_tokens(setting)) > BASE_BLOCK_TOKENS:
        reasons.append(f"blocks grow to {block_tokens:,} tokens so that a page holds one recurrent state")
    if any(g.places > len(g.pages) for g in groups):
        reasons.append("groups are filled up with empty layers")
    return reasons


def _report_note(release: Release, groups: Sequence[Group]) -> str:
    """What the number in the log means."""
    exact = all(isinstance(g.retention, Full) for g in groups)
    if release.reports_concurrency:
        meaning = "which is what fits" if exact else "which holds at that length only"
        return f"Reports concurrency × max_model_len, {meaning}."
    smallest = min(g.block_tokens for g in groups)
    if len(groups) > 1:
        each = f"each of {len(groups)} groups"
        return f"Reports blocks // {len(groups)} × {smallest} tokens, as if {each} kept every token."
    meaning = "which is what fits" if exact else "as if every token were kept"
    return f"Reports blocks × {smallest} tokens, {meaning}."
