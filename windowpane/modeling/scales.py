"""One scale per layer, for KV formats that have no others: from the checkpoint, or from a warm-up pass.

A scale is settled before the first page is written and never changes: what a page holds means nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from windowpane.attention.pages import KVPages
from windowpane.attention.step import Segment, Step
from windowpane.modeling.decoder import Decoder

KVScales = Mapping[int, tuple[float, float]]  # of K and V, by layer

WARM_UP_TOKENS = 512


@torch.inference_mode()
def settle_scales(model: Decoder, pages: KVPages, calibrated: KVScales, max_model_len: int) -> None:
    """Give every layer that needs them its scales.

    A latent is V before anything else is done to it, so V's scale is its own. The warm-up pass runs tokens from all
    over the vocabulary, in one chunk: magnitudes of K and V hang on the weights (norms above all) far more than on what
    is said. Range is left for what it did not see (`layer_scale_for`).
    """
    waiting = {index: layer for index, layer in pages.layers.items() if layer.warming_up}
    for index, layer in list(waiting.items()):
        if index in calibrated:
            k_scale, v_scale = calibrated[index]
            layer.layer_scales = [v_scale] if model.recipe.layers[index].latent else [k_scale, v_scale]
            del waiting[index]
    if not waiting:
        return
    model.forward(_warm_up_step(model, min(WARM_UP_TOKENS, max_model_len)), pages)
    for layer in waiting.values():
        layer.end_warm_up()


def _warm_up_step(model: Decoder, tokens: int) -> Step:
    vocabulary, device = len(model.embedding), model.embedding.device
    spread = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    nobody = np.zeros(0, dtype=np.int64)
    wanted = torch.tensor([tokens - 1], device=device)
    positions = torch.arange(tokens, device=device)
    return Step(spread, positions, (Segment(0, 0, tokens, 0),), wanted, nobody, nobody)
