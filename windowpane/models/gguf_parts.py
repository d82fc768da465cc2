"""What readers of GGUF headers share: what a family says of itself, sizes of all models, names of common tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from windowpane.models.config import ModelError
from windowpane.models.gguf import GgufHeader

Fields = dict[str, object]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """`config` gives the fields that are not `_common`; `blocks` has the Hugging Face names of a layer's tensors by
    ggml's, with or without their last part, and `top` those of the others. `{}` stands for an expert's number.

    `layers` is what Hugging Face's names of a layer's tensors begin with. `adds_one`: norms are stored as 1 + w, but
    for those of what a recurrent state gives. `interleaved`: ggml rotates neighbouring rows of queries and keys,
    Hugging Face rows half a head apart.
    """

    config: Callable[[GgufHeader], Fields]
    blocks: Mapping[str, str]
    top: Mapping[str, str]
    adds_one: bool = False
    interleaved: bool = False
    layers: str = "model.layers."

    def hf_name(self, name: str) -> str:
        """ggml's own name for a tensor that the family does not have: it is then unexpected."""
        block = BLOCK_NAME.fullmatch(name)
        if block is None:
            return self.top.get(name, name)
        number, part = block.groups()
        stem, _, kind = part.rpartition(".")
        known = self.blocks.get(part) or (f"{self.blocks[stem]}.{kind}" if stem in self.blocks else None)
        return name if known is None else f"{self.layers}{number}.{known}"


BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")


def prefix_of(header: GgufHeader) -> str:
    return f"{header.text('general.architecture')}."


def layers_of(header: GgufHeader) -> int | None:
    """Without those behind the model that draft."""
    prefix = prefix_of(header)
    blocks = header.integer(f"{prefix}block_count")
    return None if blocks is None else blocks - (header.integer(f"{prefix}nextn_predict_layers") or 0)


def one_number(header: GgufHeader, key: str) -> int | None:
    """One number for all layers, or one for each: layers that have none of it have 0."""
    if not isinstance(header.metadata.get(key), list):
        return header.integer(key)
    counts = set(header.integers(key)) - {0}
    if len(counts) != 1:
        raise ModelError(f"{header.path.name}: {key} must be one number but for zeros, not {sorted(counts)}")
    return counts.pop()


def head_dim_of(header: GgufHeader, prefix: str) -> int | None:
    return header.integer(f"{prefix}attention.key_length") or even_head_dim(header, prefix)


def even_head_dim(header: GgufHeader, prefix: str) -> int | None:
    heads = one_number(header, f"{prefix}attention.head_count")
    hidden = header.integer(f"{prefix}embedding_length")
    return hidden // heads if hidden and heads else None


def expert_sizes(header: GgufHeader) -> Fields:
    """Under all names that families have for them."""
    prefix = prefix_of(header)
    count = header.integer(f"{prefix}expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": header.integer(f"{prefix}expert_used_count"),
        "moe_intermediate_size": header.integer(f"{prefix}expert_feed_forward_length"),
    }


def has_tensor(header: GgufHeader, part: str) -> bool:
    """Whether some layer has this tensor."""
    return any(name.endswith(f".{part}") for name in header.tensors)


def granite(header: GgufHeader) -> Fields:
    """Of Granite with recurrent states too, under the same names."""
    prefix = prefix_of(header)
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "attention_multiplier": header.number(f"{prefix}attention.scale"),
        "embedding_multiplier": header.number(f"{prefix}embedding_scale"),
        "residual_multiplier": header.number(f"{prefix}residual_scale"),
        "logits_scaling": header.number(f"{prefix}logit_scale"),
    }


# -- names ---------------------------------------------------------------------------------------------------------

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}


def with_experts(prefix: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    return {f"ffn_{part}_exps": f"{prefix}.experts.{{}}.{name}" for part, name in names.items()} | {
        "ffn_gate_inp": f"{prefix}.{router}"
    }


PROJECTIONS = "gate_proj", "up_proj", "down_proj"
