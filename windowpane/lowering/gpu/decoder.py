"""The decoder in Triton: the same arithmetic as `decoder.Decoder`, in far fewer launches and over device tables.

It takes over a decoder's weights. Decoding steps keep a fixed shape, so that they can be captured as graphs: whatever
varies (positions, slots, tables) is read from device tensors.

Three things differ from the plain decoder, none of them visible in results:
- Rotary dims of latent layers are made adjacent, in the projections, norms and the output's columns alike, so that a
  kernel can rotate them as blocks.
- Steps that only decode store K and V while making them. The row written is one that no query of the step can see: a
  sequence's own next row, or one that its window has just let go of.
- Where a KV format has a basis of its own, values are turned into it and out of it by the weights on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from windowpane.attention.chunk_attention import heads_of, hopper_scratch
from windowpane.attention.coded_chunks import make_chunk_attention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.attention.segments import Tiling
from windowpane.attention.triton.decode import DecodeScratch, decode, decode_programs, plan_decode
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.attention.triton.widen import plain_view
from windowpane.attention.triton.write import CodedRows, write, write_coded
from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.kv.decoded_past import decoded_past_bytes
from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links, has_chain, run_chain
from windowpane.lowering.gpu.kernels.gated import gated, gated_per_layer, is_gelu
from windowpane.lowering.gpu.kernels.heads import PageWrite, prepare_heads
from windowpane.lowering.gpu.kernels.logits import softcap
from windowpane.lowering.gpu.kernels.matvec import gated_matvec, matvec, pays
from windowpane.lowering.gpu.kernels.norms import residual_norm, rms_norm
from windowpane.lowering.gpu.kernels.packed import SPLIT_ROWS, packed_gated, packed_product
from windowpane.lowering.gpu.step import ChunkQueries, DeviceStep
from windowpane.lowering.group import look_up, summed
from windowpane.lowering.packed import JoinedWeight, PackedWeight, Weight, permute_inputs, permute_outputs
from windowpane.lowering.recipe import LayerRecipe, Recipe
from windowpane.lowering.reference.decoder import Decoder, _Layer
from windowpane.lowering.rope import Rope

Angles = tuple[torch.Tensor, torch.Tensor]

LEAST_PAIRS = 16  # the narrowest block of a tensor-core product
# From this compute capability on, a kernel may load while the one before ends: weights, and what an earlier one made.
OVERLAPPING_LAUNCHES = (9, 0)


@dataclass(frozen=True, slots=True)
class _Present:
    """K and V of this step's rows (a latent's V is the latent), and their codes where pages are coded."""

    k: torch.Tensor
    v: torch.Tensor
    coded: CodedRows | None


@dataclass(slots=True)
class _Pass:
    """The state of one forward pass; `present` keeps K and V of layers that later ones share.

    `projected`: the next layer's queries, keys and values, where the layer before it has made them already.
    """

    step: DeviceStep
    positions: torch.Tensor
    chunks: ChunkQueries | None
    cum_tiles: dict[Mask, torch.Tensor]
    narrowed: bool = False
    present: dict[int, _Present] = field(default_factory=dict)
    projected: torch.Tensor | None = None


class FusedDecoder:
    """`max_rows` is the most sequences that decode in one step; `use_hopper` False keeps to the plain kernels."""

    def __init__(
        self,
        decoder: Decoder,
        pages: KVPages,
        tables: DeviceTables,
        max_model_len: int,
        max_rows: int,
        use_hopper: bool = True,
    ) -> None:
        self.recipe: Recipe = decoder.recipe
        self.embedding, self.head, self.final_norm = decoder.embedding, decoder.head, decoder.final_norm
        # Rounded as the plain decoder rounds it.
        self._embedding_scale = torch.tensor(self.recipe.embedding_scale, dtype=self.embedding.dtype).item()
        self._per_layer = decoder._per_layer
        self._group = decoder.group
        self._angles: dict[Rope, Angles] = {}
        self._masks = {layer.mask for layer in self.recipe.layers}
        device, dtype = self.embedding.device, self.embedding.dtype
        # Between ranks' collectives kernels wait for one another as usual.
        self._pdl = (
            device.type == "cuda"
            and self._group.place.ranks == 1
            and torch.cuda.get_device_capability(device) >= OVERLAPPING_LAUNCHES
        )
        scratches: dict[tuple[int, ...], DecodeScratch] = {}
        self.layers: list[FusedLayer] = []
        recipes = [layer.recipe for layer in decoder.layers]
        views = [_view(pages, r.kv_layer) for r in recipes]
        heads = [heads_of(view, r.query_heads, r.mask) for view, r in zip(views, recipes, strict=True)]
        prefill_scratch = None
        if use_hopper:
            rows = [plain_view(view, dtype) if view.code else view for view in views]
            prefill_scratch = hopper_scratch(zip(rows, heads, strict=True), max_model_len, device)
        decoded_bytes = decoded_past_bytes(pages.layout, str(dtype).removeprefix("torch."), max_model_len)
        decoded = torch.empty(decoded_bytes, dtype=torch.uint8, device=device)
        self.prefill_scratch_bytes = decoded_bytes + (prefill_scratch.bytes if prefill_scratch else 0)
        for layer, view in zip(decoder.layers, views, strict=True):
            r = layer.recipe
            shape = (r.kv_heads, r.query_heads // r.kv_heads, r.head_dim, decode_programs(view, device))
            if shape not in scratches:
                scratches[shape] = DecodeScratch(max_rows, *shape, device=device)
            angles = self._angles_of(r.rope, max_model_len, device)
            scratch = scratches[shape]
            self.layers.append(
                FusedLayer(
                    self.recipe, layer, pages, tables, view, angles, scratch, prefill_scratch, decoded, dtype, self._pdl
                )
            )
        for fused, following in zip(self.layers, self.layers[1:], strict=False):
            fused.next_norm = following.input_norm
        self.layers[-1].next_norm = self.final_norm
        if use_hopper and self._group.place.ranks == 1:
            self._chain_layers(dtype, device)

    @property
    def tilings(self) -> frozenset[Tiling]:
        """How chunks are cut into query tiles."""
        return frozenset(layer.chunk_attention.tiling for layer in self.layers)

    def forward(self, step: DeviceStep, tokens: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits [wanted rows, vocabulary], in `out` where it is given."""
        return self.logits(self.final_hidden(step, tokens), out)

    def final_hidden(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        """The normed output of the last layer for the wanted rows; what `logits` takes."""
        # Attention looks up plans and positions before the launch ahead of it has ended. Whatever makes those has a
        # plain launch behind it, which waits for it.
        state = _Pass(step, step.positions, step.chunks, self._plan(step))
        hidden = look_up(self.embedding, tokens, self._group)
        if self.recipe.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        per_layer = self._per_layer(tokens, hidden, self._linear) if self._per_layer else None
        normed = torch.empty_like(hidden)
        rms_norm(hidden, self.layers[0].input_norm, self.recipe.norm_eps, normed, pdl=self._pdl)
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break  # a chunk in the middle of a prompt: nobody asks for more
            inputs = None if per_layer is None else per_layer[:, layer.recipe.index]
            hidden, normed = layer(hidden, normed, state, inputs)
        for owner, rows in state.present.items():
            if step.writes is not None:
                self.layers[owner].write(rows, step)
        return normed

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits of final hidden states, in `out` where it is given."""
        logits = self._group.all_gather(self._linear(normed, self.head))
        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        softcap(logits, out, self.recipe.final_softcap, pdl=self._pdl)
        return out

    def _linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return _linear(x, weight, None, self._pdl)

    def _plan(self, step: DeviceStep) -> dict[Mask, torch.Tensor]:
        """For each mask, how the past of the decoding rows is shared out."""
        rows = step.num_decoding
        planned = {m: torch.empty(rows + 1, dtype=torch.int32, device=step.positions.device) for m in self._masks}
        if rows:
            for mask, cum_tiles in planned.items():
                plan_decode(step.positions[:rows], cum_tiles, mask)
        return planned

    def _chain_layers(self, dtype: torch.dtype, device: torch.device) -> None:
        """Have layers run all that lies between their attention and the next one's in one launch, where they can."""
        links = [a.links_to(b) for a, b in zip(self.layers, [*self.layers[1:], None], strict=True)]
        found = [link if link is not None and has_chain(link, dtype) else None for link in links]
        following = [len(link.following) for link in found if link is not None and link.following is not None]
        most_following = max(following, default=0)
        scratch: dict[int, ChainScratch] = {}
        for layer, link in zip(self.layers, found, strict=True):
            if link is not None:
                width = link.down.inputs
                if width not in scratch:
                    scratch[width] = ChainScratch(self.recipe.hidden_size, width, device, most_following)
                layer.chain = link, scratch[width]

    def _angles_of(self, rope: Rope, positions: int, device: torch.device) -> Angles | None:
        if rope.kind is None:
            return None
        if rope not in self._angles:
            frequencies = rope.frequencies()[: rotary_pairs(rope)].to(device, torch.float64)
            # Kernels turn in two steps, which only adds up for exact angles.
            turns = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequencies
            self._angles[rope] = turns.cos().float(), turns.sin().float()
        return self._angles[rope]


class FusedLayer:
    """One layer: weights taken over from a `_Layer`, and where its pages lie."""

    def __init__(
        self,
        model: Recipe,
        layer: _Layer,
        pages: KVPages,
        tables: DeviceTables,
        view: LayerView,
        angles: Angles | None,
        scratch: DecodeScratch,
        prefill_scratch: PrefillScratch | None,
        decoded: torch.Tensor,
        dtype: torch.dtype,
        pdl: bool,
    ) -> None:
        self.model, self.recipe, self._group = model, layer.recipe, layer.group
        self._pdl = pdl
        self.owns_kv, self.is_shared = layer.owns_kv, layer.is_shared
        r = self.recipe
        self._pairs = 0 if angles is None else angles[0].shape[1]
        if r.latent:
            _make_rotary_dims_adjacent(layer, self._pairs)
        self._turn_values, self._turn_back = False, None
        basis, self._balance = pages.layers[r.kv_layer].basis, pages.layers[r.kv_layer].balance
        if basis is not None:
            self._turn_values, turn_back = _turn_values(layer, basis)
            self._turn_back = None if turn_back is None else turn_back.to(dtype)
        self._distance = self._pairs if r.latent else r.head_dim // 2
        self.input_norm = layer.input_norm
        self.post_attention_norm = layer.post_attention_norm
        self.pre_mlp_norm = layer.pre_mlp_norm if model.sandwich else layer.post_attention_norm
        self.post_mlp_norm = layer.post_mlp_norm if model.sandwich else None
        self.qkv, self.qkv_bias, self.out, self.out_bias = layer.qkv, layer.qkv_bias, layer.out, layer.out_bias
        self.q_norm = layer.q_norm if model.qk_norm else None
        self.k_norm = layer.k_norm if model.qk_norm else None
        self.gate_up, self.gate_up_bias = layer.gate_up, layer.gate_up_bias
        self.down, self.down_bias = layer.down, layer.down_bias
        self.scalar = layer.scalar
        if model.per_layer_width:
            self.per_layer_gate, self.per_layer_out = layer.per_layer_gate, layer.per_layer_out
            self.per_layer_norm = layer.per_layer_norm
        self.next_norm: torch.Tensor = self.input_norm  # set once the next layer is there
        self.chain: tuple[Links, ChainScratch] | None = None
        self._angles = angles
        self._scratch = scratch
        self._arena = pages.arena
        stored = pages.layers[r.kv_layer]
        self._kv_dtype = dtype if view.code else stored.dtype
        self.group = stored.group
        self.view = view
        self._page_write = PageWrite(pages.arena, tables.writing[self.group], self.view) if self.owns_kv else None
        rope = None
        if r.latent:
            assert angles is not None and self.k_norm is not None
            rope = (*angles, self.k_norm)
        self._paged = PagedLayer(
            pages.arena, view, tables.reading[self.group], r.query_heads, r.mask, Scores(r.scale), rope
        )
        self.chunk_attention = make_chunk_attention(self._paged, prefill_scratch, decoded, dtype)

    def __call__(
        self, hidden: torch.Tensor, normed: torch.Tensor, state: _Pass, per_layer: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after this layer, and its norm for the next one."""
        step, r = state.step, self.recipe
        if r.index == self.model.last_kv_owner and step.wanted is not None and len(step.wanted) < len(hidden):
            width = r.query_heads * r.head_dim
            _, present = self._heads(
                self._linear(normed, self.qkv[width:], _part(self.qkv_bias, width, None)), 0, state
            )
            state.narrowed = True
            state.positions, state.chunks = step.positions[step.wanted], step.wanted_chunks
            hidden, normed = hidden[step.wanted], normed[step.wanted]  # behind positions, see `final_hidden`
            if len(hidden):
                projected = self._linear(normed, self.qkv[:width], _part(self.qkv_bias, None, width))
                queries, _ = self._heads(projected, r.query_heads, state, queries_only=True)
        elif self.owns_kv:
            queries, present = self._heads(self._projected(normed, state), r.query_heads, state)
        else:
            queries, _ = self._heads(self._projected(normed, state), r.query_heads, state, queries_only=True)
            present = state.present[r.kv_layer]
        if len(hidden):
            attended = self._attend(queries, present, state)
        if self.is_shared:
            state.present[r.index] = present
        elif self.owns_kv and step.writes is not None:
            self.write(present, step)
        if not len(hidden):
            return hidden, normed
        if self.chain is not None and len(hidden) == 1 and step.chunks is None:
            links, scratch = self.chain
            made = run_chain(attended, hidden, links, scratch, pdl=self._pdl)
            if links.following is None:
                return hidden, made
            state.projected = made
            return hidden, normed  # which nobody reads
        if per_layer is not None and state.narrowed:
            per_layer = per_layer[step.wanted]
        mixed = summed(self._linear, attended, self.out, self.out_bias, self._group)
        del queries, present, attended  # the widest point of a layer is yet to come
        return hidden, self._feed_forward(hidden, mixed, per_layer)

    def links_to(self, following: FusedLayer | None) -> Links | None:
        """What lies between this layer's attention and that of the one following, None unless it is all packed."""
        qkv, qkv_bias = (None, None) if following is None else (following.qkv, following.qkv_bias)
        biases = [self.out_bias, self.gate_up_bias, self.down_bias, qkv_bias]
        if self.model.per_layer_width or any(bias is not None for bias in biases):
            return None
        out, gate_up, down = self.out, self.gate_up, self.down
        if not (isinstance(out, PackedWeight) and isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)):
            return None
        if not isinstance(qkv, PackedWeight | None):
            return None
        return Links(
            out=out,
            gate_up=gate_up,
            down=down,
            following=qkv,
            post_attention_norm=self.post_attention_norm if self.model.sandwich else None,
            pre_mlp_norm=self.pre_mlp_norm,
            post_mlp_norm=self.post_mlp_norm,
            next_norm=self.next_norm,
            scalar=self.scalar,
            eps=self.model.norm_eps,
            gelu=is_gelu(self.model.activation),
        )

    def _projected(self, normed: torch.Tensor, state: _Pass) -> torch.Tensor:
        found, state.projected = state.projected, None
        return self._linear(normed, self.qkv, self.qkv_bias) if found is None else found

    def write(self, present: _Present, step: DeviceStep) -> None:
        """Store what the future can see of this step's rows."""
        assert step.writes is not None
        writes = step.writes[self.group]
        if present.coded is not None:
            offsets = writes.offsets[self.view.stripe]
            write_coded(present.coded, self._arena, self.view, writes.rows, offsets, writes.within)
            return
        k = present.v if self.recipe.latent else present.k
        write(k, present.v, self._arena, self.view, writes.rows, writes.offsets[self.view.stripe], writes.within)

    def _feed_forward(
        self, hidden: torch.Tensor, attended: torch.Tensor, per_layer: torch.Tensor | None
    ) -> torch.Tensor:
        """Updates `hidden` in place; returns its norm for the next layer."""
        eps, activation = self.model.norm_eps, self.model.activation
        post = self.post_attention_norm if self.model.sandwich else None
        normed = torch.empty_like(hidden)
        residual_norm(hidden, attended, post, self.pre_mlp_norm, None, eps, normed, pdl=self._pdl)
        inner = hidden.new_empty(len(hidden), self.down.shape[1])
        gate_up, has_bias = self.gate_up, self.gate_up_bias is not None
        if isinstance(gate_up, PackedWeight) and not has_bias and len(hidden) <= SPLIT_ROWS:
            packed_gated(normed, gate_up, inner, activation)
        elif isinstance(gate_up, torch.Tensor) and not has_bias and pays(len(hidden), len(gate_up)):
            gated_matvec(normed, gate_up, inner, activation, pdl=self._pdl)
        else:
            gated(self._linear(normed, gate_up, self.gate_up_bias), inner, activation, pdl=self._pdl)
        out = summed(self._linear, inner, self.down, self.down_bias, self._group)
        if per_layer is None:
            residual_norm(hidden, out, self.post_mlp_norm, self.next_norm, self.scalar, eps, normed, pdl=self._pdl)
            return normed
        residual_norm(hidden, out, self.post_mlp_norm, None, None, eps, normed, pdl=self._pdl)
        gate = self._linear(hidden, self.per_layer_gate, None)
        inner = torch.empty_like(gate)
        gated_per_layer(gate, per_layer, inner, activation, pdl=self._pdl)
        out = self._linear(inner, self.per_layer_out, None)
        residual_norm(hidden, out, self.per_layer_norm, self.next_norm, self.scalar, eps, normed, pdl=self._pdl)
        return normed

    def _linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear(x, weight, bias, self._pdl)

    def _heads(
        self, projected: torch.Tensor, query_heads: int, state: _Pass, *, queries_only: bool = False
    ) -> tuple[torch.Tensor, _Present]:
        """Queries, and K and V of the present, normed and rotated."""
        r, rows, step = self.recipe, len(projected), state.step
        kv_heads = 0 if queries_only else r.kv_heads
        q = projected.new_empty(rows, query_heads, r.head_dim)
        k = projected.new_empty(rows, kv_heads, r.head_dim, dtype=self._kv_dtype)
        v = torch.empty_like(k)
        writes_now = step.writes is None and not queries_only
        coded = None
        if self.view.code and not writes_now and not queries_only:
            coded = CodedRows.empty(rows, self.view, projected.device)
        prepare_heads(
            projected,
            state.positions if queries_only else step.positions,
            self.q_norm,
            self.k_norm,
            q,
            k,
            v,
            v_norm=self.model.v_norm,
            angles=self._angles,
            pair_distance=self._distance,
            eps=self.model.norm_eps,
            latent=r.latent,
            page_write=self._page_write if writes_now else None,
            slots=step.slots if writes_now else None,
            view=self.view if self.view.code else None,
            coded=coded,
            balance=self._balance,
            turn_values=self._turn_values,
            pdl=self._pdl,
        )
        return q, _Present(k, v, coded)

    def _attend(self, queries: torch.Tensor, present: _Present, state: _Pass) -> torch.Tensor:
        step, rows = state.step, state.step.num_decoding
        out = torch.empty_like(queries)
        if rows:
            decode(
                queries[:rows],
                present.k[:rows],
                present.v[:rows],
                self._paged,
                step.slots,
                step.positions[:rows],
                state.cum_tiles[self.recipe.mask],
                self._scratch,
                out[:rows],
                pdl=self._pdl,
            )
        if state.chunks is not None:
            self.chunk_attention(queries, present.k, present.v, state.chunks, out)
        if self._turn_back is not None:
            out = out @ self._turn_back
        return out.flatten(1)


def rotary_pairs(rope: Rope) -> int:
    """Pairs of dims that turn, rounded up to what a kernel can block: the others have a frequency of 0."""
    turning = int((rope.frequencies() != 0).sum())
    return min(max(LEAST_PAIRS, 1 << (turning - 1).bit_length()), rope.head_dim // 2)


def _view(pages: KVPages, layer: int) -> LayerView:
    index = pages.layers[layer].group
    group = pages.layout.groups[index]
    piece = next(s for s in group.slices if s.cache.layer == layer)
    return LayerView.of(group, piece, pages.columns(index), pages.layers[layer].layer_scales)


def _make_rotary_dims_adjacent(layer: _Layer, pairs: int) -> None:
    """Dims [0, pairs) and their partners [D/2, D/2 + pairs) to the front, in all that touches a latent's dims."""
    r: LayerRecipe = layer.recipe
    dim, half = r.head_dim, r.head_dim // 2
    device = layer.qkv.device
    every = torch.arange(dim, device=device)
    order = torch.cat([every[:pairs], every[half : half + pairs], every[pairs:half], every[half + pairs :]])
    layer.qkv = permute_outputs(layer.qkv, order)
    if layer.qkv_bias is not None:
        layer.qkv_bias = layer.qkv_bias.view(-1, dim)[:, order].reshape(-1)
    layer.out = permute_inputs(layer.out, order)
    assert layer.q_norm is not None and layer.k_norm is not None  # latents have normed queries and keys
    layer.q_norm, layer.k_norm = layer.q_norm[order], layer.k_norm[order]


def _turn_values(layer: _Layer, basis: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Make values in another basis, and read what was attended in it, by the weights before and behind.

    Packed weights cannot be turned. Says whether values are still to be turned where they are made, and what to
    multiply with what was attended, None for nothing.
    """
    r, dim = layer.recipe, layer.recipe.head_dim
    first, values_stay = (r.query_heads + r.kv_heads) * dim, False
    if layer.owns_kv and isinstance(layer.qkv, torch.Tensor):
        values = layer.qkv[first:].view(r.kv_heads, dim, -1)
        values.copy_(basis @ values.float())
        if layer.qkv_bias is not None:
            bias = layer.qkv_bias[first:].view(r.kv_heads, dim)
            bias.copy_(bias.float() @ basis)
    elif layer.owns_kv:
        values_stay = True
    if not isinstance(layer.out, torch.Tensor):
        return values_stay, basis
    columns = layer.out.view(layer.out.shape[0], -1, dim)
    columns.copy_(columns.float() @ basis)
    return values_stay, None


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, pdl: bool) -> torch.Tensor:
    """A few rows stream the weights once; many are a matrix product."""
    if isinstance(weight, PackedWeight):
        return packed_product(x, weight, bias, pdl=pdl)
    if isinstance(weight, JoinedWeight):
        out = torch.cat([_linear(x, part, None, pdl) for part in weight.parts], dim=-1)
        return out if bias is None else out + bias
    if len(x) and pays(len(x), len(weight)):
        out = x.new_empty(len(x), len(weight))
        matvec(x, weight, out, bias, pdl=pdl)
        return out
    return F.linear(x, weight, bias)


def _part(bias: torch.Tensor | None, start: int | None, stop: int | None) -> torch.Tensor | None:
    return None if bias is None else bias[start:stop]
