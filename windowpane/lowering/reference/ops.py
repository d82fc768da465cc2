"""The operations that mixers are made of, in plain torch for any device and dtype. `lowering.cpu` has faster ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from windowpane.attention.mask import Mask
from windowpane.attention.reference import attend, attend_decoding
from windowpane.attention.scores import Scores
from windowpane.device.pages import KEYS, QUERIES, LayerPages
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import product
from windowpane.lowering.rope import rotate
from windowpane.models.blocks import LAYER, Experts, GatedMLP, Norm
from windowpane.schedule.step import Step

Angles = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

# Of what goes up, where there is no gate.
UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": lambda x: F.relu(x).square()}


class Ops:
    """Norms are computed in float32, whatever the dtype."""

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = product(x, linear.weight, linear.bias)
        if linear.adapter is not None:
            linear.adapter.add(x, out)
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Of the last dimension; the norm's weight is bound."""
        width = (x.shape[-1],)
        if norm.kind == LAYER:
            return F.layer_norm(x.float(), width, weight, None, norm.eps).to(x.dtype)
        return F.rms_norm(x.float(), width, weight, norm.eps).to(x.dtype)

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
        return hidden + self.norm(x, weight, norm)

    def heads(
        self, x: torch.Tensor, weight: torch.Tensor | None, norm: Norm | None, angles: Angles | None
    ) -> torch.Tensor:
        """[rows, heads, dim]: normed head by head and rotated by the rows' angles, where those are given."""
        if norm is not None:
            x = self.norm(x, weight, norm)
        if angles is None:
            return x
        cos, sin = angles
        return rotate(x.float(), cos[:, None], sin[:, None]).to(x.dtype)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def mlp(self, x: torch.Tensor, gate_up: Linear, down: Linear, activation: str) -> torch.Tensor:
        return self.linear(self.gated(self.linear(x, gate_up), activation), down)

    def any_mlp(self, x: torch.Tensor, gate_up: Linear, down: Linear, described: GatedMLP) -> torch.Tensor:
        """Also one without a gate, or with a multiplier of it."""
        if not described.has_gate:
            return self.linear(UNGATED[described.activation](self.linear(x, gate_up)), down)
        if described.gate_multiplier == 1.0:
            return self.mlp(x, gate_up, down, described.activation)
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return self.linear(ACTIVATIONS[described.activation](gate * described.gate_multiplier) * up, down)

    def expert(self, x: torch.Tensor, gate_up: Linear, down: Linear, experts: Experts) -> torch.Tensor:
        """One of them, for the rows that chose it."""
        if experts.limit is None and experts.activation in ACTIVATIONS:
            return self.mlp(x, gate_up, down, experts.activation)
        made = self.linear(x, gate_up)
        if experts.limit is None:
            return self.linear(UNGATED[experts.activation](made), down)
        gate, up = made.chunk(2, dim=-1)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return self.linear(gate * torch.sigmoid(gate * experts.alpha) * (up + 1), down)

    def attend_decoding(
        self, stored: LayerPages, step: Step, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor:  # fmt: skip
        """Decoding tokens over their past in pages and themselves: all [sequences, heads, dim]."""
        past, _, counts = stored.decoding_past(step, mask)
        past_keys, past_values = (x.to(queries.dtype) for x in past)
        return attend_decoding(queries, past_keys, past_values, counts, keys, values, scores)

    def attend_chunk(
        self, queries: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_key: int,
        mask: Mask, scores: Scores,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens of one chunk over their past and each other; see `attend`."""
        return attend(queries, positions, keys, values, first_key, mask, scores)

    # -- rows and pages: coded formats have a basis that rows are transformed into, all [rows, heads, dim] -------------

    def asked_form(self, stored: LayerPages, queries: torch.Tensor) -> torch.Tensor:
        """Queries as they are multiplied with stored keys."""
        return stored.balanced(queries, QUERIES)

    def stored_form(self, stored: LayerPages, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values as later steps will read them."""
        keys, values = stored.balanced(keys, KEYS), stored.transformed(values)
        return [self.through_format(stored, keys, 0), self.through_format(stored, values, 1)]

    def attended_form(self, stored: LayerPages, attended: torch.Tensor) -> torch.Tensor:
        """Sums of stored values out of the basis."""
        return stored.transformed(attended)

    def through_format(self, stored: LayerPages, rows: torch.Tensor, part: int) -> torch.Tensor:
        """What rows are once stored and loaded."""
        return stored.through_format(rows, part)

    def behind_past(
        self, stored: LayerPages, slot: int, first: int, start: int, present: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """A slot's tokens [first, start) from pages, and the present behind them: K and V, or one latent, each [heads,
        tokens, dim].
        """
        past = stored.past(slot, first, start)
        return [torch.cat([old.to(new.dtype), new], dim=1) for old, new in zip(past, present, strict=True)]

    def store(
        self, stored: LayerPages, part: int, offsets: torch.Tensor, within: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """See `device.pages.Store`."""
        stored.store(part, offsets, within, rows)

    def write_decoding(self, stored: LayerPages, step: Step, rows: list[torch.Tensor]) -> None:
        stored.write_decoding(step, rows, partial(self.store, stored))


PLAIN = Ops()
