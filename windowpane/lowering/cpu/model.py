"""A description for a CPU: compiled kernels where they are built and the weights are float32, else plain torch."""

from __future__ import annotations

import torch

from windowpane.lowering.cpu.experts import make_experts
from windowpane.lowering.cpu.layers import join_layers
from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.cpu.states import CpuGatedDelta, CpuMamba2, CpuShortConv
from windowpane.lowering.group import ALONE, RankGroup
from windowpane.lowering.linear import Parameters
from windowpane.lowering.reference.mixers import MIXERS
from windowpane.lowering.reference.model import ReferenceModel
from windowpane.lowering.strips import StripWeight
from windowpane.models.blocks import Decoder, Experts, GatedDeltaNet, Mamba2, ShortConv
from windowpane.native import build

STATE_KINDS = {GatedDeltaNet: CpuGatedDelta, Mamba2: CpuMamba2, ShortConv: CpuShortConv}
KINDS = {**MIXERS, Experts: make_experts, **STATE_KINDS}


def lower(
    decoder: Decoder,
    parameters: Parameters,
    max_model_len: int,
    group: RankGroup = ALONE,
    target: ReferenceModel | None = None,
) -> ReferenceModel:
    """`target`: the model that this one drafts for, where it takes hidden states."""
    embedding = parameters.table(decoder.embedding)
    # Strips lie on CPUs alone.
    covered = isinstance(embedding, StripWeight) or (
        embedding.device.type == "cpu" and embedding.dtype == torch.float32
    )
    library = build.library() if covered else None
    if library is None:
        return ReferenceModel(decoder, parameters, max_model_len, group, target=target)
    model = ReferenceModel(decoder, parameters, max_model_len, group, CpuOps(library), KINDS, target)
    join_layers(model, library)
    return model
