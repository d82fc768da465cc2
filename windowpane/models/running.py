"""Which models run: those whose blocks every lowering has. The others can be planned."""

from __future__ import annotations

from windowpane.models.blocks import Decoder, GatedMLP, PerLayerInput
from windowpane.models.config import ModelError
from windowpane.models.rope import KINDS
from windowpane.models.spec import ModelSpec

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Families whose readers describe blocks; with experts, they do not.
FAMILIES = ("cohere2", "gemma2", "gemma3", "gemma4", "llama", "mistral", "olmo3", "phi3", "qwen3")


def runnable(spec: ModelSpec) -> Decoder:
    """What this model computes; a ModelError where it cannot be run yet."""
    decoder = spec.decoder
    if decoder is None:
        if any(t.part == "experts" for t in spec.tensors):
            raise ModelError(f"{spec.name} has experts, which cannot be run yet")
        raise ModelError(
            f"{spec.name} ({spec.architecture}) can be planned but not run yet; "
            f"families that run: {', '.join(FAMILIES)}"
        )
    kinds = {a.rope.kind for a in decoder.attentions if a.rope is not None}
    for kind in sorted(kinds - set(KINDS)):
        raise ModelError(f"rope_type: {kind!r} cannot be run yet; known: {', '.join(KINDS)}")
    mixers = (m for layer in decoder.layers for block in layer.blocks for m in block.mixers())
    activations = {m.activation for m in mixers if isinstance(m, GatedMLP | PerLayerInput)}
    for activation in sorted(activations - set(ACTIVATIONS)):
        raise ModelError(f"hidden_act: {activation!r} cannot be run yet; known: {', '.join(ACTIVATIONS)}")
    return decoder
