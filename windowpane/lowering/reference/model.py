"""A description as callables in plain torch, for any device and dtype: the yardstick for every other lowering.

Work that leaves no trace is skipped: the last layer that keeps anything does so for all rows, but everything else, like
all layers after it, runs only for rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from windowpane.device.pages import KVPages
from windowpane.lowering.adapters import PlainRows
from windowpane.lowering.group import ALONE, RankGroup, look_up
from windowpane.lowering.linear import Linear, Parameters
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.mixers import MIXERS, Branch, make_mixer, write_present
from windowpane.lowering.reference.ops import PLAIN, Ops
from windowpane.lowering.rope import RopeTables
from windowpane.models.blocks import Centroids, Decoder, Join, Layer
from windowpane.schedule.step import Step

LayerCall = Callable[[torch.Tensor, StepState], torch.Tensor]


class ReferenceModel:
    """Of several ranks, each has its own heads, its own part of each MLP and of the vocabulary.

    `kinds`: the class of each kind of mixer, as in `make_mixer`. A drafter that joins embeddings and hidden states
    takes the former from its `target`.

    A pass may replace entries of `layers` by other callables that compute the same.
    """

    def __init__(
        self, decoder: Decoder, parameters: Parameters, max_model_len: int, group: RankGroup = ALONE, ops: Ops = PLAIN,
        kinds: Mapping[type, Any] = MIXERS, target: ReferenceModel | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.group, self.ops, self._target = decoder, group, ops, target
        self._adapters = parameters.adapters
        self.embedding = parameters.table(decoder.embedding)
        self.head = parameters.linear(decoder.head) if decoder.head else Linear(self.embedding)
        self.final_norm = parameters.norm(decoder.norm)
        context = Context(parameters, self.ops, group, RopeTables(max_model_len), decoder.shared_layers)
        self._per_layer = PerLayerValues(decoder, parameters, group) if decoder.per_layer else None
        self._join = Joining(decoder.join, parameters, ops) if decoder.join else None
        self._centroids = CentroidHead(decoder.centroids, parameters, ops, group) if decoder.centroids else None
        self.layers: list[LayerCall] = [
            ReferenceLayer(layer, context, kinds, decoder.last_keeping_block if index == decoder.last_keeper else None)
            for index, layer in enumerate(decoder.layers)
        ]

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = look_up(self.embedding, tokens, self.group)
        if self.decoder.embedding_multiplier != 1.0:
            hidden = hidden * torch.tensor(self.decoder.embedding_multiplier, dtype=hidden.dtype)
        return hidden

    def final_hidden(
        self,
        step: Step,
        tokens: torch.Tensor,
        pages: KVPages,
        before: torch.Tensor | None = None,
        *,
        keeps: bool = True,
    ) -> torch.Tensor:
        """What the LM head takes [wanted rows, hidden size]: many rows of logits may be more than memory holds.

        `before` has what a joining drafter takes beside each token: the hidden state of the token before it. Without
        `keeps`, nothing is written: the rows are tried out, and may have no pages.
        """
        if self._adapters is not None:
            self._adapters.rows = PlainRows.of_step(step.adapters)
        if self._join is None:
            hidden = self.embedded(tokens)
        else:
            assert self._target is not None and before is not None
            hidden = self._join(self._target.embedded(tokens), before)
        per_layer = self._per_layer(tokens, hidden, self.ops.linear) if self._per_layer else None
        positions, wanted = (torch.from_numpy(x).to(tokens.device) for x in (step.rotary_positions, step.wanted))
        state = StepState(step, pages, per_layer, positions, wanted, step.segments, keeps, adapters=self._adapters)
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break  # a chunk in the middle of a prompt: nobody asks for more
            hidden = layer(hidden, state)
        for shared in list(state.present):
            write_present(self.ops, state, shared)
        if self._adapters is not None:
            self._adapters.rows = None
        return self.ops.norm(hidden, self.final_norm, self.decoder.norm)

    def passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of a joining drafter: what it takes beside the next token, from its own final hidden states."""
        return hidden if self._join is None else self._join.passed_on(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        if self._centroids is not None:
            return self._centroids(hidden, self.head)
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


class Joining:
    """What a drafter's layers begin with, from embeddings and hidden states of its target."""

    def __init__(self, described: Join, parameters: Parameters, ops: Ops) -> None:
        self._described, self._ops = described, ops
        self._norms = [(norm, parameters.norm(norm)) for norm in (described.embedding_norm, described.hidden_norm)]
        self._projection = parameters.linear(described.projection)
        self._back = None if described.back is None else parameters.linear(described.back)

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        parts = [
            x if norm is None else self._ops.norm(x, weight, norm)
            for x, (norm, weight) in zip((embedded, before), self._norms, strict=True)
        ]
        return self._ops.linear(torch.cat(parts, dim=-1), self._projection)

    def passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._back is None else self._ops.linear(hidden, self._back)


class CentroidHead:
    """Logits of the tokens in the clusters that score highest; the rest of the vocabulary lies below all of them."""

    def __init__(self, described: Centroids, parameters: Parameters, ops: Ops, group: RankGroup) -> None:
        self._chosen, self._ops, self._group = described.chosen, ops, group
        self._scores = parameters.linear(described.scores)
        self._clusters = parameters.tensor(described.ordering).long().view(self._scores.outputs, -1)

    def __call__(self, hidden: torch.Tensor, head: Linear) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        assert isinstance(head.weight, torch.Tensor)
        best = self._ops.linear(hidden, self._scores).topk(self._chosen, dim=-1).indices
        tokens = self._clusters[best].flatten(1)
        rows = look_up(head.weight, tokens.flatten(), self._group).view(*tokens.shape, -1)
        logits = (rows @ hidden[:, :, None]).squeeze(-1).float()
        below = logits.min(dim=-1, keepdim=True).values - 1.0
        return below.repeat(1, self._clusters.numel()).scatter_(1, tokens, logits)


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
