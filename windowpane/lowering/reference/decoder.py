"""One decoder for every recipe: embeds, runs layers over pages and activations, and returns the logits asked for.

Work that leaves no trace is skipped: the last layer that owns KV computes K and V for all tokens but everything else,
like all layers after it, only for tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from windowpane.attention.reference import attend_decoding
from windowpane.attention.scores import Scores
from windowpane.device.pages import KVPages, LayerPages
from windowpane.device.step import Queries, Segment, Step
from windowpane.lowering.cpu.ops import ops_for
from windowpane.lowering.group import ALONE, RankGroup, look_up, summed
from windowpane.lowering.packed import PackedWeight, Weight, stack
from windowpane.lowering.recipe import LayerRecipe, Recipe
from windowpane.lowering.reference.ops import ACTIVATIONS, Angles, DecodingLayer, LayerParts, Ops
from windowpane.lowering.rope import Rope, rotate

Weights = dict[str, torch.Tensor | PackedWeight]
Product = Callable[[torch.Tensor, Weight], torch.Tensor]


@dataclass(slots=True)
class _Pass:
    """The state of one forward pass. `present` keeps K and V of layers that others share until the last has read it."""

    step: Step
    pages: KVPages
    queries: list[Queries]
    query_positions: torch.Tensor
    narrowed: bool = False
    present: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    angles: dict[Rope, Angles] = field(default_factory=dict)


class Decoder:
    """Takes its tensors out of `weights`, so that fused copies do not double the memory.

    Of several ranks, each has a decoder with its own heads, its own part of each MLP and of the vocabulary.
    """

    def __init__(self, recipe: Recipe, weights: Weights, group: RankGroup = ALONE) -> None:
        self.recipe = recipe
        self.group = group
        self._ropes = _RopeTables()
        take = _Taker(weights, recipe)
        self.embedding = take.tensor("embed_tokens.weight")
        self.ops = ops_for(self.embedding)
        self.head: Weight = weights.pop(recipe.head) if recipe.head else self.embedding
        self.final_norm = take.norm("norm")
        self._per_layer = _PerLayerInputs(recipe, take, self.ops, group) if recipe.per_layer_width else None
        shared = {layer.kv_layer for layer in recipe.layers if layer.kv_layer != layer.index}
        self.layers: list[_Layer] = []
        for layer in recipe.layers:
            owner = None if layer.kv_layer == layer.index else self.layers[layer.kv_layer]
            self.layers.append(
                _Layer(recipe, layer, take, self.ops, group, self._ropes, owner, is_shared=layer.index in shared)
            )

    def forward(self, step: Step, pages: KVPages) -> torch.Tensor:
        """float32 logits [wanted rows, vocabulary]."""
        return self.logits(self.final_hidden(step, pages))

    def final_hidden(self, step: Step, pages: KVPages) -> torch.Tensor:
        """What the LM head takes [wanted rows, hidden size]: many rows of logits may be more than memory holds."""
        recipe = self.recipe
        embedded = look_up(self.embedding, step.tokens, self.group)
        if recipe.embedding_scale != 1.0:
            embedded = embedded * torch.tensor(recipe.embedding_scale, dtype=embedded.dtype)
        per_layer = self._per_layer(step.tokens, embedded) if self._per_layer else None
        state = _Pass(step, pages, step.all_queries(), step.positions)
        hidden = embedded
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break  # a chunk in the middle of a prompt: nobody asks for more
            hidden = layer(hidden, state, None if per_layer is None else per_layer[:, layer.recipe.index])
        for owner, rows in state.present.items():
            _write(self.ops, pages.layers[owner], step, rows)
        return self.ops.norm(hidden, self.final_norm, recipe.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.group.all_gather(self.ops.linear(hidden, self.head)).float()
        cap = self.recipe.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Layer:
    """One decoder layer. `owner` is the layer whose KV it shares, None where it owns its own.

    `is_shared`: later layers read its present K and V, so they are written after those.
    """

    def __init__(
        self,
        model: Recipe,
        recipe: LayerRecipe,
        take: _Taker,
        ops: Ops,
        group: RankGroup,
        ropes: _RopeTables,
        owner: _Layer | None,
        *,
        is_shared: bool,
    ) -> None:
        self.model, self.recipe = model, recipe
        self._scores = Scores(recipe.scale)
        self.owns_kv = owner is None
        self.is_shared = is_shared
        self.ops, self.group, self._ropes = ops, group, ropes
        at = f"layers.{recipe.index}."
        self.input_norm = take.norm(f"{at}input_layernorm")
        self.post_attention_norm = take.norm(f"{at}post_attention_layernorm")
        if model.sandwich:
            self.pre_mlp_norm = take.norm(f"{at}pre_feedforward_layernorm")
            self.post_mlp_norm = take.norm(f"{at}post_feedforward_layernorm")
        names = ["q_proj"]
        if self.owns_kv:
            names += ["k_proj"] if recipe.latent else ["k_proj", "v_proj"]
        self.qkv, self.qkv_bias = take.linear(*(f"{at}self_attn.{name}" for name in names))
        self.out, self.out_bias = take.linear(f"{at}self_attn.o_proj")
        self.q_norm = take.norm(f"{at}self_attn.q_norm") if model.qk_norm else None
        self.k_norm: torch.Tensor | None = None
        if model.qk_norm:
            self.k_norm = take.norm(f"{at}self_attn.k_norm") if owner is None else owner.k_norm
        self.gate_up, self.gate_up_bias = take.linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        self.down, self.down_bias = take.linear(f"{at}mlp.down_proj")
        self.activation = ACTIVATIONS[model.activation]
        self.scalar = take.tensor(f"{at}layer_scalar") if model.layer_scalars else None
        if model.per_layer_width:
            self.per_layer_gate, _ = take.linear(f"{at}per_layer_input_gate")
            self.per_layer_out, _ = take.linear(f"{at}per_layer_projection")
            self.per_layer_norm = take.norm(f"{at}post_per_layer_input_norm")
        self._at_once: tuple[LayerPages, DecodingLayer | None] | None = None

    def __call__(self, hidden: torch.Tensor, state: _Pass, per_layer: torch.Tensor | None) -> torch.Tensor:
        if not state.step.segments and (at_once := self._decoding_layer(state.pages)) is not None:
            return at_once(hidden, state.step, self._angles(state))
        normed = self.ops.norm(hidden, self.input_norm, self.model.norm_eps)
        if self.recipe.index == self.model.last_kv_owner and len(state.step.wanted) < len(hidden):
            present = self._store_form(self.ops.linear(normed, *self._kv_weights()), state)
            hidden, normed = self._narrow(hidden, normed, state)
            queries = self._queries(self.ops.linear(normed, *self._q_weights()), state)
        elif self.owns_kv:
            projected = self.ops.linear(normed, self.qkv, self.qkv_bias)
            width = self.recipe.query_heads * self.recipe.head_dim
            queries = self._queries(projected[:, :width], state)
            present = self._store_form(projected[:, width:], state)
        else:
            queries = self._queries(self.ops.linear(normed, self.qkv, self.qkv_bias), state)
            present = state.present[self.recipe.kv_layer]
        if per_layer is not None and state.narrowed:
            per_layer = per_layer[state.step.wanted]
        attended = self._summed(self._attend(queries, present, state), self.out, self.out_bias)
        if self.owns_kv:
            self._keep(present, state)
        return self._feed_forward(hidden, attended, per_layer)

    def _feed_forward(
        self, hidden: torch.Tensor, attended: torch.Tensor, per_layer: torch.Tensor | None
    ) -> torch.Tensor:
        ops, eps = self.ops, self.model.norm_eps
        if self.model.sandwich:
            hidden = ops.add_normed(hidden, attended, self.post_attention_norm, eps)
            mixed = self._mlp(ops.norm(hidden, self.pre_mlp_norm, eps))
            hidden = ops.add_normed(hidden, mixed, self.post_mlp_norm, eps)
        else:
            hidden = hidden + attended
            hidden = hidden + self._mlp(ops.norm(hidden, self.post_attention_norm, eps))
        if per_layer is not None:
            gated = self.activation(ops.linear(hidden, self.per_layer_gate)) * per_layer
            hidden = ops.add_normed(hidden, ops.linear(gated, self.per_layer_out), self.per_layer_norm, eps)
        return hidden if self.scalar is None else hidden * self.scalar

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        def product(x: torch.Tensor, down: Weight, bias: torch.Tensor | None) -> torch.Tensor:
            return self.ops.mlp(x, (self.gate_up, self.gate_up_bias), (down, bias), self.model.activation)

        return summed(product, x, self.down, self.down_bias, self.group)

    def _summed(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return summed(self.ops.linear, x, weight, bias, self.group)

    def _narrow(self, hidden: torch.Tensor, normed: torch.Tensor, state: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """From here on only wanted rows go on."""
        state.narrowed = True
        state.queries = state.step.wanted_queries()
        state.query_positions = state.step.positions[state.step.wanted]
        state.angles = {}
        return hidden[state.step.wanted], normed[state.step.wanted]

    # -- attention -------------------------------------------------------------------------------------------------

    def _q_weights(self) -> tuple[Weight, torch.Tensor | None]:
        width = self.recipe.query_heads * self.recipe.head_dim
        return self.qkv[:width], None if self.qkv_bias is None else self.qkv_bias[:width]

    def _kv_weights(self) -> tuple[Weight, torch.Tensor | None]:
        width = self.recipe.query_heads * self.recipe.head_dim
        return self.qkv[width:], None if self.qkv_bias is None else self.qkv_bias[width:]

    def _queries(self, projected: torch.Tensor, state: _Pass) -> torch.Tensor:
        """Rotated queries [rows, heads, dim]."""
        q = projected.reshape(-1, self.recipe.query_heads, self.recipe.head_dim)
        return state.pages.layers[self.recipe.kv_layer].transformed_queries(self._turned_heads(q, self.q_norm, state))

    def _store_form(self, projected: torch.Tensor, state: _Pass) -> list[torch.Tensor]:
        """What this step's tokens will be stored as: K and V, or one latent, each [tokens, heads, dim]."""
        recipe, eps = self.recipe, self.model.norm_eps
        heads = projected.reshape(projected.shape[0], -1, recipe.head_dim)
        stored = state.pages.layers[recipe.index]
        if recipe.latent:
            return [stored.through_format(self.ops.heads(heads, None, eps, None), 0)]
        k, v = heads[:, : recipe.kv_heads], heads[:, recipe.kv_heads :]
        if self.model.v_norm:
            v = self.ops.heads(v, None, eps, None)
        keys, values = stored.transformed_keys(self._turned_heads(k, self.k_norm, state)), stored.transformed(v)
        return [stored.through_format(keys, 0), stored.through_format(values, 1)]

    def _attend(self, queries: torch.Tensor, present: list[torch.Tensor], state: _Pass) -> torch.Tensor:
        outputs = []
        if state.step.num_decoding:
            outputs.append(self._attend_decoding(queries[: state.step.num_decoding], present, state))
        for segment, asked in zip(state.step.segments, state.queries, strict=True):
            if asked.first < asked.last:
                outputs.append(self._attend_chunk(queries[asked.first : asked.last], asked, segment, present, state))
        if not outputs:
            return queries.flatten(1)
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return state.pages.layers[self.recipe.kv_layer].transformed(attended).flatten(1)

    def _attend_chunk(
        self, queries: torch.Tensor, asked: Queries, segment: Segment, present: list[torch.Tensor], state: _Pass
    ) -> torch.Tensor:
        recipe = self.recipe
        past_from = recipe.mask.first_visible(segment.start)
        parts = [x[segment.row : segment.end_row].transpose(0, 1) for x in present]
        if past_from < segment.start:
            past = state.pages.layers[recipe.kv_layer].past(segment.slot, past_from, segment.start)
            parts = [torch.cat([old.to(new.dtype), new], dim=1) for old, new in zip(past, parts, strict=True)]
        positions = torch.arange(past_from, segment.stop, device=queries.device)
        keys, values = self._keys_and_values(parts, positions)
        return self.ops.attend_chunk(queries, asked.positions, keys, values, past_from, recipe.mask, self._scores)

    def _attend_decoding(self, queries: torch.Tensor, present: list[torch.Tensor], state: _Pass) -> torch.Tensor:
        recipe, step = self.recipe, state.step
        now = [x[: step.num_decoding] for x in present]
        stored = state.pages.layers[recipe.kv_layer]
        if not recipe.latent:
            keys, values = now
            return self.ops.attend_decoding(stored, step, queries, keys, values, recipe.mask, self._scores)
        past, positions, counts = stored.decoding_past(step, recipe.mask)
        past_keys, past_values = self._keys_and_values([x.to(queries.dtype) for x in past], positions)
        keys, values = self._keys_and_values([x[:, :, None] for x in now], step.positions[: step.num_decoding, None])
        return attend_decoding(queries, past_keys, past_values, counts, keys[:, :, 0], values[:, :, 0], self._scores)

    def _keys_and_values(self, parts: list[torch.Tensor], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[…, heads, tokens, dim] each, from what is stored; K of a latent is rebuilt for […, tokens] positions."""
        if not self.recipe.latent:
            return parts[0], parts[1]
        latent = parts[0]
        cos, sin = self._ropes.at(self.recipe.rope, positions)
        assert self.k_norm is not None  # a latent is what remains of K before its norm's weight
        keys = rotate(latent.float() * self.k_norm, cos[..., None, :, :], sin[..., None, :, :])
        return keys.to(latent.dtype), latent

    def _keep(self, present: list[torch.Tensor], state: _Pass) -> None:
        """Write now, unless a later layer still reads these tokens from the activations."""
        if self.is_shared:
            state.present[self.recipe.index] = present
        else:
            _write(self.ops, state.pages.layers[self.recipe.index], state.step, present)

    def _turned_heads(self, x: torch.Tensor, weight: torch.Tensor | None, state: _Pass) -> torch.Tensor:
        """Norm heads of this step's rows, once narrowed of those that still ask, and turn them by their positions."""
        eps = self.model.norm_eps if self.model.qk_norm else None
        return self.ops.heads(x, weight, eps, self._angles(state))

    def _angles(self, state: _Pass) -> Angles | None:
        rope = self.recipe.rope
        if rope.kind is not None and rope not in state.angles:
            state.angles[rope] = self._ropes.at(rope, state.query_positions)
        return state.angles.get(rope)

    def _decoding_layer(self, pages: KVPages) -> DecodingLayer | None:
        """The layer in one call, where it is a plain one and there is such a call."""
        if not self.owns_kv or self.is_shared or self.recipe.latent or self.model.per_layer_width:
            return None
        if self.group.place.ranks > 1:
            return None  # ranks add up what they have in the middle of it
        stored = pages.layers[self.recipe.index]
        if self._at_once is None or self._at_once[0] is not stored:
            self._at_once = stored, self.ops.decoding_layer(self._parts(), stored)
        return self._at_once[1]

    def _parts(self) -> LayerParts:
        model, recipe = self.model, self.recipe
        return LayerParts(
            input_norm=self.input_norm,
            qkv=self.qkv,
            qkv_bias=self.qkv_bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            out=self.out,
            out_bias=self.out_bias,
            post_attention_norm=self.post_attention_norm,
            pre_mlp_norm=self.pre_mlp_norm if model.sandwich else None,
            gate_up=self.gate_up,
            gate_up_bias=self.gate_up_bias,
            down=self.down,
            down_bias=self.down_bias,
            post_mlp_norm=self.post_mlp_norm if model.sandwich else None,
            scalar=self.scalar,
            query_heads=recipe.query_heads,
            kv_heads=recipe.kv_heads,
            head_dim=recipe.head_dim,
            mask=recipe.mask,
            head_norms=model.qk_norm,
            v_norm=model.v_norm,
            activation=model.activation,
            eps=model.norm_eps,
            scores=self._scores,
        )


def _write(ops: Ops, layer: LayerPages, step: Step, rows: list[torch.Tensor]) -> None:
    """Store what the future can see of each token."""
    if step.num_decoding:
        ops.write_decoding(layer, step, [x[: step.num_decoding] for x in rows])
    for s in step.segments:
        first = layer.first_written(s.start, s.stop)
        if first < s.stop:
            kept = slice(s.row + first - s.start, s.end_row)
            layer.write(s.slot, first, [x[kept] for x in rows])
        layer.write_tails(s.slot, s.start, [x[s.row : s.end_row] for x in rows])


class _PerLayerInputs:
    """Gemma's per-layer embeddings: a second embedding of each token, one part per layer."""

    def __init__(self, recipe: Recipe, take: _Taker, ops: Ops, group: RankGroup) -> None:
        self.recipe, self.ops, self.group = recipe, ops, group
        self.table = take.tensor("embed_tokens_per_layer.weight")
        self.projection, _ = take.linear("per_layer_model_projection")
        self.norm = take.norm("per_layer_projection_norm")

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor, product: Product | None = None) -> torch.Tensor:
        """[tokens, layers, width]."""
        width = self.recipe.per_layer_width
        shape = (len(tokens), len(self.recipe.layers), width)
        looked_up = look_up(self.table, tokens, self.group) * torch.tensor(width**0.5, dtype=embedded.dtype)
        projected = (product or self.ops.linear)(embedded, self.projection) * self.recipe.hidden_size**-0.5
        normed = self.ops.norm(projected.view(shape), self.norm, self.recipe.norm_eps)
        return (normed + looked_up.view(shape)) * 2**-0.5


class _RopeTables:
    """cos and sin by position, grown as sequences do; layers that rotate alike share one."""

    def __init__(self) -> None:
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions: dict[Rope, int] = {}

    def at(self, rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        needed = int(positions.max()) + 1 if len(positions) else 1
        if self._positions.get(rope, 0) < needed:
            self._positions[rope] = max(1024, 2 * needed)
            self._tables[rope] = rope.table(self._positions[rope], positions.device, torch.float32)
        cos, sin = self._tables[rope]
        return cos[positions], sin[positions]


class _Taker:
    """Takes tensors out of the checkpoint by their name below the text model's prefix."""

    def __init__(self, weights: Weights, recipe: Recipe) -> None:
        self._weights = weights
        self._prefix = recipe.prefix
        self._norms_add_one = recipe.norms_add_one

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._weights.pop(self._prefix + name)
        assert isinstance(tensor, torch.Tensor), f"{name} is quantized, and only projections may be"
        return tensor

    def norm(self, name: str) -> torch.Tensor:
        """In float32, as norms are computed."""
        weight = self.tensor(f"{name}.weight").float()
        return weight + 1.0 if self._norms_add_one else weight

    def linear(self, *names: str) -> tuple[Weight, torch.Tensor | None]:
        """Weight and bias of these projections of one input, stacked."""
        weights = [self._weights.pop(f"{self._prefix}{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names if f"{self._prefix}{name}.bias" in self._weights]
        bias = torch.cat(biases) if biases else None
        return stack(weights), bias
