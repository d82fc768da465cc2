"""What a KV format has for a whole layer: scales, from the checkpoint or a warm-up pass, and what balances keys.

It is settled before the first page is written and never changes: what a page holds means nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from windowpane.attention.codecs import needs_layer_scale
from windowpane.attention.pages import KVPages
from windowpane.attention.step import Segment, Step
from windowpane.modeling.decoder import Decoder

KVScales = Mapping[int, tuple[float, float]]  # of K and V, by layer

WARM_UP_TOKENS = 512
ASKING_EVERY = 8  # tokens: the last layer's queries count too, and more logits would cost memory


@torch.inference_mode()
def settle_scales(model: Decoder, pages: KVPages, calibrated: KVScales, max_model_len: int) -> None:
    """Give every layer that needs them its scales or balance.

    A latent is V before anything else is done to it, so V's scale is its own. The warm-up pass runs tokens from all
    over the vocabulary, in one chunk: magnitudes of K and V hang on the weights (norms above all) far more than on what
    is said. Range is left for what it did not see (`layer_scale_for`).
    """
    waiting = {index: layer for index, layer in pages.layers.items() if layer.warming_up}
    for index, layer in list(waiting.items()):
        if index in calibrated and needs_layer_scale(layer.kv_format):
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
    wanted = torch.arange(0, tokens, ASKING_EVERY, device=device)
    positions = torch.arange(tokens, device=device)
    return Step(spread, positions, (Segment(0, 0, tokens, 0),), wanted, nobody, nobody)
