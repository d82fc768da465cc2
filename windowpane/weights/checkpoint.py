"""What a checkpoint file offers, and how its names are matched with the spec's: the one place that knows the variants.

The same text model is stored under several prefixes, depending on which class saved it:

    model.layers.…                  the text model alone
    language_model.model.layers.…   inside a multimodal model, as published by Gemma 3 and Llama 4
    model.language_model.layers.…   inside a multimodal model, as current classes save it

All three are read for any of the three. Vision and audio towers and draft layers (MTP) are not text and are skipped,
and so are rotary tables, which some old checkpoints carry, and the K and V projections of layers that share KV, which
are there but never used. Calibrated KV scales are no weights either: `kv_scale_names` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import RankSlice, TensorSpec
from windowpane.models.weights import text_tensors

MAX_NAMES = 20

# A piece is read, converted and copied at once; it bounds what the host holds besides the weights.
PIECE_BYTES = 64 * 1024**2

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_NOT_TEXT = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|patch_merge_mlp|audio_tower"
    r"|embed_vision|embed_audio|mtp[^.]*)\."
)
_UNUSED_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")
_KV_OF_LAYER = re.compile(r"(.*\.layers\.\d+\.self_attn\.)(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)$")

_KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale$")


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class WeightsError(ValueError):
    """The weights do not fit the model or cannot be read; the message names the tensors and the way out."""


class Checkpoint(Protocol):
    """Tensors in a file, under Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the file."""

    def pieces(self, name: str, cut: RankSlice | None = None) -> Iterator[torch.Tensor]:
        """A tensor, or what `cut` leaves of it, on the host: consecutive pieces of its first axis of about
        `PIECE_BYTES`.

        A scalar comes as one value.
        """


def held_dtype(tensor: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """What a tensor that is not quantized is held in: a few keep their own whatever is computed in."""
    found: torch.dtype = dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found


def row_pieces(shape: tuple[int, ...], cut: RankSlice | None, at_once: int) -> Iterator[range]:
    """The rows that each piece has: a run of at most `at_once` of those that are wanted."""
    wanted = cut.ranges if cut is not None and cut.axis == 0 else (range(shape[0]),)
    for rows in wanted:
        for start in range(rows.start, rows.stop, at_once):
            yield range(start, min(start + at_once, rows.stop))


def match_names(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The file's name of each tensor that the spec wants; raises one WeightsError for all that does not fit."""
    stored: dict[str, str] = {}
    problems: list[str] = []
    for name in shapes:
        plain = plain_name(name)
        if plain in stored:
            problems.append(f"twice: {stored[plain]} and {name}")
        stored[plain] = name
    entries = {name: shape for tensor in stored_tensors(spec) for name, shape in tensor.checkpoint_entries()}
    wanted = {plain_name(name) for name in entries}
    for name, shape in entries.items():
        found = stored.get(plain_name(name))
        if found is None:
            problems.append(f"missing: {name} {list(shape)}")
        elif shapes[found] != shape and not (shapes[found] == () and shape == (1,)):
            problems.append(f"misshapen: {found} is {list(shapes[found])}, not {list(shape)}")
    problems += [f"unexpected: {stored[plain]}" for plain in stored if _is_extra(plain, wanted)]
    if problems:
        raise WeightsError(_listed(f"the weights do not fit {spec.name}", problems))
    return {name: stored[plain_name(name)] for name in entries}


class CopiedHead(NamedTuple):
    """The names of a head that the file has beside the embedding to which the config ties it."""

    head: str
    embedding: str


def copied_head(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> CopiedHead | None:
    """A head that the spec does not want; it must have the embedding's shape."""
    tensors = {plain_name(tensor.name): tensor for tensor in text_tensors(spec)}
    head = next((name for name in shapes if plain_name(name) == HEAD), None)
    embedding = tensors.get(EMBEDDING)
    if head is None or HEAD in tensors or embedding is None:
        return None
    if shapes[head] != embedding.shape:
        raise WeightsError(
            f"{head} is {list(shapes[head])} and {embedding.name} {list(embedding.shape)}, but the config says "
            "tie_word_embeddings true; set it to false to use the stored head, or remove the head from the file"
        )
    return CopiedHead(head, embedding.name)


def stored_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """The tensors that a checkpoint stores for the text model: several for a quantized weight."""
    quantization = spec.quantization
    if quantization is None:
        return text_tensors(spec)
    return [part for tensor in text_tensors(spec) for part in quantization.stored(tensor)]


def kv_scale_names(names: Iterable[str]) -> dict[tuple[int, str], str]:
    """The file's names of calibrated KV scales, by layer and `k` or `v`."""
    found = {}
    for name in names:
        scale = _KV_SCALE.match(plain_name(name))
        if scale:
            found[int(scale[1]), scale[2]] = name
    return found


def plain_name(name: str) -> str:
    """`name` as the text model alone would be stored."""
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _is_extra(plain: str, wanted: set[str]) -> bool:
    if plain in wanted or _NOT_TEXT.match(plain) or _UNUSED_BUFFER.search(plain) or _KV_SCALE.match(plain):
        return False
    if plain == HEAD:
        # With tied embeddings the spec lists no head, and a stored copy of the embedding is harmless: `copied_head`
        # finds it, and its values are compared. An untied spec lists it, so that it cannot come here.
        return False
    return not is_of_shared_kv(plain, wanted)


def is_of_shared_kv(plain: str, wanted: set[str]) -> bool:
    """Whether this makes K or V of a layer with queries but without keys of its own, which shares another layer's."""
    shared = _KV_OF_LAYER.match(plain)
    return bool(shared and f"{shared[1]}q_proj.weight" in wanted and f"{shared[1]}k_proj.weight" not in wanted)


def _listed(what: str, problems: list[str]) -> str:
    more = [f"… and {len(problems) - MAX_NAMES} more"] if len(problems) > MAX_NAMES else []
    return "\n  ".join([f"{what} ({len(problems)} tensors):", *problems[:MAX_NAMES], *more])
