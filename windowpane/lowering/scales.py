"""What a KV format has for a whole layer: scales, from the checkpoint or a warm-up pass, and what balances keys.

It is settled before the first page is written and never changes: what a page holds means nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np
import torch

from windowpane.device.codecs import needs_layer_scale
from windowpane.device.pages import KVPages
from windowpane.lowering.reference.model import ReferenceModel
from windowpane.schedule.step import Segment, Step

KVScales = Mapping[int, tuple[float, float]]  # of K and V, by layer

WARM_UP_TOKENS = 512  # where there is no text


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known beforehand: scales that the checkpoint has, and `warm_up_text` as tokens; none are made up."""

    scales: KVScales = field(default_factory=dict)
    tokens: Sequence[int] = ()


def warm_up_text() -> str:
    """Prose, code, tables, numbers and several languages: a little of what models read."""
    return files("windowpane.lowering").joinpath("warm_up.txt").read_text("utf-8")


@torch.inference_mode()
def settle_scales(
    model: ReferenceModel, pages: KVPages, known: Calibration, drafting: ReferenceModel | None = None
) -> None:
    """Give every layer that needs them its scales or balance, the same whatever else the engine is set to.

    A latent is V before anything else is done to it, so V's scale is its own. The warm-up pass runs one chunk. Without
    text, its tokens come from all over the vocabulary: magnitudes of K and V hang on the weights (norms above all) more
    than on what is said. Range is left for what it did not see (`layer_scale_for`). A drafter with layers of its own
    reads the same text, each token beside the hidden state of the one before.
    """
    waiting = {index: layer for index, layer in pages.layers.items() if layer.warming_up}
    for index, layer in list(waiting.items()):
        if index in known.scales and needs_layer_scale(layer.kv_format):
            k_scale, v_scale = known.scales[index]
            layer.layer_scales = [v_scale] if layer.parts == 1 else [k_scale, v_scale]
            del waiting[index]
    if not waiting:
        return
    step, tokens = _warm_up_step(model, known.tokens)
    hidden = model.final_hidden(step, tokens, pages)
    if drafting is not None and drafting.decoder.caches:
        drafting.final_hidden(step, tokens.roll(-1), pages, hidden)
    for layer in waiting.values():
        layer.end_warm_up()


def _warm_up_step(model: ReferenceModel, tokens: Sequence[int]) -> tuple[Step, torch.Tensor]:
    """One segment of which every row asks, since the last layer's queries count too."""
    vocabulary, device = len(model.embedding), model.embedding.device
    if tokens:
        ids = torch.tensor(tokens)
    else:
        ids = torch.randint(0, vocabulary, (WARM_UP_TOKENS,), generator=torch.Generator().manual_seed(0))
    every, segments = np.arange(len(ids)), (Segment(0, 0, len(ids), 0, 0, len(ids)),)
    nobody, state_slots = np.zeros(0, np.int64), np.zeros(1, np.int8)
    step = Step(ids.numpy().astype(np.int32), every, nobody, segments, segments, every, state_slots)
    return step, ids.to(device)
