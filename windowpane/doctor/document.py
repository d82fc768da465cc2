"""`doctor --json`: the diagnosis for programs. Fields are described in docs/doctor.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from windowpane.doctor.diagnosis import Diagnosis

SCHEMA_VERSION = 1


def document(found: Diagnosis) -> dict[str, Any]:
    explained, capacity = found.explanation, found.capacity
    length = explained.setting.max_model_len if explained else None
    return {
        "schema_version": SCHEMA_VERSION,
        "facts": asdict(found.facts),
        "model": found.spec.name if found.spec else None,
        "failures": [asdict(failure) for failure in found.failures],
        "vllm": asdict(explained.report) if explained else None,
        "exact": explained.exact if explained and found.facts.reported_tokens is not None else None,
        "assumed": list(explained.assumed) if explained else [],
        "levers": [{"change": lever.what, **asdict(lever.report)} for lever in found.levers],
        "fixed_bytes_per_sequence": found.sizing.per_sequence.fixed_bytes_per_sequence if found.sizing else None,
        "bytes_per_token": found.sizing.per_sequence.bytes_per_token if found.sizing else None,
        "concurrency": capacity.byte_ratio(length) if capacity and length else None,
        "sequences": capacity.sequences(length) if capacity and length else None,
        "missing": list(found.missing),
        "doubts": list(found.doubts),
    }
