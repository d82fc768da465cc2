"""What mixers of the reference are called with: what all of them share, and one step on its way through them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from windowpane.device.pages import KVPages
from windowpane.lowering.adapters import Adapters
from windowpane.lowering.group import RankGroup
from windowpane.lowering.linear import Parameters
from windowpane.lowering.reference.ops import Angles, Ops
from windowpane.lowering.reference.routing import Routing
from windowpane.lowering.rope import RopeTables
from windowpane.models.rope import Rope
from windowpane.schedule.step import Segment, Step


@dataclass(frozen=True, slots=True)
class Context:
    """What all mixers of a model share. `shared`: layers whose present K and V later layers read."""

    parameters: Parameters
    ops: Ops
    group: RankGroup
    ropes: RopeTables
    shared: frozenset[int]


@dataclass(slots=True)
class StepState:
    """One step on its way through the layers. Without `keeps`, it leaves nothing in pages.

    `present` has K and V of this step's rows until they are written, by layer, and `written` those that a drafter finds
    in its target's pages; `read` what the wanted rows read of a
    recurrent state, and `routed` the experts they visit, from the time that it is kept until the rows go on.
    `adapters` are the model's, with this step's rows.
    """

    step: Step
    pages: KVPages
    per_layer: torch.Tensor | None
    positions: torch.Tensor
    wanted: torch.Tensor
    segments: tuple[Segment, ...]
    keeps: bool = True
    narrowed: bool = False
    present: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    written: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    read: dict[int, torch.Tensor] = field(default_factory=dict)
    routed: dict[int, Routing] = field(default_factory=dict)
    angles: dict[Rope, Angles] = field(default_factory=dict)
    adapters: Adapters | None = None

    @property
    def has_adapters(self) -> bool:
        return self.adapters is not None and self.adapters.rows is not None

    def narrow(self) -> None:
        """From here on only the wanted rows go on."""
        self.narrowed, self.segments, self.angles = True, self.step.wanted_segments, {}
        self.positions = self.positions[self.wanted]
        self.per_layer = None if self.per_layer is None else self.per_layer[self.wanted]
        if self.adapters is not None:
            self.adapters.narrow(self.wanted)
