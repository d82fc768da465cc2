"""`plan --json`: the stable document. Its fields are described in docs/plan-json.md; add, never rename."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from windowpane.kv.layout import Group
from windowpane.kv.retention import MIN_PREFIX_TOKENS
from windowpane.plan.memory import ArenaUse
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.planner import Plan

SCHEMA_VERSION = 1


def document(plan: Plan) -> dict[str, Any]:
    """Everything the terminal report says, as plain JSON values. Unknown figures are null."""
    capacity, sizing = plan.capacity, plan.sizing
    cost = sizing.per_sequence
    length = plan.max_model_len
    return {
        "schema_version": SCHEMA_VERSION,
        "model": sizing.spec.name,
        "architecture": sizing.spec.architecture,
        "device": (plan.device.name or None) if plan.device else None,
        "tensor_parallel_size": sizing.ranks,
        "max_num_seqs": sizing.config.max_num_seqs,
        "max_num_batched_tokens": sizing.config.batched_tokens,
        "async_scheduling": sizing.config.async_scheduling,
        "enable_prefix_caching": sizing.config.enable_prefix_caching,
        "kv_cache_dtype": sizing.config.kv_cache_dtype,
        "mamba_ssm_cache_dtype": sizing.config.mamba_ssm_cache_dtype,
        "swa_full": sizing.config.swa_full,
        "speculative_config": asdict(sizing.config.drafting) if sizing.config.drafting else None,
        "rollback_tokens": sizing.rollback_tokens,
        "compute_dtype": sizing.compute_dtype,
        "kv_cache_bytes_per_rank": plan.kv_bytes,
        "weights_bytes_per_rank": sizing.weights_bytes,
        "memory": asdict(plan.budget) | {"kv_bytes": plan.kv_bytes} if plan.budget else None,
        "groups": [_group(plan, group) for group in sizing.layout.groups],
        "slab_bytes": sizing.layout.slab_bytes,
        "arena_bytes": capacity.arena_bytes if capacity else None,
        "arena_use": asdict(ArenaUse.of(capacity, length)) if capacity else None,
        "fixed_bytes_per_sequence": cost.fixed_bytes_per_sequence,
        "bytes_per_token": cost.bytes_per_token,
        "bytes_per_sequence": cost.bytes_at(length),
        "shortest_reusable_prefix_tokens": MIN_PREFIX_TOKENS if sizing.config.enable_prefix_caching else None,
        "restore_point_bytes": sizing.layout.restore_point_bytes(length),
        "host_bytes_per_rank": sizing.host.arena_bytes,
        "host_sessions": sizing.host.sequences(length) if sizing.host.num_slabs else 0,
        "max_model_len": length,
        "concurrency": capacity.byte_ratio(length) if capacity else None,
        "sequences": capacity.sequences(length) if capacity else None,
        "curve": [list(point) for point in capacity.curve(length)] if capacity else [],
        "kv_format_gates": {name: asdict(gate) for name, gate in plan.gates.items()},
        "peers": [_peer(peer) for peer in plan.peers],
        "layout_explanation": sizing.layout.explain(),
        "why_not_run": plan.why_not_run,
        "notes": list(sizing.spec.notes),
    }


def _peer(peer: PeerReport) -> dict[str, Any]:
    return asdict(peer) | {"note": peer.note}


def _group(plan: Plan, group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "retention": group.retention.kind,
        "retention_tokens": getattr(group.retention, "tokens", None),
        "layers": group.layers,
        "kv_format": group.stored_as,
        "block_tokens": group.block_tokens,
        "stripes": group.stripes,
        "page_bytes": group.page_bytes,
        "pages_per_slab": plan.sizing.layout.pages_per_slab(group),
        "bytes_per_token": group.bytes_per_token,
        "pages_per_sequence": group.max_pages(plan.max_model_len, plan.sizing.rollback_tokens),
    }
