"""What another engine would do with the same memory and flags, in a form that every peer fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Caches that share one block table there. `padded_layers` are empty places that keep groups equally large."""

    name: str
    layers: int
    padded_layers: int
    block_tokens: int
    blocks_per_request: int
    bytes_per_request: int


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One engine, one release, one setting.

    `version` is an exact release (empty where the formulas are of no release in particular) and `covers` the range of
    releases that behave alike; `variant` tells rows of one release apart. `async_scheduling` is None where it changes
    nothing. `max_num_batched_tokens` is the engine's own default where the user gave none. `reported_tokens` and
    `concurrency` are what the engine's own log says; where it names no such figure, the first is None or the second
    computed here, and `report_note` says so. Both are None where it would not start (`error`) or where its arithmetic
    for this model is not known here (`unknown`). The breakdown is filled in as far as the engine gets before that.
    `charge_note` says what is reserved and why, `report_note` what the number means, each in a plain sentence.
    `same_flags` marks the row of someone who runs the newest vLLM with these flags; `alternative` one of a setting that
    was not asked for.
    """

    engine: str
    version: str
    covers: str
    async_scheduling: bool | None
    max_num_batched_tokens: int
    variant: str = ""
    reported_tokens: int | None = None
    concurrency: float | None = None
    groups: tuple[PeerGroup, ...] = ()
    num_blocks: int | None = None
    block_bytes: int | None = None
    bytes_per_request: int | None = None
    charge_note: str = ""
    report_note: str = ""
    error: str | None = None
    unknown: str | None = None
    same_flags: bool = False
    alternative: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.release}".rstrip()

    @property
    def release(self) -> str:
        return f"{self.covers} {self.variant}".strip()

    @property
    def note(self) -> str:
        if self.error:
            return f"Would not start: {self.error}."
        if self.unknown:
            return f"Not known here: {self.unknown}."
        return f"{self.charge_note} {self.report_note}"
