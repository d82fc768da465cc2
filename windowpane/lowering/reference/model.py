"""A description as callables in plain torch, for any device and dtype: the yardstick for every other lowering.

Work that leaves no trace is skipped: the last layer that keeps anything does so for all rows, but everything else, like
all layers after it, runs only for rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from windowpane.device.pages import KVPages
from windowpane.lowering.group import ALONE, RankGroup, look_up
from windowpane.lowering.linear import Linear, Parameters
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.mixers import MIXERS, Branch, make_mixer, write_present
from windowpane.lowering.reference.ops import PLAIN, Ops
from windowpane.lowering.rope import RopeTables
from windowpane.models.blocks import Decoder, Layer
from windowpane.schedule.step import Step

LayerCall = Callable[[torch.Tensor, StepState], torch.Tensor]


class ReferenceModel:
    """Of several ranks, each has its own heads, its own part of each MLP and of the vocabulary.

    `kinds`: the class of each kind of mixer, as in `make_mixer`.

    A pass may replace entries of `layers` by other callables that compute the same.
    """

    def __init__(
        self, decoder: Decoder, parameters: Parameters, max_model_len: int, group: RankGroup = ALONE, ops: Ops = PLAIN,
        kinds: Mapping[type, Any] = MIXERS,
    ) -> None:  # fmt: skip
        self.decoder, self.group, self.ops = decoder, group, ops
        self.embedding = parameters.table(decoder.embedding)
        self.head = parameters.linear(decoder.head) if decoder.head else Linear(self.embedding)
        self.final_norm = parameters.norm(decoder.norm)
        context = Context(parameters, self.ops, group, RopeTables(max_model_len), decoder.shared_layers)
        self._per_layer = PerLayerValues(decoder, parameters, group) if decoder.per_layer else None
        self.layers: list[LayerCall] = [
            ReferenceLayer(layer, context, kinds, decoder.last_keeping_block if index == decoder.last_keeper else None)
            for index, layer in enumerate(decoder.layers)
        ]

    def final_hidden(self, step: Step, tokens: torch.Tensor, pages: KVPages) -> torch.Tensor:
        """What the LM head takes [wanted rows, hidden size]: many rows of logits may be more than memory holds."""
        hidden = look_up(self.embedding, tokens, self.group)
        if self.decoder.embedding_multiplier != 1.0:
            hidden = hidden * torch.tensor(self.decoder.embedding_multiplier, dtype=hidden.dtype)
        per_layer = self._per_layer(tokens, hidden, self.ops.linear) if self._per_layer else None
        positions, wanted = (torch.from_numpy(x).to(tokens.device) for x in (step.rotary_positions, step.wanted))
        state = StepState(step, pages, per_layer, positions, wanted, step.segments)
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break  # a chunk in the middle of a prompt: nobody asks for more
            hidden = layer(hidden, state)
        for shared in list(state.present):
            write_present(self.ops, state, shared)
        return self.ops.norm(hidden, self.final_norm, self.decoder.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        logits = self.group.all_gather(self.ops.linear(hidden, self.head)).float()
        if self.decoder.logit_multiplier != 1.0:
            logits = logits * self.decoder.logit_multiplier
        cap = self.decoder.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class ReferenceLayer:
    """`narrows_at`: the last block of all that keeps anything, so only wanted rows go on from it."""

    def __init__(self, described: Layer, context: Context, kinds: Mapping[type, Any], narrows_at: int | None) -> None:
        self.described, self._narrows_at = described, narrows_at
        own = context.parameters, context.ops
        self.blocks = [
            ResidualBlock(block, make_mixer(block.mixer, context, kinds), *own) for block in described.blocks
        ]
        self.scalar = None if described.scalar is None else context.parameters.tensor(described.scalar)

    def __call__(self, hidden: torch.Tensor, state: StepState) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index == self._narrows_at and len(state.wanted) < len(hidden):
                block.keep(hidden, state)
                state.narrow()
                hidden = hidden[state.wanted]
                if not len(hidden):
                    return hidden
            hidden = block.add_to(hidden, state)
        return hidden if self.scalar is None else hidden * self.scalar


class ResidualBlock(Branch):
    """A block on the residual stream."""

    def add_to(self, hidden: torch.Tensor, state: StepState) -> torch.Tensor:
        after = self.described.after
        if after is not None and self.after is not None and self.described.multiplier == 1.0:
            return self._ops.add_normed(hidden, self.mixer(self.normed(hidden), state), self.after, after)
        return hidden + self(hidden, state)


class PerLayerValues:
    """Gemma's per-layer embeddings: a second embedding of each token, one part per layer."""

    def __init__(self, decoder: Decoder, parameters: Parameters, group: RankGroup) -> None:
        assert decoder.per_layer is not None
        self._described, self._group = decoder.per_layer, group
        self._layers, self._hidden_size = len(decoder.layers), decoder.hidden_size
        self.table = parameters.tensor(self._described.table)
        self.projection = parameters.linear(self._described.projection)
        self.norm = parameters.norm(self._described.norm)

    def __call__(
        self, tokens: torch.Tensor, embedded: torch.Tensor, product: Callable[[torch.Tensor, Linear], torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, layers, width]."""
        width = self._described.width
        shape = (len(tokens), self._layers, width)
        looked_up = look_up(self.table, tokens, self._group) * torch.tensor(width**0.5, dtype=embedded.dtype)
        projected = product(embedded, self.projection) * self._hidden_size**-0.5
        normed = PLAIN.norm(projected.view(shape), self.norm, self._described.norm)
        return (normed + looked_up.view(shape)) * 2**-0.5
