"""Attention in plain torch, for any device and dtype: the yardstick for every kernel.

A chunk of a prompt is attended on its own: queries are taken in blocks, and keys are cut to what a block can see, so
that a window costs what it sees and not what was prefilled. Decoding sequences, one token each, are attended together.

Both return [tokens, query heads, dim]; `lse`, float32 [tokens, query heads], is filled with the log-sum-exp of each
query's scores, sinks included, where it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores

QUERY_BLOCK = 128


def attend(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One sequence's tokens over their past and each other.

    queries [tokens, query heads, dim] at ascending `positions`; keys and values [KV heads, tokens, dim] of consecutive
    positions from `first_key` on, reaching at least to the last token that a query sees.
    """
    blocks = []
    for at in range(0, len(queries), QUERY_BLOCK):
        block = slice(at, at + QUERY_BLOCK)
        sums = None if lse is None else lse[block]
        blocks.append(_attend_block(queries[block], positions[block], keys, values, first_key, mask, scores, sums))
    return torch.cat(blocks)


def _attend_block(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores,
    lse: Tensor | None,
) -> Tensor:  # fmt: skip
    seen = [mask.seen(position) for position in positions.tolist()]
    low, high = max(first_key, seen[0].start), seen[-1].stop  # queries ascend, and so do both ends of what they see
    keys, values = (x[:, low - first_key : high - first_key] for x in (keys, values))
    at = torch.arange(low, high, device=queries.device)
    starts, stops = torch.tensor([(s.start, s.stop) for s in seen], device=queries.device).T[..., None]
    visible = (at >= starts) & (at < stops)
    tokens, query_heads, dim = queries.shape
    heads = keys.shape[0]
    rows = queries.view(tokens, heads, -1, dim).permute(1, 2, 0, 3)  # [KV heads, query heads of each, tokens, dim]
    if scores.are_plain and lse is None:
        # Query heads that share a KV head become further rows of it.
        joined, seen_by_rows = rows.reshape(1, heads, -1, dim), visible.repeat(query_heads // heads, 1)
        out = scaled_dot_product_attention(joined, keys[None], values[None], attn_mask=seen_by_rows, scale=scores.scale)
        out = out.view(heads, -1, tokens, values.shape[-1])
    else:
        products = _wide(rows) @ _wide(keys).transpose(1, 2)[:, None] * scores.scale
        sums = None if lse is None else lse.view(tokens, heads, -1).permute(1, 2, 0)
        out = (_weigh(products, visible, scores, sums) @ _wide(values)[:, None]).to(queries.dtype)
    return out.permute(2, 0, 1, 3).reshape(tokens, query_heads, -1)


def attend_decoding(
    queries: Tensor, past_keys: Tensor, past_values: Tensor, counts: Tensor, present_keys: Tensor,
    present_values: Tensor, scores: Scores, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token of each of several sequences: its past, and itself.

    queries [sequences, query heads, dim]; past [sequences, KV heads, tokens, dim], of which only `counts` [sequences,
    tokens] count; present [sequences, KV heads, dim].
    """
    sequences, query_heads, dim = queries.shape
    heads = past_keys.shape[1]
    grouped = queries.view(sequences, heads, -1, dim) * scores.scale
    products = torch.cat([grouped @ past_keys.transpose(2, 3), grouped @ present_keys[..., None]], dim=-1)
    visible = pad(counts, (0, 1), value=True)[:, None, None, None]
    sums = None if lse is None else lse.view(sequences, heads, -1, 1)
    weights = _weigh(_wide(products)[..., None, :], visible, scores, sums)[..., 0, :].to(queries.dtype)
    out = weights[..., :-1] @ past_values + weights[..., -1:] * present_values[:, :, None]
    return out.view(sequences, query_heads, -1)


def _weigh(logits: Tensor, visible: Tensor, scores: Scores, lse: Tensor | None) -> Tensor:
    """Scaled products [..., KV heads, query heads of each, tokens, keys] as weights; fills `lse` where it is given."""
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~visible, float("-inf"))
    keys = logits.shape[-1]
    if scores.sinks is not None:  # one more column
        sinks = scores.sinks.to(logits.dtype).view(*logits.shape[-4:-2], 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    if lse is not None:
        lse.copy_(torch.logsumexp(logits, dim=-1))
    return torch.softmax(logits, dim=-1)[..., :keys]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
