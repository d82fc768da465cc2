"""Layers → groups → pages → slabs.

A *group* is all caches with the same retention. Its *page* is `block_tokens` consecutive tokens of all of them,
contiguous in memory:

    page of a group with 3 layers, block_tokens = 16
    ┌ slice of layer 0 ─────────────────────────┬ slice of layer 1 ┬ slice of layer 2 ┐
    │ K: head 0 [16 × row] head 1 …│ V: …│ scales │                  │                  │
    └──────────────────────────────┴─────┴────────┴──────────────────┴──────────────────┘

Pages of different groups have different sizes and need no common divisor: a *slab* holds pages of one group at a time,
and page tables store offsets. Groups whose page would be very large are cut into equal *stripes* of layers, each with
its own pages; a State page holds one layer.

`plan_layout` chooses block size, stripes and slab size; `Layout.explain()` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from windowpane.kv.caches import Kept, RouteCache, StateCache, TokenCache
from windowpane.kv.formats import ROW_ALIGN_BYTES, KVFormat, kv_format
from windowpane.kv.retention import Retention, Routes, State, ceil_div

OFFSET_UNIT_BYTES = 256  # page tables hold int32 offsets in this unit: 512 GiB of reach
MAX_PAGE_BYTES = 16 * 2**20  # beyond this a page is cut into stripes: one copy should stay a short copy
MAX_SLAB_BYTES = 32 * 2**20
# The largest share of a slab that pages may leave over. States may leave more: a sequence has as many at any length,
# while what growing groups leave over grows with them.
MAX_REMAINDER = 0.01
MAX_STATE_REMAINDER = 0.02
TILE_TOKENS = 64  # what a kernel works on at a time (docs/gpu-layout.md)
BLOCK_CHOICES = (16, 32, 64)  # so that whole blocks make a tile

# What a layout is judged on: stranded bytes of one sequence of this length.
TYPICAL_TOKENS = 8192
# A whole block moves with one copy, so cutting blocks into stripes must save this share of a typical sequence. Further
# stripes are only more table entries and copies.
FIRST_CUT_WORTH = 0.005
FURTHER_CUT_WORTH = 0.001


class LayoutError(ValueError):
    """No layout exists for what was asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer's part of a page. All offsets are bytes from the start of the page.

    `data_offsets` and `row_bytes` have one entry per stored vector (K and V, or one latent); rows are ordered head,
    token. `scale_offsets` likewise, empty for formats without per-row scales. State slices have one entry per state
    part, and their cache names the dtype of each. A slice of routed experts has one row per token.
    """

    cache: Kept
    stripe: int
    data_offsets: tuple[int, ...]
    row_bytes: tuple[int, ...]
    scale_offsets: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """All caches with one retention. `block_tokens` is None for State, and `kv_format` for all that is no KV."""

    name: str
    retention: Retention
    kv_format: KVFormat | None
    block_tokens: int | None
    stripes: int
    page_bytes: int
    slices: tuple[Slice, ...]

    @property
    def layers(self) -> int:
        return sum(len(s.cache.layers) if isinstance(s.cache, RouteCache) else 1 for s in self.slices)

    @property
    def stored_as(self) -> str | None:
        """The KV format or the dtype of ids; None for State, whose parts have a dtype each."""
        if self.kv_format is not None:
            return self.kv_format.name
        return next((s.cache.dtype for s in self.slices if isinstance(s.cache, RouteCache)), None)

    @property
    def page_units(self) -> int:
        return self.page_bytes // OFFSET_UNIT_BYTES

    @property
    def align_bytes(self) -> int:
        return _align_bytes(self.slices)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more held token costs, averaged over a page. 0 for State, which does not grow."""
        return self.stripes * self.page_bytes / self.block_tokens if self.block_tokens else 0.0

    @property
    def grows(self) -> bool:
        return self.retention.kind == "full"

    def max_pages(self, length: int, rollback_tokens: int = 0) -> int:
        """The most pages (stripes counted) that one sequence owns on its way to `length` tokens."""
        if isinstance(self.retention, State):
            return self.retention.slots * self.stripes
        assert self.block_tokens is not None
        return self.stripes * self.retention.max_pages(length, self.block_tokens, rollback_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups in a fixed order (their index is their id everywhere) and the slab they share."""

    groups: tuple[Group, ...]
    slab_bytes: int
    candidates_considered: int = 0

    @property
    def slab_units(self) -> int:
        return self.slab_bytes // OFFSET_UNIT_BYTES

    def pages_per_slab(self, group: Group) -> int:
        return self.slab_bytes // group.page_bytes

    def remainder_bytes(self, group: Group) -> int:
        """Bytes at the end of a slab that no page of this group can use."""
        return self.slab_bytes % group.page_bytes

    def restore_point_bytes(self, length: int) -> int:
        """What a restore point at `length` tokens keeps beside full pages, which it shares: tails and one state."""
        kept = 0
        for g in self.groups:
            if isinstance(g.retention, State):
                kept += g.stripes * g.page_bytes
            elif not g.grows:
                kept += g.max_pages(length) * g.page_bytes
        return kept

    def group(self, name: str) -> Group:
        for g in self.groups:
            if g.name == name:
                return g
        raise KeyError(name)

    def explain(self) -> list[str]:
        """One line per group and one for the slab, for people who ask why."""
        lines = []
        for g in self.groups:
            per_slab = self.pages_per_slab(g)
            unit = f"{g.block_tokens} tokens" if g.block_tokens else "one state"
            share = f"{g.layers} layers" if g.stripes == 1 else f"{g.layers // g.stripes} of {g.layers} layers"
            lines.append(
                f"{g.name}: a page is {unit} of {share} = {g.page_bytes:,} B; {per_slab} to a slab, "
                f"{self.remainder_bytes(g) / self.slab_bytes:.2%} of a slab left over"
            )
        lines.append(
            f"slab {self.slab_bytes:,} B: of {self.candidates_considered:,} sizes the one that strands least per "
            f"{TYPICAL_TOKENS:,}-token sequence (about {stranded_bytes_per_sequence(self):,.0f} B)"
            if self.candidates_considered
            else f"slab {self.slab_bytes:,} B: as asked"
        )
        return lines


def group_caches(caches: Iterable[Kept]) -> dict[Retention, list[Kept]]:
    """Caches by retention, in order of first appearance."""
    groups: dict[Retention, list[Kept]] = {}
    for cache in caches:
        groups.setdefault(cache.retention, []).append(cache)
    return groups


def resolve_formats(choice: str, retentions: Iterable[Retention], compute_dtype: str) -> dict[str, KVFormat]:
    """Turn `auto`, one format name, or `full=…,window=…` into a format per group of K and V.

    A selector is a group name (`window-1024`) or a retention kind (`window`, all of them); the exact name wins. Groups
    that no selector names keep the compute dtype.
    """
    token_retentions = [r for r in retentions if not isinstance(r, State | Routes)]
    if "=" not in choice:
        chosen = kv_format(compute_dtype if choice == "auto" else choice)
        return {r.name: chosen for r in token_retentions}
    selected: dict[str, KVFormat] = {}
    known = {r.name for r in token_retentions} | {r.kind for r in token_retentions}
    for item in choice.split(","):
        selector, _, name = (part.strip() for part in item.partition("="))
        if selector not in known:
            raise ValueError(
                f"KV dtype {item.strip()!r}: this model has no group {selector!r}; "
                f"its groups: {', '.join(sorted(known))}"
            )
        if selector in selected:
            raise ValueError(f"KV dtype for {selector!r} is given twice in {choice!r}")
        selected[selector] = kv_format(compute_dtype if name == "auto" else name)
    default = kv_format(compute_dtype)
    return {r.name: selected.get(r.name, selected.get(r.kind, default)) for r in token_retentions}


def rollback_for(draft_tokens: int, layout: Layout) -> int:
    """Tokens that a sequence may have to take back: its drafts, and where it has states the token before them too.

    Without states, a step may be prepared before it is known how many drafts of the one before are accepted: it then
    has room for all of them, and neither step sees a token whose page that room takes.
    """
    if not draft_tokens:
        return 0
    has_states = any(isinstance(g.retention, State) for g in layout.groups)
    return draft_tokens + 1 if has_states else 2 * draft_tokens + 1


def plan_layout(
    caches: Sequence[Kept],
    formats: Mapping[str, KVFormat],
    compute_dtype: str = "bfloat16",
    *,
    block_tokens: int | None = None,
    slab_bytes: int | None = None,
) -> Layout:
    """Lay out one rank's caches (already sharded). `formats` maps token group names to formats (see `resolve_formats`).

    `block_tokens` and `slab_bytes` override the search; a slab too small for a page is an error.
    """
    if not caches:
        raise LayoutError("the model owns no KV cache and no state: there is nothing to lay out")
    if block_tokens is not None and block_tokens < 1:
        raise LayoutError(f"block_tokens must be at least 1, not {block_tokens}")
    drafts = [
        _UncutGroup(retention, tuple(members), formats.get(retention.name), compute_dtype)
        for retention, members in group_caches(caches).items()
    ]
    options = [draft.cuts(block_tokens) for draft in drafts]
    considered = 0
    if slab_bytes is None:
        slab_bytes, picks, considered = _search(options)
    else:
        picks = _fit_given(slab_bytes, options)
    groups = tuple(draft.group(cut) for draft, cut in zip(drafts, picks, strict=True))
    return Layout(groups, slab_bytes, considered)


def stranded_bytes_per_sequence(layout: Layout) -> float:
    """Expected waste of one typical sequence: half-open slabs, slab remainders and the empty end of its last pages."""
    cuts = (_PageCut(g.retention, g.block_tokens, g.stripes, g.page_bytes, g.align_bytes) for g in layout.groups)
    return sum(cut.waste(layout.slab_bytes) for cut in cuts)


@dataclass(frozen=True, slots=True)
class _PageCut:
    """One way to cut a group into pages, and what it would waste."""

    retention: Retention
    block_tokens: int | None
    stripes: int
    page_bytes: int
    align_bytes: int

    @property
    def typical_bytes(self) -> int:
        if isinstance(self.retention, State):
            pages = self.retention.slots
        else:
            assert self.block_tokens is not None
            pages = self.retention.max_pages(TYPICAL_TOKENS, self.block_tokens)
        return pages * self.stripes * self.page_bytes

    @property
    def max_remainder(self) -> float:
        return MAX_STATE_REMAINDER if isinstance(self.retention, State) else MAX_REMAINDER

    def waste(self, slab_bytes: int) -> float:
        """Expected bytes one typical sequence strands in this group."""
        per_slab, remainder_bytes = divmod(slab_bytes, self.page_bytes)
        half_open = (per_slab - 1) / 2 * self.page_bytes
        remainder = remainder_bytes / slab_bytes * self.typical_bytes
        empty_end = 0 if self.block_tokens is None else self.stripes * self.page_bytes / 2
        return half_open + remainder + empty_end


@dataclass(frozen=True, slots=True)
class _UncutGroup:
    """A group before its pages are cut."""

    retention: Retention
    caches: tuple[Kept, ...]
    kv_format: KVFormat | None
    compute_dtype: str

    def cuts(self, block_tokens: int | None) -> list[_PageCut]:
        """All sensible cuts, fewest stripes and smallest blocks first."""
        layers = len(self.caches)
        if isinstance(self.retention, State):
            # One layer per page: a snapshot of one layer is already megabytes.
            return [self._cut(None, layers, self._slices_from_zero(None))]
        found: list[_PageCut] = []
        blocks = (block_tokens,) if block_tokens else BLOCK_CHOICES
        slices = {block: self._slices_from_zero(block) for block in blocks}
        for stripes in (d for d in range(1, layers + 1) if layers % d == 0):
            for block in blocks:
                cut = self._cut(block, stripes, slices[block])
                # Layers of different widths do not always fall into equal stripes; unequal ones would pad.
                whole = self._cut(block, 1, slices[block])
                equal = stripes * cut.page_bytes <= (1 + MAX_REMAINDER) * whole.page_bytes
                if cut.page_bytes <= MAX_PAGE_BYTES and equal:
                    found.append(cut)
        return found or [self._cut(blocks[0], layers, slices[blocks[0]])]

    def group(self, cut: _PageCut) -> Group:
        slices = self._slices(cut.block_tokens, cut.stripes)
        return Group(
            self.retention.name, self.retention, self.kv_format, cut.block_tokens, cut.stripes, cut.page_bytes, slices
        )

    def _cut(self, block_tokens: int | None, stripes: int, slices: Sequence[Slice]) -> _PageCut:
        """`slices` all start at 0: only their sizes count."""
        per_stripe = len(slices) // stripes
        end = max(sum(s.end for s in slices[at : at + per_stripe]) for at in range(0, len(slices), per_stripe))
        align_bytes = _align_bytes(slices)
        return _PageCut(self.retention, block_tokens, stripes, _round_up(end, align_bytes), align_bytes)

    def _slices_from_zero(self, block_tokens: int | None) -> list[Slice]:
        return [self._slice(cache, 0, 0, block_tokens) for cache in self.caches]

    def _slices(self, block_tokens: int | None, stripes: int) -> tuple[Slice, ...]:
        """Lay the caches of each stripe one after another."""
        per_stripe = len(self.caches) // stripes
        slices: list[Slice] = []
        for index, cache in enumerate(self.caches):
            start = slices[-1].end if index % per_stripe else 0
            slices.append(self._slice(cache, index // per_stripe, start, block_tokens))
        return tuple(slices)

    def _slice(self, cache: Kept, stripe: int, start: int, block_tokens: int | None) -> Slice:
        if isinstance(cache, StateCache):
            return _state_slice(cache, stripe, start, self.compute_dtype)
        assert block_tokens is not None
        if isinstance(cache, RouteCache):
            end = _round_up(start + block_tokens * cache.row_bytes, ROW_ALIGN_BYTES)
            return Slice(cache, stripe, (start,), (cache.row_bytes,), (), end)
        assert self.kv_format is not None
        return _token_slice(cache, stripe, start, self.kv_format, block_tokens)


def _token_slice(cache: TokenCache, stripe: int, start: int, fmt: KVFormat, block_tokens: int) -> Slice:
    rows = cache.kv_heads * block_tokens
    row_bytes = tuple(fmt.row_bytes(dim) for dim in cache.row_dims)
    data_offsets, scale_offsets = [], []
    at = start
    for width in row_bytes:
        data_offsets.append(at)
        at += rows * width
    if fmt.scale_bytes:
        for _ in row_bytes:
            scale_offsets.append(at)
            at += rows * fmt.scale_bytes
    return Slice(cache, stripe, tuple(data_offsets), row_bytes, tuple(scale_offsets), _round_up(at, ROW_ALIGN_BYTES))


def _state_slice(cache: StateCache, stripe: int, start: int, compute_dtype: str) -> Slice:
    data_offsets, part_bytes = [], []
    at = start
    for part in cache.parts:
        data_offsets.append(at)
        part_bytes.append(part.bytes(compute_dtype))
        at = _round_up(at + part_bytes[-1], ROW_ALIGN_BYTES)
    return Slice(cache.in_dtype(compute_dtype), stripe, tuple(data_offsets), tuple(part_bytes), (), at)


def _search(options: Sequence[Sequence[_PageCut]]) -> tuple[int, list[_PageCut], int]:
    """The slab size, and a cut per group, with the least expected waste.

    Candidates are multiples of every possible page. Where no size keeps all remainders small enough, they only count as
    waste.
    """
    smallest = max(min(cut.page_bytes for cut in cuts) for cuts in options)
    largest = max(MAX_SLAB_BYTES, 2 * smallest)
    sizes = set()
    align_bytes = _slab_align_bytes(options)
    for page in {cut.page_bytes for cuts in options for cut in cuts}:
        fewest = ceil_div(smallest, page)
        counts = range(fewest, min(largest // page, fewest + 64) + 1)
        sizes |= {_round_up(n * page, align_bytes) for n in counts}
    for limited in (True, False):
        fits = [fit for size in sorted(sizes) if (fit := _fit(size, options, limited=limited))]
        if fits:
            best = min(fits, key=lambda fit: fit.cost)
            return best.slab_bytes, best.cuts, len(sizes)
    raise AssertionError("a slab of the largest page always holds one page of every group")


@dataclass(frozen=True, slots=True)
class _Fit:
    slab_bytes: int
    cost: float
    cuts: list[_PageCut]


def _fit(slab_bytes: int, options: Sequence[Sequence[_PageCut]], *, limited: bool) -> _Fit | None:
    """The best cut per group for one slab size; None where a group has no cut that fits.

    `limited`: remainders are at most what a group may leave over.
    """
    sequence_bytes = sum(cuts[0].typical_bytes for cuts in options)
    total, picks = 0.0, []
    for cuts in options:
        best, best_cost = None, math.inf
        for cut in cuts:
            if cut.page_bytes > slab_bytes:
                continue
            if limited and slab_bytes % cut.page_bytes > cut.max_remainder * slab_bytes:
                continue
            cost = cut.waste(slab_bytes) + _cutting_worth(cut.stripes, cuts[0].stripes) * sequence_bytes
            if cost < best_cost:
                best, best_cost = cut, cost
        if best is None:
            return None
        picks.append(best)
        total += best_cost
    return _Fit(slab_bytes, total, picks)


def _cutting_worth(stripes: int, fewest: int) -> float:
    """The share of a typical sequence that so many stripes must save, where `fewest` would do."""
    return FIRST_CUT_WORTH + (stripes - fewest - 1) * FURTHER_CUT_WORTH if stripes > fewest else 0.0


def _fit_given(slab_bytes: int, options: Sequence[Sequence[_PageCut]]) -> list[_PageCut]:
    """The best cut per group for a slab size that was given."""
    align_bytes = _slab_align_bytes(options)
    if slab_bytes < 1 or slab_bytes % align_bytes:
        raise LayoutError(f"slab_bytes must be a positive multiple of {align_bytes}, not {slab_bytes:,}")
    fit = _fit(slab_bytes, options, limited=False)
    if fit is None:
        need = max(min(cut.page_bytes for cut in cuts) for cuts in options)
        raise LayoutError(f"a slab of {slab_bytes:,} B cannot hold one page of every group; it takes {need:,} B")
    return fit.cuts


def _align_bytes(slices: Sequence[Slice]) -> int:
    """What pages must be multiples of: the offset unit, and whole rows of every width, since TMA counts rows.

    The slice of a layer may start anywhere in a page, because each layer has a descriptor of its own.
    """
    rows = {width for s in slices if isinstance(s.cache, TokenCache) for width in s.row_bytes}
    return math.lcm(OFFSET_UNIT_BYTES, *rows)


def _slab_align_bytes(options: Sequence[Sequence[_PageCut]]) -> int:
    return math.lcm(*(cuts[0].align_bytes for cuts in options))


def _round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple
