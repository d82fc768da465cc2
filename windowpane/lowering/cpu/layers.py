"""A pass: decoding layers of attention and gated MLP in one call of `layer.c`: all plain ones that follow each other.

The same kernels run in the same order, so results have the same bits; only nobody stands between them, which for a
small model takes longer than some of them do.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from itertools import groupby

import torch

from windowpane.device.pages import KVPages, LayerPages
from windowpane.lowering.cpu.attention import parts_for
from windowpane.lowering.cpu.pages import ALIGNED_FLOATS, Pages, covers
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import strips_of
from windowpane.lowering.reference.context import StepState
from windowpane.lowering.reference.mixers import AttentionMixer, MlpMixer
from windowpane.lowering.reference.model import ReferenceLayer, ReferenceModel
from windowpane.lowering.strips import Packed
from windowpane.models.blocks import RMS
from windowpane.native.calls import address, count, function

_TENSORS = ("before_attention", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp", "sinks")


class _Matrix(ctypes.Structure):
    """`Matrix` in layer.c."""

    _fields_ = (("plain", c_void_p), ("bias", c_void_p), ("parts", ctypes.POINTER(Packed)), ("count", c_int64))

    @classmethod
    def of(cls, linear: Linear) -> _Matrix:
        parts = strips_of(linear.weight)
        plain = address(linear.weight) if isinstance(linear.weight, torch.Tensor) else None
        return cls(plain, address(linear.bias), (Packed * len(parts))(*(part.described for part in parts)), len(parts))


class _Layer(ctypes.Structure):
    """`Layer` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in _TENSORS),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("pages", Pages),
        ("balance", c_void_p),
        *((name, c_int64) for name in ("hidden", "query_heads", "kv_heads", "dim", "mlp", "tokens")),
        *((name, c_int64) for name in ("head_norms", "v_norm", "is_gelu")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "multiplier", "scalar")),
    )


class _Tokens(ctypes.Structure):
    """`Tokens` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("offsets", "starts", "stops", "to_offsets", "to_rows", "cos", "sin")),
        *((name, c_int64) for name in ("sequences", "blocks", "parts", "writes_first")),
    )


def join_layers(model: ReferenceModel, library: ctypes.CDLL) -> None:
    """Replace the layers of `model` that one call can compute; ranks add up what they have in the middle of one."""
    if model.group.place.ranks > 1:
        return
    shared, layers = model.decoder.shared_layers, model.layers
    model.layers = []
    for is_plain, run in groupby(layers, lambda layer: isinstance(layer, ReferenceLayer) and _is_plain(layer, shared)):
        some = [layer for layer in run if isinstance(layer, ReferenceLayer)]
        model.layers += [JoinedLayers(some, library)] if is_plain else some


def _is_plain(layer: ReferenceLayer, shared: frozenset[int]) -> bool:
    """It owns K and V, which nobody shares, in an order and with norms that the kernels have."""
    mixers = [block.mixer for block in layer.blocks]
    if len(mixers) != 2 or not isinstance(mixers[0], AttentionMixer) or not isinstance(mixers[1], MlpMixer):
        return False
    attention, mlp = mixers[0], mixers[1]
    described, blocks = attention.described, layer.described.blocks
    if (
        not described.owns_kv
        or described.layer in shared
        or described.cache.latent
        or described.temperature is not None
        or described.gated
    ):
        return False
    if mlp.out_gate is not None or mlp.described.gate_multiplier != 1.0 or not mlp.described.has_gate:
        return False
    block_norms = [norm for block in blocks for norm in (block.before, block.after) if norm is not None]
    head_norms = [n for n in (described.q_norm, described.k_norm, described.v_norm) if n is not None]
    if any(norm.kind != RMS or norm.across_heads for norm in (*block_norms, *head_norms)):
        return False
    if len({norm.eps for norm in (*block_norms, *head_norms)}) != 1 or len({b.multiplier for b in blocks}) != 1:
        return False
    weights = [linear.weight for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    widths = (attention.out.outputs, mlp.down.inputs)
    return (
        (described.q_norm is None) == (described.k_norm is None)
        and described.cache.key_dim % (2 * ALIGNED_FLOATS) == 0
        and not any(width % ALIGNED_FLOATS for width in widths)
        and all((isinstance(w, torch.Tensor) and w.is_contiguous()) or strips_of(w) for w in weights)
    )


@dataclass(frozen=True)
class _Bound:
    """Layers over one set of pages. `kinds` has a layer of each kind that reads, writes or rotates in its own way."""

    pages: KVPages
    layers: ctypes.Array[_Layer]
    kinds: list[tuple[LayerPages, AttentionMixer]]


class JoinedLayers:
    """Steps that only decode go through one call, where kernels have all KV formats and no row has an adapter; others
    go layer by layer.
    """

    def __init__(self, layers: list[ReferenceLayer], library: ctypes.CDLL) -> None:
        self.layers = layers
        described = ctypes.POINTER(_Layer), c_long, ctypes.POINTER(_Tokens)
        self._run = function(library, "decode_layers", *described, c_void_p, c_void_p, c_int)
        self._scratch_floats = count(library, "layers_scratch_floats", *described)
        self._bound: _Bound | None = None

    def __call__(self, hidden: torch.Tensor, state: StepState) -> torch.Tensor:
        if not state.step.segments and not state.has_adapters:
            if self._bound is None or self._bound.pages is not state.pages:
                self._bound = self._bind(state.pages)
            if len(self._bound.layers):
                return self._decode(hidden, self._bound, state)
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break
            hidden = layer(hidden, state)
        return hidden

    def decodes_in(self, pages: KVPages) -> bool:
        """Whether kernels have the formats that their KV is stored in."""
        return all(covers(stored) and stored.keeps_every_token for stored in self._stored(pages))

    def _stored(self, pages: KVPages) -> list[LayerPages]:
        return [pages.layers[layer.blocks[0].mixer.described.layer] for layer in self.layers]

    def _decode(self, hidden: torch.Tensor, bound: _Bound, state: StepState) -> torch.Tensor:
        tokens = (_Tokens * len(bound.kinds))(*(_tokens(stored, mixer, state) for stored, mixer in bound.kinds))
        described = bound.layers, len(bound.layers), tokens
        scratch = hidden.new_empty(self._scratch_floats(*described))
        out = hidden.contiguous().clone()
        self._run(*described, out.data_ptr(), scratch.data_ptr(), torch.get_num_threads())
        return out

    def _bind(self, pages: KVPages) -> _Bound:
        mixers: list[AttentionMixer] = [layer.blocks[0].mixer for layer in self.layers]
        stored = self._stored(pages)
        if not self.decodes_in(pages):
            return _Bound(pages, (_Layer * 0)(), [])
        keys = [(s.group, s.stripe, m.mask, m.described.rope) for s, m in zip(stored, mixers, strict=True)]
        firsts = {key: (s, m) for key, s, m in reversed(list(zip(keys, stored, mixers, strict=True)))}
        places = list(firsts)
        layers = [
            _addresses(layer, of_layer, places.index(key))
            for layer, of_layer, key in zip(self.layers, stored, keys, strict=True)
        ]
        return _Bound(pages, (_Layer * len(layers))(*layers), list(firsts.values()))


def _tokens(stored: LayerPages, attention: AttentionMixer, state: StepState) -> _Tokens:
    """Where the tokens of a step read and write; what they point to lives as long as the step."""
    reads = stored.decoding_reads(state.step, attention.mask)
    to_offsets, to_rows = stored.decoding_writes(state.step)
    cos, sin = attention.angles(state) or (None, None)
    return _Tokens(
        reads.offsets.data_ptr(), reads.starts.data_ptr(), reads.stops.data_ptr(), to_offsets.data_ptr(),
        to_rows.data_ptr(), address(cos), address(sin), state.step.num_decoding, reads.shape[1],
        parts_for(reads.most_tokens), state.step.drafts_in_rows,
    )  # fmt: skip


def _addresses(layer: ReferenceLayer, stored: LayerPages, tokens: int) -> _Layer:
    """Of what the blocks hold, which stays where it is as long as they do."""
    attends, feeds = layer.blocks
    attention, mlp, described = attends.mixer, feeds.mixer, attends.mixer.described
    tensors = {
        "before_attention": attends.before, "q_norm": attention.q_norm, "k_norm": attention.k_norm,
        "after_attention": attends.after, "before_mlp": feeds.before, "after_mlp": feeds.after,
        "sinks": attention.scores.sinks,
    }  # fmt: skip
    linears = {"qkv": attention.qkv, "out": attention.out, "gate_up": mlp.gate_up, "down": mlp.down}
    norm = next(n for n in (feeds.described.before, feeds.described.after) if n is not None)
    return _Layer(
        **{name: address(tensor) for name, tensor in tensors.items()},
        **{name: _Matrix.of(linear) for name, linear in linears.items()},
        pages=Pages.of(stored), balance=address(stored.balance), hidden=attention.out.outputs,
        query_heads=described.query_heads, kv_heads=described.cache.kv_heads, dim=described.cache.key_dim,
        mlp=mlp.down.inputs, tokens=tokens,
        head_norms=described.q_norm is not None, v_norm=described.v_norm is not None,
        is_gelu=mlp.described.activation == "gelu_pytorch_tanh", eps=norm.eps, scale=described.scale,
        softcap=described.softcap or 0.0, multiplier=attends.described.multiplier,
        scalar=1.0 if layer.scalar is None else float(layer.scalar),
    )  # fmt: skip
