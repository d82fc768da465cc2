"""Attention in plain torch, for any device and dtype: the yardstick for every kernel.

A chunk of a prompt is attended on its own: queries are taken in blocks, and keys are cut to what a block can see, so
that a window costs what it sees and not what was prefilled. Decoding sequences, one token each, are attended together.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 128


def attend(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_key: int,
    window_tokens: int | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one sequence's tokens.

    queries [tokens, query heads, dim] at ascending `positions`; keys and values [KV heads, tokens, dim] of consecutive
    positions from `first_key` on, reaching at least to the last query. Returns [tokens, query heads, dim].
    """
    blocks = []
    for at in range(0, len(queries), QUERY_BLOCK):
        block = slice(at, at + QUERY_BLOCK)
        blocks.append(_attend_block(queries[block], positions[block], keys, values, first_key, window_tokens, scale))
    return torch.cat(blocks)


def attend_decoding(
    queries: torch.Tensor,
    past_keys: torch.Tensor,
    past_values: torch.Tensor,
    counts: torch.Tensor,
    present_keys: torch.Tensor,
    present_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One token of each of several sequences: its past, and itself.

    queries [sequences, query heads, dim]; past [sequences, KV heads, tokens, dim], of which only `counts` [sequences,
    tokens] count; present [sequences, KV heads, dim]. Returns [sequences, query heads, dim].
    """
    sequences, query_heads, dim = queries.shape
    heads = past_keys.shape[1]
    grouped = queries.view(sequences, heads, -1, dim) * scale
    past = (grouped @ past_keys.transpose(2, 3)).float().masked_fill(~counts[:, None, None], float("-inf"))
    itself = (grouped @ present_keys[..., None]).float()
    weights = torch.softmax(torch.cat([past, itself], dim=-1), dim=-1).to(queries.dtype)
    out = weights[..., :-1] @ past_values + weights[..., -1:] * present_values[:, :, None]
    return out.view(sequences, query_heads, -1)


def _attend_block(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_key: int,
    window_tokens: int | None,
    scale: float,
) -> torch.Tensor:
    low, high = int(positions[0]), int(positions[-1])
    seen_from = first_key if window_tokens is None else max(first_key, low - window_tokens + 1)
    keys, values = _visible(keys, values, low, high, first_key, window_tokens)
    key_positions = torch.arange(seen_from, high + 1, device=queries.device)
    mask = key_positions <= positions[:, None]
    if window_tokens is not None:
        mask &= key_positions > positions[:, None] - window_tokens
    tokens, query_heads, dim = queries.shape
    heads = keys.shape[0]
    # Query heads that share a KV head become further rows of it.
    rows = queries.view(tokens, heads, -1, dim).permute(1, 2, 0, 3).reshape(heads, -1, dim)
    out = scaled_dot_product_attention(
        rows[None], keys[None], values[None], attn_mask=mask.repeat(query_heads // heads, 1), scale=scale
    )[0]
    return out.view(heads, -1, tokens, values.shape[-1]).permute(2, 0, 1, 3).reshape(tokens, query_heads, -1)


def _visible(
    keys: torch.Tensor, values: torch.Tensor, low: int, high: int, first_key: int, window_tokens: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that queries at positions [low, high] can see."""
    start = 0 if window_tokens is None else max(0, low - window_tokens + 1 - first_key)
    stop = high + 1 - first_key
    return keys[:, start:stop], values[:, start:stop]
