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

    `async_scheduling` is None where it changes nothing. `reported_tokens` and `concurrency` are what the engine's own
    log says; they are None, and `error` says why, where it would not start. The breakdown is filled in as far as the
    engine gets before that. `note` says in plain sentences what is reserved and what the reported number means.
    """

    engine: str
    version: str
    async_scheduling: bool | None
    reported_tokens: int | None
    concurrency: float | None
    note: str
    groups: tuple[PeerGroup, ...] = ()
    num_blocks: int | None = None
    block_bytes: int | None = None
    bytes_per_request: int | None = None
    error: str | None = None
