"""The terminal report of a plan: does it fit, where every byte goes, and what the same flags give elsewhere."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from windowpane.kv.caches import TokenCache
from windowpane.kv.layout import Group as KVGroup
from windowpane.plan.cards import CardFit
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.planner import Plan
from windowpane.plan.sizes import format_bytes

BAR_CELLS = 60


def print_report(console: Console, plan: Plan, cards: list[CardFit], *, explain: bool = False) -> None:
    for part in _parts(plan, cards, explain):
        console.print(part)


def _parts(plan: Plan, cards: list[CardFit], explain: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_headline(plan), ""]
    if plan.budget:
        parts += [_section("Where the memory of one rank goes"), _memory(plan), ""]
    parts += [_section("KV groups"), _groups(plan), _sequence_cost(plan), ""]
    if explain:
        parts += [
            _section("Why this layout"),
            *(Padding(line, (0, 0, 0, 2)) for line in plan.sizing.layout.explain()),
            "",
        ]
    if plan.capacity:
        parts += [_section("How many fit, by length"), _curve(plan), ""]
    else:
        parts += [_section("Cards that hold it"), _cards(cards, plan), ""]
    if plan.peers:
        parts += [_section("The same flags elsewhere"), _peers(plan.peers)]
    parts += [Text(f"Note: {note}", style="dim") for note in plan.sizing.spec.notes]
    return parts


def _section(title: str) -> RenderableType:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def _headline(plan: Plan) -> RenderableType:
    where = plan.device.name if plan.device else "no device given"
    if plan.sizing.ranks > 1:
        where = f"{plan.sizing.ranks} × {where}, tensor parallel"
    lines = [
        Text.assemble(
            (plan.sizing.spec.name, "bold"),
            f"  {plan.sizing.spec.num_layers} layers, {plan.sizing.compute_dtype}, {where}",
        )
    ]
    length = plan.max_model_len
    if plan.capacity is None:
        lines.append(Text(f"{length:,} tokens a sequence ({plan.max_model_len_note})"))
    else:
        count = plan.capacity.sequences(length)
        many = "1 sequence" if count == 1 else f"{count:,} sequences"
        lines.append(
            Text.assemble(
                ("fits  ", "bold green"),
                f"{many} of {length:,} tokens at once (byte ratio {plan.capacity.byte_ratio(length):.2f})",
            )
        )
        lines.append(Text(f"      {length:,} tokens: {plan.max_model_len_note}", style="dim"))
        if count > plan.sizing.config.max_num_seqs:
            lines.append(
                Text(f"      --max-num-seqs {plan.sizing.config.max_num_seqs} runs fewer than fit", style="yellow")
            )
    return Group(*lines)


def _memory(plan: Plan) -> RenderableType:
    budget = plan.budget
    assert budget is not None
    kv = plan.kv_bytes or 0
    used = budget.weights_bytes + budget.activation_bytes + budget.runtime_bytes + kv
    rows = [
        ("weights", "blue", budget.weights_bytes, "text weights" + _scheme(plan)),
        (
            "activations",
            "magenta",
            budget.activation_bytes,
            f"estimate, largest step: {plan.sizing.config.batched_tokens:,} tokens",
        ),
        ("runtime", "yellow", budget.runtime_bytes, "context, workspaces, graphs (assumed)"),
        (
            "KV arena",
            "green",
            kv,
            "--kv-cache-memory-bytes" if plan.sizing.config.kv_cache_memory_bytes else "what is left",
        ),
        ("left alone", "bright_black", budget.device_bytes - used, _left_alone(plan)),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, style, size, note in rows:
        if size:
            table.add_row(Text.assemble(("█ ", style), name), format_bytes(size), note)
    bar = Text()
    for _, style, size, _ in rows:
        bar.append("█" * round(BAR_CELLS * max(size, 0) / max(budget.device_bytes, 1)), style=style)
    return Group(Padding(bar, (0, 0, 0, 2)), Padding(table, (0, 0, 0, 2)))


def _scheme(plan: Plan) -> str:
    return f", {plan.sizing.spec.weight_scheme}" if plan.sizing.spec.weight_scheme else ""


def _left_alone(plan: Plan) -> str:
    if plan.sizing.config.kv_cache_memory_bytes:
        return "not asked for"
    return f"--gpu-memory-utilization {plan.sizing.config.gpu_memory_utilization:g}"


def _groups(plan: Plan) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("  group", "layers", "keeps", "stored as", "page", "one sequence"):
        table.add_column(name, header_style="dim", justify="right" if name == "layers" else "left")
    for group in plan.sizing.layout.groups:
        table.add_row(
            f"  {group.name}",
            str(group.layers),
            _keeps(group),
            _stored_as(group, plan),
            _page(group),
            _held(group, plan.max_model_len),
        )
    return table


def _keeps(group: KVGroup) -> str:
    tokens = getattr(group.retention, "tokens", 0)
    return {
        "full": "every token",
        "window": f"the last {tokens:,} tokens",
        "chunk": f"its chunk of {tokens:,} tokens",
        "state": "one state, two slots",
        "cross": f"{tokens:,} encoder tokens",
    }[group.retention.kind]


def _stored_as(group: KVGroup, plan: Plan) -> str:
    if group.kv_format is None:
        return "state"
    kinds = {"latent" if cache.latent else "pair" for s in group.slices if isinstance(cache := s.cache, TokenCache)}
    text = f"{group.kv_format.name} {' and '.join(sorted(kinds))}"
    verdict = plan.gates.get(group.name)
    return f"{text}, in software" if verdict and verdict.verdict == "software" and not _on_cpu(plan) else text


def _on_cpu(plan: Plan) -> bool:
    return plan.device is not None and plan.device.is_cpu


def _page(group: KVGroup) -> str:
    unit = f"{group.block_tokens} tokens" if group.block_tokens else "1 layer"
    stripes = f" × {group.stripes} stripes" if group.stripes > 1 and group.block_tokens else ""
    return f"{unit} = {format_bytes(group.page_bytes)}{stripes}"


def _held(group: KVGroup, length: int) -> str:
    pages = group.max_pages(length)
    return f"{pages:,} pages = {format_bytes(pages * group.page_bytes)}"


def _sequence_cost(plan: Plan) -> RenderableType:
    cost = plan.sizing.per_sequence
    grows = f"{cost.bytes_per_token:,.0f} B per token" if cost.bytes_per_token else "nothing per token"
    slab = format_bytes(plan.sizing.layout.slab_bytes)
    left_over = max(
        plan.sizing.layout.remainder_bytes(g) / plan.sizing.layout.slab_bytes for g in plan.sizing.layout.groups
    )
    return Text.assemble(
        "  a long sequence costs ",
        (f"{format_bytes(cost.fixed_bytes_per_sequence)} + {grows}", "bold"),
        f" per rank; slabs of {slab}, at most {left_over:.2%} left over",
    )


def _curve(plan: Plan) -> RenderableType:
    assert plan.capacity is not None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    curve = plan.capacity.curve(plan.max_model_len)[-8:]
    table.add_column("  tokens", style="dim")
    for length, _ in curve:
        table.add_column(f"{length:,}", justify="right")
    table.add_row("  sequences", *(f"{count:,}" for _, count in curve))
    longest = plan.capacity.longest(1)
    alone = "no limit from memory" if longest is None else f"up to {longest:,} tokens"
    return Group(table, Text(f"  one sequence alone: {alone} of KV", style="dim"))


def _cards(cards: list[CardFit], plan: Plan) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("  cards", "KV per rank", "sequences", "longest alone"):
        table.add_column(name, justify="left" if name == "  cards" else "right")
    for fit in cards:
        table.add_row(f"  --gpu {fit.gpu}", format_bytes(fit.kv_bytes), f"{fit.sequences:,}", fit.longest_text)
    if not cards:
        return Text("  none of the common cards, up to eight of them: see --gpu-memory and --tensor-parallel-size")
    return Group(table, Text(f"  sequences of {plan.max_model_len:,} tokens; pick one for the whole plan", style="dim"))


def _peers(peers: tuple[PeerReport, ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("  engine", "reports", "concurrency", "one request"):
        table.add_column(name, justify="left" if name == "  engine" else "right")
    notes: dict[str, str] = {}
    for peer in peers:
        label = _peer_label(peer)
        tokens = f"{peer.reported_tokens:,} tokens" if peer.reported_tokens is not None else "does not start"
        ratio = f"{peer.concurrency:.2f}×" if peer.concurrency is not None else "–"
        charge = format_bytes(peer.bytes_per_request) if peer.bytes_per_request else "–"
        table.add_row(f"  {label}", tokens, ratio, charge)
        notes[peer.error or peer.note] = notes.get(peer.error or peer.note, "") or label
    lines = [Padding(Text.assemble((f"{label}: ", "bold"), note), (0, 0, 0, 2)) for note, label in notes.items()]
    return Group(table, "", *lines)


def _peer_label(peer: PeerReport) -> str:
    mode = {True: ", async", False: ", sync", None: ""}[peer.async_scheduling]
    return f"{peer.engine} {peer.version}{mode}"
