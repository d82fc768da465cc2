"""A pass: a decoding layer of attention and gated MLP in one call of `layer.c`, where it is a plain one.

The same kernels run in the same order, so results have the same bits; only nobody stands between them, which for a
small model takes longer than some of them do.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_long, c_void_p

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
        *((name, c_int64) for name in ("hidden", "query_heads", "kv_heads", "dim", "mlp")),
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
    if model.group.place.ranks == 1:
        shared = model.decoder.shared_layers
        model.layers = [
            JoinedLayer(layer, library) if isinstance(layer, ReferenceLayer) and _is_plain(layer, shared) else layer
            for layer in model.layers
        ]


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


class JoinedLayer:
    """Steps that only decode go through one call, where kernels have the KV format; all others block by block."""

    def __init__(self, layer: ReferenceLayer, library: ctypes.CDLL) -> None:
        self._layer = layer
        self._attention: AttentionMixer = layer.blocks[0].mixer
        self._run = function(
            library, "decode_layer", ctypes.POINTER(_Layer), ctypes.POINTER(_Tokens), c_void_p, c_void_p, c_int
        )
        self._scratch_floats = count(library, "layer_scratch_floats", ctypes.POINTER(_Layer), c_long)
        self._bound: tuple[LayerPages, _Layer | None] | None = None

    def __call__(self, hidden: torch.Tensor, state: StepState) -> torch.Tensor:
        if state.step.segments:
            return self._layer(hidden, state)
        stored = state.pages.layers[self._attention.described.layer]
        if self._bound is None or self._bound[0] is not stored:
            self._bound = stored, self._addresses(stored) if self.decodes_in(state.pages) else None
        if self._bound[1] is None:
            return self._layer(hidden, state)
        return self._decode(hidden, self._bound[1], stored, state)

    def decodes_in(self, pages: KVPages) -> bool:
        """Whether kernels have the format that its KV is stored in."""
        stored = pages.layers[self._attention.described.layer]
        return covers(stored) and stored.keeps_every_token

    def _decode(self, hidden: torch.Tensor, layer: _Layer, stored: LayerPages, state: StepState) -> torch.Tensor:
        reads = stored.decoding_reads(state.step, self._attention.mask)
        to_offsets, to_rows = stored.decoding_writes(state.step)
        sequences, parts = len(hidden), parts_for(reads.most_tokens)
        cos, sin = self._attention.angles(state) or (None, None)
        tokens = _Tokens(
            reads.offsets.data_ptr(), reads.starts.data_ptr(), reads.stops.data_ptr(), to_offsets.data_ptr(),
            to_rows.data_ptr(), address(cos), address(sin), sequences, reads.shape[1], parts,
            state.step.drafts_in_rows,
        )  # fmt: skip
        scratch = hidden.new_empty(sequences * self._scratch_floats(ctypes.byref(layer), parts))
        out = hidden.contiguous().clone()
        threads = torch.get_num_threads()
        self._run(ctypes.byref(layer), ctypes.byref(tokens), out.data_ptr(), scratch.data_ptr(), threads)
        return out

    def _addresses(self, stored: LayerPages) -> _Layer:
        """Of what the blocks hold, which stays where it is as long as they do."""
        attends, feeds = self._layer.blocks
        attention, mlp, described = self._attention, feeds.mixer, self._attention.described
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
            mlp=mlp.down.inputs,
            head_norms=described.q_norm is not None, v_norm=described.v_norm is not None,
            is_gelu=mlp.described.activation == "gelu_pytorch_tanh", eps=norm.eps, scale=described.scale,
            softcap=described.softcap or 0.0, multiplier=attends.described.multiplier,
            scalar=1.0 if self._layer.scalar is None else float(self._layer.scalar),
        )  # fmt: skip
