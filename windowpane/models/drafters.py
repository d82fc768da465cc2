"""Models that draft for another: what they compute, and the caches and tensors that they add to their target's.

Three kinds: the target's own layer for multi-token prediction, an assistant of Gemma 4, and any smaller model with the
same vocabulary. Their layers are numbered behind their target's, since all caches lie in one arena.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.blocks import numbered_from, tensors_of
from windowpane.models.config import ModelError
from windowpane.models.families import gemma4_assistant, qwen3_next
from windowpane.models.running import runnable
from windowpane.models.spec import Drafter, ModelSpec

# By family: the layers for multi-token prediction that its checkpoints carry.
OWN_LAYERS = {"qwen3_next": qwen3_next.draft_layers}


def drafter_for(target: ModelSpec, model: ModelSpec | None = None) -> Drafter:
    """What `model` computes as a drafter of `target`; without a model, the target's own layers for it.

    Raises ModelError where the two do not fit.
    """
    if target.decoder is None:
        raise ModelError(f"{target.name} can be planned but not run yet, so nothing can draft for it")
    if model is None:
        if target.family not in OWN_LAYERS:
            raise ModelError(
                f"{target.name} carries no layer for multi-token prediction that can be run; families that do: "
                f"{', '.join(OWN_LAYERS)}; name a smaller model to draft for it"
            )
        decoder = OWN_LAYERS[target.family](target)
        known = tensors_of(target.decoder)
        return Drafter(decoder, None, tuple(t for name, t in tensors_of(decoder).items() if name not in known))
    if model.vocab_size != target.vocab_size:
        raise ModelError(
            f"{model.name} has a vocabulary of {model.vocab_size} tokens and {target.name} of {target.vocab_size}: "
            "a drafter needs its target's"
        )
    if model.family == gemma4_assistant.FAMILY:
        return Drafter(gemma4_assistant.draft_layers(model, target), model)
    decoder = runnable(model)
    if decoder.state_mixers:
        raise ModelError(
            f"{model.name} keeps recurrent states, which cannot be rolled back to the last accepted draft; "
            "draft with a model of attention layers alone"
        )
    return Drafter(numbered_from(replace(decoder, routes=None), target.num_layers), model)
