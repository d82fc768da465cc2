"""What rank 0 says to the others, in order, and what they answer. Plain values: each is pickled as it is.

rank 0                                     every other rank
Join ────────────────────────────────────► finds its group
Load(job) ───────────────────────────────► reads its part of the weights
        ◄──────────────────────────────── Loaded
Start ───────────────────────────────────► makes its runner, together with all others
        ◄──────────────────────────────── Ready(report)
Forward(batch) ──────────────────────────► runs the step; collectives keep ranks together
TakeSampled ─────────────────────────────► takes rank 0's tokens
PromptLogits ────────────────────────────► its part of more logits
Draft(known) ────────────────────────────► its part of a model that drafts
AddAdapter, RemoveAdapter ───────────────► reads its part of an adapter, or forgets it
(end of the pipe) ───────────────────────► ends
        ◄──────────────────────────────── Failed, at any time, and then it ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windowpane.drafts.drafter import Known
from windowpane.models.tensors import RankPlace
from windowpane.parallel.job import RankJob, RankReport
from windowpane.schedule.batch import Batch


@dataclass(frozen=True, slots=True)
class Join:
    """`backend` is gloo or nccl; `host` and `port` are where rank 0 has its store."""

    place: RankPlace
    device: str
    backend: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Load:
    job: RankJob


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class Forward:
    batch: Batch
    all_logits_slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class TakeSampled:
    """The tokens of the last step follow from rank 0, device to device."""


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """More rows of the last step's logits."""

    slot: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Draft:
    """Every rank finds the same drafts, of which rank 0's are taken."""

    known: Sequence[Known]


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Rank 0 has read it and found nothing wrong."""

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    number: int


Order = Join | Load | Start | Forward | TakeSampled | PromptLogits | Draft | AddAdapter | RemoveAdapter


@dataclass(frozen=True, slots=True)
class Awake:
    """Imports are done."""


@dataclass(frozen=True, slots=True)
class Loaded:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    report: RankReport


@dataclass(frozen=True, slots=True)
class Failed:
    """`expected`: the message says what is wrong and what to do, as errors here do; else it names a bug's exception."""

    message: str
    expected: bool


Answer = Awake | Loaded | Ready | Failed
