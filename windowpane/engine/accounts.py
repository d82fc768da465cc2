"""The books at start-up: what the plan predicted beside what every rank has taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windowpane.kv.layout import Layout
from windowpane.kv.manager import KVManager
from windowpane.plan.config import flag
from windowpane.plan.planner import Plan
from windowpane.plan.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from windowpane.parallel.job import RankReport


@dataclass(frozen=True, slots=True)
class Account:
    """One line of the books: what the plan said of each rank, and what each has taken."""

    name: str
    predicted_bytes: int
    rank_bytes: tuple[int, ...]
    note: str = ""

    @property
    def measured_bytes(self) -> int:
        return max(self.rank_bytes)


def accounts(plan: Plan, reports: Sequence[RankReport]) -> list[Account]:
    """Weights and arena as they lie on the device; KV groups as the manager hands them to one longest sequence."""
    assert plan.capacity is not None
    length, layout = plan.max_model_len, plan.sizing.layout
    count = plan.capacity.sequences(length)
    weights_bytes = tuple(r.weights_bytes for r in reports)
    arena_bytes = tuple(r.arena_bytes for r in reports)
    rows = [
        Account(
            "weights",
            plan.sizing.weights_bytes,
            weights_bytes,
            plan.sizing.spec.weight_scheme or plan.sizing.compute_dtype,
        ),
        Account("KV arena", plan.capacity.arena_bytes, arena_bytes, f"{count} × {length:,} tokens, each:"),
    ]
    if plan.sizing.adapter_bytes:
        config, held = plan.sizing.config, tuple(r.adapter_bytes for r in reports)
        note = f"{config.max_loras} of rank {config.max_lora_rank}"
        rows.insert(1, Account("adapters", plan.sizing.adapter_bytes, held, note))
    activations = tuple(r.activation_bytes for r in reports if r.activation_bytes is not None)
    if activations and plan.budget is not None:
        rows.insert(1, Account("activations", plan.budget.activation_bytes, activations, "of the largest step"))
    rollback_tokens = plan.sizing.rollback_tokens
    handed_out = _rehearse(layout, plan.capacity.num_slabs, length, rollback_tokens)
    for group, measured in zip(layout.groups, handed_out, strict=True):
        stored = group.stored_as or "state"
        predicted = group.max_pages(length, rollback_tokens) * group.page_bytes
        each = (measured,) * len(reports)  # one manager keeps the books of all ranks
        rows.append(Account(f"  {group.name}", predicted, each, f"{group.layers} layers, {stored}"))
    return rows


def _rehearse(layout: Layout, num_slabs: int, length: int, rollback_tokens: int) -> list[int]:
    """Bytes per group that the manager really hands to a sequence that is prefilled and then decodes up to `length`."""
    manager = KVManager(layout, num_slabs, 1, length, rollback_tokens)
    manager.start(0, length)
    decoded = 2 * max((g.block_tokens or 1) for g in layout.groups)  # enough for windows to lie across blocks
    for reached in range(max(1, length - decoded), length + 1):
        manager.extend(0, reached)
    return [manager.group_bytes(g).live for g in range(len(layout.groups))]


def print_accounts(console: Console, plan: Plan, reports: Sequence[RankReport]) -> None:
    from rich.table import Table

    from windowpane.plan.report import print_trimmed

    assert plan.device is not None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    ranks = len(reports)
    measured = ("measured",) if ranks == 1 else tuple(f"rank {rank}" for rank in range(ranks))
    for name in ("", "predicted", *measured, ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in accounts(plan, reports):
        table.add_row(f"  {row.name}", *map(format_bytes, (row.predicted_bytes, *row.rank_bytes)), row.note)
    where = plan.device.name if ranks == 1 else f"{ranks} ranks of {plan.device.name}"
    console.print(f"{plan.sizing.spec.name} on {where}", style="bold", highlight=False)
    print_trimmed(console, table)
    chosen = f" ({plan.max_model_len_note})" if plan.max_model_len_note else ""
    steps = "overlapping" if plan.sizing.config.async_scheduling else "one at a time"
    console.print(f"{flag('max_model_len')} {plan.max_model_len}{chosen}; steps {steps}", style="dim", highlight=False)
