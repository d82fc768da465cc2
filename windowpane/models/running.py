"""Which models run: those whose blocks the lowering of the device has. The others can be planned."""

from __future__ import annotations

from windowpane.models.blocks import (
    RMS,
    UNGATED,
    Attention,
    Decoder,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    Layer,
    Norm,
    PerLayerInput,
    StateMixer,
    each,
)
from windowpane.models.config import ModelError
from windowpane.models.rope import KINDS
from windowpane.models.spec import ModelSpec

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Families whose readers describe blocks.
FAMILIES = (
    "cohere2", "ernie4_5", "falcon_h1", "gemma2", "gemma3", "gemma4", "glm4_moe", "gpt_oss", "granite_hybrid", "lfm2",
    "llama", "llama4", "mistral", "mixtral", "nemotron_h", "olmo3", "phi3", "qwen3", "qwen3_next",
)  # fmt: skip


def runnable(spec: ModelSpec, *, on_gpu: bool = False) -> Decoder:
    """What this model computes; a ModelError where it cannot be run yet, or not on a GPU."""
    decoder = spec.decoder
    if decoder is None:
        if spec.planned_only:
            raise ModelError(f"{spec.name} can be planned but not run yet: {spec.planned_only}")
        if any(t.part == "experts" for t in spec.tensors):
            raise ModelError(
                f"{spec.name} ({spec.architecture}) has experts of a family that can be planned but not run yet; "
                f"families that run: {', '.join(FAMILIES)}"
            )
        if spec.state_caches:
            raise ModelError(
                f"{spec.name} ({spec.architecture}) has recurrent states of a family that can be planned but not run "
                f"yet; families that run: {', '.join(FAMILIES)}"
            )
        raise ModelError(
            f"{spec.name} ({spec.architecture}) can be planned but not run yet; "
            f"families that run: {', '.join(FAMILIES)}"
        )
    kinds = {a.rope.kind for a in decoder.attentions if a.rope is not None}
    for kind in sorted(kinds - set(KINDS)):
        raise ModelError(f"rope_type: {kind!r} cannot be run yet; known: {', '.join(KINDS)}")
    mlps = list(each(decoder.layers, GatedMLP))
    activations = {mlp.activation for mlp in mlps if mlp.has_gate or mlp.activation not in UNGATED}
    activations |= {mixer.activation for mixer in each(decoder.layers, PerLayerInput)}
    activations |= {mixer.activation for mixer in each(decoder.layers, Experts)} - set(UNGATED)
    for activation in sorted(activations - set(ACTIVATIONS)):
        raise ModelError(f"hidden_act: {activation!r} cannot be run yet; known: {', '.join(ACTIVATIONS)}")
    problems = [found for a in decoder.attentions if (found := _problem(a, decoder))]
    for mixer in decoder.state_mixers:
        first: list[StateMixer] = list(each(_layer(decoder, mixer).blocks[0], StateMixer))
        if mixer not in first:
            problems.append(f"layer {mixer.layer} has its recurrent state behind another block")
    if problems or not all(norm is None or norm.weight for norm in _block_norms(decoder)):
        raise ModelError(f"{spec.name} cannot be run yet: {(*problems, 'a norm between blocks has no weight')[0]}")
    if on_gpu and (lacking := _lacking_on_gpus(decoder)):
        raise ModelError(f"{spec.name} has {lacking}, which run on CPUs only so far: use --device cpu")
    return decoder


def why_not_run(spec: ModelSpec, *, on_gpu: bool = False) -> str | None:
    """Why this model can be planned and not run, in the words of `runnable`; None where it runs."""
    try:
        runnable(spec, on_gpu=on_gpu)
    except ModelError as error:
        return str(error)
    return None


def _lacking_on_gpus(decoder: Decoder) -> str | None:
    """What the lowering for GPUs does not have."""
    for delta in each(decoder.layers, GatedDeltaNet):
        dims = delta.key_dim, delta.value_dim
        if any(dim & (dim - 1) for dim in dims):
            return f"recurrent states of {dims[0]} × {dims[1]} values a head, not powers of two"
    return None


def _problem(attention: Attention, decoder: Decoder) -> str | None:
    """What no lowering has, or not every one."""
    at = f"layer {attention.layer}"
    if attention not in each(_layer(decoder, attention).blocks[0], Attention):
        return f"{at} has its attention behind another block"
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if any(norm.kind != RMS for norm in norms):
        return f"{at} norms queries and keys otherwise than by their RMS"
    if len({(norm.eps, norm.across_heads) for norm in norms}) > 1:
        return f"{at} norms queries otherwise than keys"
    if attention.cache.latent and (attention.rope is None or attention.rope.dim_order() is not None):
        return f"{at} makes K and V from one projection and rotates pairs that are not half a head apart"
    return None


def _layer(decoder: Decoder, mixer: Attention | StateMixer) -> Layer:
    return decoder.layers[mixer.layer - decoder.first_layer]


def _block_norms(decoder: Decoder) -> list[Norm | None]:
    blocks = [block for layer in decoder.layers for block in layer.blocks]
    return [decoder.norm, *(norm for block in blocks for norm in (block.before, block.after))]
