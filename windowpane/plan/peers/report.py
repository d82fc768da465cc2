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

    `version` is an exact release and `covers` the range of releases that behave alike. `async_scheduling` is None where
    it changes nothing. `max_num_batched_tokens` is the engine's own default where the user gave none. `reported_tokens`
    and `concurrency` are what the engine's own log says; they are None, and `error` says why, where it would not start.
    The breakdown is filled in as far as the engine gets before that. `charge_note` says what is reserved and why,
    `report_note` what the reported number means, each in a plain sentence.
    """

    engine: str
    version: str
    covers: str
    async_scheduling: bool | None
    max_num_batched_tokens: int
    reported_tokens: int | None = None
    concurrency: float | None = None
    groups: tuple[PeerGroup, ...] = ()
    num_blocks: int | None = None
    block_bytes: int | None = None
    bytes_per_request: int | None = None
    charge_note: str = ""
    report_note: str = ""
    error: str | None = None

    @property
    def note(self) -> str:
        return f"Would not start: {self.error}." if self.error else f"{self.charge_note} {self.report_note}"

    def has_flags(self, async_scheduling: bool) -> bool:
        """Whether this is the row of someone who runs the newest release with this flag."""
        return self.async_scheduling is async_scheduling
