"""`doctor --json`: the diagnosis for programs. Fields are described in docs/doctor.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from windowpane.doctor.diagnosis import Diagnosis

SCHEMA_VERSION = 2


def document(found: Diagnosis) -> dict[str, Any]:
    explained, capacity = found.explanation, found.capacity
    length = found.facts.max_model_len or (found.spec.max_position if found.spec else None)
    return {
        "schema_version": SCHEMA_VERSION,
        "facts": asdict(found.facts),
        "start": found.start,
        "starts": [asdict(start.facts) for start in found.starts],
        "model": found.spec.name if found.spec else None,
        "failures": [asdict(failure) for failure in found.failures],
        "vllm": asdict(explained.report) if explained else None,
        "exact": (explained is not None and explained.exact) if found.facts.runs else None,
        "assumed": list(explained.assumed) if explained else [],
        "alternatives": list(explained.alternatives) if explained else [],
        "levers": [{"change": lever.what, **asdict(lever.report)} for lever in found.levers],
        "bytes_per_reported_token": bytes_per_reported_token(found),
        "fixed_bytes_per_sequence": found.sizing.per_sequence.fixed_bytes_per_sequence if found.sizing else None,
        "bytes_per_token": found.sizing.per_sequence.bytes_per_token if found.sizing else None,
        "concurrency": capacity.byte_ratio(length) if capacity and length else None,
        "sequences": capacity.sequences(length) if capacity and length else None,
        "missing": list(found.missing),
        "doubts": list(found.doubts),
    }


def bytes_per_reported_token(found: Diagnosis) -> float | None:
    """The log's memory divided by the log's tokens: true whatever the model is, and all there is for an unknown one."""
    facts = found.facts
    if facts.available_kv is None or facts.available_kv.low <= 0 or not facts.reported_tokens:
        return None
    return facts.available_kv.middle / facts.reported_tokens
