"""The terminal report of a plan: does it fit, where every byte goes, and what the same flags give elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from windowpane.kv.caches import TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import Group as KVGroup
from windowpane.kv.retention import MIN_PREFIX_TOKENS, Chunk, Routes, State, Window
from windowpane.models.blocks import Experts, each
from windowpane.models.ggml import StoredTypes
from windowpane.models.weights import held_bytes, weight_breakdown
from windowpane.plan.cards import CardFit
from windowpane.plan.memory import ArenaUse, Device
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.planner import Plan
from windowpane.plan.sizes import format_bytes

BAR_CELLS = 60
GIB = 2**30


def print_report(
    console: Console, plan: Plan, cards: Sequence[CardFit], *, explain: bool = False, concurrency: int | None = None
) -> None:
    """Print the plan; `cards`, which hold `concurrency` sequences, are the suggestions where no memory was given."""
    print_trimmed(console, Group(*_parts(console.width, plan, cards, explain, concurrency)))


def print_trimmed(console: Console, part: RenderableType) -> None:
    """Print without the blanks that tables and padding leave at the end of a line."""
    trimmed: list[Segment] = []
    for line in console.render_lines(part, pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        trimmed += [*line, Segment.line()]
    console.print(Segments(trimmed), end="")


def _parts(
    width: int, plan: Plan, cards: Sequence[CardFit], explain: bool, concurrency: int | None
) -> list[RenderableType]:
    parts: list[RenderableType] = [_headline(plan), ""]
    if plan.capacity:
        whose = "" if plan.sizing.ranks == 1 else " of one rank"
        parts += [section(f"Where the memory{whose} goes"), _memory(plan, width), ""]
    parts += [section("What the layers keep"), _groups(plan), _sequence_cost(plan), ""]
    if explain:
        parts += [section("Why"), *(indented(line) for line in _why(plan)), ""]
    if plan.capacity:
        parts += [section("How many sequences fit, by length"), _curve(plan, width), ""]
    else:
        held = "it" if concurrency is None else f"{_many(concurrency, 'sequence')} at once"
        parts += [section(f"Cards that hold {held}"), _cards(cards, plan, concurrency), ""]
    if plan.peers:
        parts += [section("The same KV memory and flags elsewhere"), _peers(plan), ""]
    parts += [Text(f"Note: {note}", style="dim") for note in plan.sizing.spec.notes]
    if parts[-1] == "":
        parts.pop()
    return parts


def section(title: str) -> RenderableType:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def indented(line: str | Text) -> RenderableType:
    return Padding(line, (0, 0, 0, 2), expand=False)


def plain_table(*columns: str, left: Sequence[str] = ()) -> Table:
    """Numbers to the right; only the last column may wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for at, name in enumerate(columns):
        is_last = at == len(columns) - 1
        table.add_column(name, justify="left" if at == 0 or name in left else "right", no_wrap=not is_last)
    return table


def _headline(plan: Plan) -> RenderableType:
    spec = plan.sizing.spec
    weights = spec.weight_scheme or spec.dtype
    lines = [
        Text.assemble((spec.name, "bold"), f" · {where(plan.device, plan.sizing.ranks)}"),
        Text(f"{spec.num_layers} layers, {weights} weights, computes in {plan.sizing.compute_dtype}", style="dim"),
    ]
    if plan.why_not_run:
        lines.append(Text(f"can be planned, not run: {plan.why_not_run}", style="yellow"))
    return Group(*lines, *_experts(plan), *_drafts(plan), *(_fits(plan) if plan.capacity else [_takes(plan)]))


def _drafts(plan: Plan) -> list[RenderableType]:
    """What drafts cost: what windows hold for those that are taken back, a drafter's own KV and weights, and how states
    go back.
    """
    sizing, drafting = plan.sizing, plan.sizing.config.drafting
    if drafting is None:
        return []
    length = plan.max_model_len
    without = Capacity(sizing.layout, 0).bytes_at(length)
    cost = sizing.per_sequence.bytes_at(length) - without
    states = any(isinstance(g.retention, State) for g in sizing.layout.groups)
    again = "; recurrent states go back to the last step's and compute accepted tokens again" if states else ""
    most = drafting.num_speculative_tokens
    told = f"drafts by {drafting.method}, up to {most} a step: {format_bytes(cost)} a sequence{_own(plan)}{again}"
    return [Text(told, style="dim")]


def _own(plan: Plan) -> str:
    """What a model that drafts takes for itself; the tables have it beside its target's."""
    sizing, drafter = plan.sizing, plan.sizing.spec.drafter
    if drafter is None:
        return ""
    spec, layers = replace(sizing.spec, dtype=sizing.compute_dtype), {c.layer for c in drafter.decoder.caches}
    weights_bytes = weight_breakdown(spec, sizing.ranks).drafter
    weights_bytes += sum(held_bytes(spec, tensor.on_rank(sizing.ranks)) for tensor in drafter.tensors)
    kv_bytes = sum(
        group.max_pages(plan.max_model_len, sizing.rollback_tokens)
        // group.stripes
        * (piece.end - piece.data_offsets[0])
        for group in sizing.layout.groups
        for piece in group.slices
        if isinstance(piece.cache, TokenCache) and piece.cache.layer in layers
    )
    own = f" and {format_bytes(kv_bytes)} of the drafter's own KV" if kv_bytes else ""
    return f"{own}, and {format_bytes(weights_bytes)} of weights"


def _experts(plan: Plan) -> list[RenderableType]:
    """How many experts a token visits, and what steps read if tokens choose among all alike."""
    spec, ranks = plan.sizing.spec, plan.sizing.ranks
    found = list(each(spec.decoder.layers, Experts)) if spec.decoder is not None else []
    if not found:
        return []
    weights, router = weight_breakdown(spec, ranks), found[0].router
    step = min(plan.sizing.config.max_num_seqs, plan.sizing.config.batched_tokens)
    shares = {tokens: 1 - (1 - router.chosen / router.experts) ** tokens for tokens in dict.fromkeys((1, 8, step))}
    dense_bytes = weights.total - weights.experts
    read = [(tokens, format_bytes(int(dense_bytes + share * weights.experts))) for tokens, share in shares.items()]
    told = ", ".join(f"{size} for {tokens:,}{' token' if tokens == 1 else ''}" for tokens, size in read)
    layers = f"{len(found)} of {spec.num_layers} layers" if len(found) < spec.num_layers else "every layer"
    return [
        Text(f"{router.chosen} of {router.experts} experts a token, in {layers}", style="dim"),
        Text(f"weights a step reads: {told}", style="dim"),
    ]


def _takes(plan: Plan) -> RenderableType:
    """What is known without any memory given."""
    length = plan.max_model_len
    limit = f" ({plan.max_model_len_note})" if plan.max_model_len_note else ""
    need = format_bytes(plan.sizing.per_sequence.bytes_at(length))
    return Text(f"{format_bytes(plan.sizing.weights_bytes)} of weights; {need} of KV for {length:,} tokens{limit}")


def _fits(plan: Plan) -> list[RenderableType]:
    length, capacity, config = plan.max_model_len, plan.capacity, plan.sizing.config
    assert capacity is not None
    count = capacity.sequences(length)
    many = f"{_many(count, 'sequence')} of {length:,} tokens at once"
    answer = Text.assemble(("fits  ", "bold green"), (many, "bold"), f", {capacity.byte_ratio(length):.2f} by bytes")
    asides = [Text(_verdict(peer)) for peer in plan.peers if peer.same_flags]
    if plan.max_model_len_note:
        asides.append(Text(f"{length:,} tokens is {plan.max_model_len_note}", style="dim"))
    if count > config.max_num_seqs:
        asides.append(Text(f"--max-num-seqs {config.max_num_seqs} runs fewer than fit", style="yellow"))
    return [answer, *(Padding(aside, (0, 0, 0, len("fits  ")), expand=False) for aside in asides)]


def where(device: Device | None, ranks: int) -> str:
    many = "" if ranks == 1 else f"{ranks} × "
    parallel = "" if ranks == 1 else ", tensor parallel"
    if device is None:
        return "no card given" if ranks == 1 else f"{ranks} tensor-parallel ranks, no card given"
    name = device.name or ("a card" if ranks == 1 else "card")
    return f"{many}{name} ({format_bytes(device.memory_bytes)}){parallel}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _verdict(peer: PeerReport) -> str:
    if peer.concurrency is None:
        return f"{peer.name} would not start"
    return f"{peer.name}: {peer.concurrency:.2f}, reported as {peer.reported_tokens:,} tokens"


def _adapter_slots(plan: Plan) -> str:
    config = plan.sizing.config
    return f"{_many(config.max_loras, 'slot')} of rank {config.max_lora_rank}"


def _memory(plan: Plan, width: int) -> RenderableType:
    """A bar and a row per purpose; the arena is broken down further, as it is when full."""
    capacity, budget, config = plan.capacity, plan.budget, plan.sizing.config
    assert capacity is not None
    use = ArenaUse.of(capacity, plan.max_model_len)
    fixed = "as given" if config.kv_cache_memory_bytes else "what is left"
    rows = [("KV arena", "green", capacity.arena_bytes, f"{fixed}; holding {_many(use.sequences, 'sequence')}:")]
    if budget:
        estimate = f"estimate of the largest step, {config.batched_tokens:,} tokens"
        left_bytes = budget.device_bytes - budget.before_kv_bytes - capacity.arena_bytes
        rows = [
            ("weights", "blue", budget.weights_bytes, _whose_weights(plan)),
            ("adapters", "cyan", budget.adapter_bytes, _adapter_slots(plan)),
            ("activations", "magenta", budget.activation_bytes, estimate),
            ("runtime", "yellow", budget.runtime_bytes, "context, workspaces and graphs, assumed"),
            *rows,
            ("left alone", "bright_black", left_bytes, _left_alone(plan)),
        ]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, style, size, note in rows:
        if size:
            table.add_row(Text.assemble(("█ ", style), name), _gib(size), note)
        if name == "KV arena":
            for part, part_bytes, part_note in _arena_rows(plan, use):
                table.add_row(f"    {part}", _gib(part_bytes), part_note)
    if (host := plan.sizing.host).arena_bytes:
        sessions = _many(host.sequences(plan.max_model_len), "more session")
        table.add_row("  host tier", _gib(host.arena_bytes), f"of host memory; {sessions} stay within reach")
    bar = _bar([(style, size) for _, style, size, _ in rows], min(BAR_CELLS, width - 4))
    return Group(*([indented(bar)] if budget else []), Padding(table, (0, 0, 0, 2), expand=False))


def _whose_weights(plan: Plan) -> str:
    is_packed = isinstance(plan.sizing.spec.quantization, StoredTypes)
    return "of the GGUF file, as it stores them" if is_packed else "of the text model"


def _arena_rows(plan: Plan, use: ArenaUse) -> list[tuple[str, int, str]]:
    one = {
        g.name: g.max_pages(plan.max_model_len, plan.sizing.rollback_tokens) * g.page_bytes
        for g in plan.sizing.layout.groups
    }
    rows = [(name, size, f"{use.sequences:,} × {format_bytes(one[name])}") for name, size in use.group_bytes.items()]
    room = "growth and restore points" if plan.sizing.config.enable_prefix_caching else "growth"
    rows.append(("stranded", use.stranded_bytes, "slab remainders and partly filled slabs"))
    rows.append(("free", use.free_bytes, f"room for {room}"))
    return rows


def _gib(size_bytes: int) -> str:
    """One unit for the whole table, so that rows can be compared and added."""
    return f"{size_bytes / GIB:.2f} GiB"


def _bar(shares: Sequence[tuple[str, int]], cells: int) -> Text:
    """Shares of one whole; ends are rounded, not lengths, so that the bar is exactly `cells` wide."""
    bar, total, at = Text(), max(1, sum(size for _, size in shares)), 0
    drawn = 0
    for style, size in shares:
        at += size
        end = round(cells * at / total)
        bar.append("█" * (end - drawn), style=style)
        drawn = end
    return bar


def _left_alone(plan: Plan) -> str:
    if plan.sizing.config.kv_cache_memory_bytes:
        return "not asked for"
    return f"--gpu-memory-utilization {plan.sizing.config.gpu_memory_utilization:g}"


def _groups(plan: Plan) -> RenderableType:
    table = plain_table(
        "\n  layers", "page\ntokens", "\nbytes", "sequence\npages", "\nbytes", "\nstored as", left=("\nstored as",)
    )
    for group in plan.sizing.layout.groups:
        pages = group.max_pages(plan.max_model_len, plan.sizing.rollback_tokens)
        table.add_row(
            f"  {_layers(group)} {group.name}",
            f"{group.block_tokens}" if group.block_tokens else "–",
            format_bytes(group.page_bytes),
            f"{pages:,}",
            format_bytes(pages * group.page_bytes),
            _stored_as(group, plan),
        )
    return table


def _layers(group: KVGroup) -> int:
    """A layer counts once, also where it has two caches in this group."""
    return group.layers if isinstance(group.retention, Routes) else len({s.cache.layer for s in group.slices})


def _stored_as(group: KVGroup, plan: Plan) -> str:
    if isinstance(group.retention, State):
        return "1 slot per layer" if group.retention.slots == 1 else f"{group.retention.slots} slots per layer"
    if group.kv_format is None:
        return f"{group.stored_as} ids"
    kinds = {"latent" if cache.latent else "pair" for s in group.slices if isinstance(cache := s.cache, TokenCache)}
    text = f"{group.kv_format.name} {' and '.join(sorted(kinds))}"
    if group.stripes > 1:
        text += f", {group.stripes} stripes"
    verdict = plan.gates.get(group.name)
    return f"{text}, decoded in software" if verdict and verdict.verdict == "software" else text


def _sequence_cost(plan: Plan) -> RenderableType:
    cost, layout = plan.sizing.per_sequence, plan.sizing.layout
    fixed = f"{format_bytes(cost.fixed_bytes_per_sequence)} once" if cost.fixed_bytes_per_sequence else ""
    grows = f"{cost.bytes_per_token:,.0f} B per token" if cost.bytes_per_token else ""
    left_over = max(layout.remainder_bytes(g) for g in layout.groups) / layout.slab_bytes
    where = "" if plan.sizing.ranks == 1 else " on each rank"
    costs = Text.assemble("a sequence costs ", (" + ".join(filter(None, (fixed, grows))), "bold"), where)
    rest = f"up to {left_over:.2%} left over" if left_over else "nothing left over"
    lines = [costs, Text(f"slabs of {format_bytes(layout.slab_bytes)}, {rest}", style="dim")]
    spec = plan.sizing.spec
    if without := spec.num_layers - len({c.layer for c in spec.caches if c.layer < spec.num_layers}):
        lines.append(Text(f"{without} of {spec.num_layers} layers keep nothing of their own", style="dim"))
    if plan.sizing.config.enable_prefix_caching:
        lines.append(Text(_reuse(plan), style="dim"))
    return Group(*map(indented, lines))


def _reuse(plan: Plan) -> str:
    tail_bytes = plan.sizing.layout.restore_point_bytes(plan.max_model_len)
    kept = f"; a restore point keeps {format_bytes(tail_bytes)}" if tail_bytes else ""
    return f"shortest prefix that can be reused: {MIN_PREFIX_TOKENS} tokens{kept}"


def _why(plan: Plan) -> list[str]:
    gates = [f"{name}: {gate.verdict}: {gate.why}" for name, gate in plan.gates.items()]
    return [*plan.sizing.layout.explain(), *gates]


def _curve(plan: Plan, width: int) -> RenderableType:
    assert plan.capacity is not None
    points = [(tokens_label(length), f"{count:,}") for length, count in plan.capacity.curve(plan.max_model_len)]
    label_width = len("  sequences")
    # The longest lengths are the ones that decide; short ones go where the line is full.
    while len(points) > 1 and label_width + sum(2 + max(map(len, point)) for point in points) > width:
        points.pop(0)
    table = plain_table("  tokens", *(length for length, _ in points))
    table.add_row("  sequences", *(count for _, count in points))
    longest = plan.capacity.longest(1)
    if longest is None:
        alone = "a sequence of any length fits: no layer looks back further than its window"
    else:
        alone = f"memory ends at one sequence of {longest:,} tokens"
    return Group(table, indented(Text(alone, style="dim")))


def tokens_label(length: int) -> str:
    """Powers of two as --max-model-len takes them (128K), other lengths in full."""
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if length % unit == 0:
            return f"{length // unit}{letter}"
    return f"{length:,}"


def _cards(cards: Sequence[CardFit], plan: Plan, concurrency: int | None) -> RenderableType:
    if not cards:
        return indented("none of the common cards, up to eight of them; try a shorter --max-model-len")
    table = plain_table("  fewest cards", "KV per rank", "sequences", "longest")
    for fit in cards:
        table.add_row(f"  --gpu {fit.gpu}", format_bytes(fit.kv_bytes), f"{fit.sequences:,}", f"{fit.longest_tokens:,}")
    longest = "" if concurrency is None else f"; longest at which {_many(concurrency, 'sequence')} fit"
    hint = f"sequences of {plan.max_model_len:,} tokens{longest}; add one of these to the command for the whole plan"
    return Group(table, indented(Text(hint, style="dim")))


def _peers(plan: Plan) -> RenderableType:
    capacity = plan.capacity
    assert capacity is not None
    length = plan.max_model_len
    table = plain_table("  engine", "reports", "concurrency", "one request", "", left=("",))
    table.add_row(
        Text("  Windowpane", style="bold"),
        _many(capacity.sequences(length), "sequence"),
        f"{capacity.byte_ratio(length):.2f}×",
        format_bytes(capacity.bytes_at(length)),
    )
    for peer in plan.peers:
        if peer.unknown:
            continue  # a note says so
        table.add_row(
            Text(f"{'›' if peer.same_flags else ' '} {peer.name}", style="bold" if peer.same_flags else ""),
            _reported(peer),
            "–" if peer.concurrency is None else f"{peer.concurrency:.2f}×",
            format_bytes(peer.bytes_per_request) if peer.bytes_per_request else "–",
            "your flags" if peer.same_flags else "",
        )
    return Group(table, "", *(indented(line) for line in _peer_notes(plan)))


def _reported(peer: PeerReport) -> str:
    if peer.error:
        return "does not start"
    return "–" if peer.reported_tokens is None else f"{peer.reported_tokens:,} tokens"


def _peer_notes(plan: Plan) -> list[Text]:
    """Each sentence once, with the engines and releases it is true of."""
    shown = [peer for peer in plan.peers if not peer.alternative]
    said: dict[tuple[str, str], list[PeerReport]] = {}
    for peer in shown:
        for sentence in _sentences(peer):
            said.setdefault((peer.engine, sentence), []).append(peer)
    notes = []
    for (engine, sentence), peers in said.items():
        everywhere = len(peers) == sum(peer.engine == engine for peer in shown)
        notes.append(Text.assemble((engine if everywhere else f"{engine} {_releases(peers)}", "bold"), f": {sentence}"))
    if plan.sizing.config.swa_full:
        notes.append(Text("--swa-full is --disable-hybrid-kv-cache-manager in vLLM.", style="dim"))
    local = any(isinstance(cache.retention, Window | Chunk) for cache in plan.sizing.spec.caches)
    if local and plan.peers[0].groups and plan.sizing.config.max_num_batched_tokens is None:
        tokens = f"--max-num-batched-tokens {plan.peers[0].max_num_batched_tokens}"
        notes.append(Text(f"vLLM is taken to run with its own default, {tokens}.", style="dim"))
    return notes


def _sentences(peer: PeerReport) -> list[str]:
    if peer.error or peer.unknown:
        return [f"{peer.error}." if peer.error else peer.note]
    # vLLM's releases share some sentences and not others; where there is one row they need not be told apart.
    return [peer.charge_note, peer.report_note] if peer.version else [peer.note]


def _releases(peers: Sequence[PeerReport]) -> str:
    """Where sync and async agree, the release is named once."""
    modes = [peer.covers for peer in peers]
    return ", ".join(dict.fromkeys(p.covers if modes.count(p.covers) > 1 else p.release for p in peers))
