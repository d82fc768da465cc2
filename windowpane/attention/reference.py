"""Attention in plain torch, for any device and dtype: the yardstick for every kernel.

A chunk of a prompt is attended on its own: queries are taken in blocks, and keys are cut to what a block can see, so
that a window costs what it sees and not what was prefilled. Decoding sequences, one token each, are attended together.

Both return [tokens, query heads, dim]; with `lse=True` also the log-sum-exp of each query's scores, sinks included, in
float32 [tokens, query heads].
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores

QUERY_BLOCK = 128


@overload
def attend(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores
) -> Tensor: ...
@overload
def attend(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores, *,
    lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores, *,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence's tokens over their past and each other.

    queries [tokens, query heads, dim] at ascending `positions`; keys and values [KV heads, tokens, dim] of consecutive
    positions from `first_key` on, reaching at least to the last token that a query sees.
    """
    blocks = []
    for at in range(0, len(queries), QUERY_BLOCK):
        block = slice(at, at + QUERY_BLOCK)
        blocks.append(_attend_block(queries[block], positions[block], keys, values, first_key, mask, scores, lse))
    out = torch.cat([attended for attended, _ in blocks])
    return (out, torch.cat([sums for _, sums in blocks if sums is not None])) if lse else out


def _attend_block(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, first_key: int, mask: Mask, scores: Scores,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen = [mask.seen(position) for position in positions.tolist()]
    low, high = max(first_key, seen[0].start), seen[-1].stop  # queries ascend, and so do both ends of what they see
    keys, values = (x[:, low - first_key : high - first_key] for x in (keys, values))
    at = torch.arange(low, high, device=queries.device)
    starts, stops = torch.tensor([(s.start, s.stop) for s in seen], device=queries.device).T[..., None]
    visible = (at >= starts) & (at < stops)
    tokens, query_heads, dim = queries.shape
    heads = keys.shape[0]
    rows = queries.view(tokens, heads, -1, dim).permute(1, 2, 0, 3)  # [KV heads, query heads of each, tokens, dim]
    sums = None
    if scores.are_plain and not lse:
        # Query heads that share a KV head become further rows of it.
        joined, seen_by_rows = rows.reshape(1, heads, -1, dim), visible.repeat(query_heads // heads, 1)
        out = scaled_dot_product_attention(joined, keys[None], values[None], attn_mask=seen_by_rows, scale=scores.scale)
        out = out.view(heads, -1, tokens, values.shape[-1])
    else:
        products = _wide(rows) @ _wide(keys).transpose(1, 2)[:, None] * scores.scale
        weights, sums = _weigh(products, visible, scores, lse)
        out = (weights @ _wide(values)[:, None]).to(queries.dtype)
    out = out.permute(2, 0, 1, 3).reshape(tokens, query_heads, -1)
    return out, None if sums is None else sums.permute(2, 0, 1).reshape(tokens, query_heads)


@overload
def attend_decoding(
    queries: Tensor, past_keys: Tensor, past_values: Tensor, counts: Tensor, present_keys: Tensor,
    present_values: Tensor, scores: Scores,
) -> Tensor: ...  # fmt: skip
@overload
def attend_decoding(
    queries: Tensor, past_keys: Tensor, past_values: Tensor, counts: Tensor, present_keys: Tensor,
    present_values: Tensor, scores: Scores, *, lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend_decoding(
    queries: Tensor, past_keys: Tensor, past_values: Tensor, counts: Tensor, present_keys: Tensor,
    present_values: Tensor, scores: Scores, *, lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each of several sequences: its past, and itself.

    queries [sequences, query heads, dim]; past [sequences, KV heads, tokens, dim], of which only `counts` [sequences,
    tokens] count; present [sequences, KV heads, dim].
    """
    sequences, query_heads, dim = queries.shape
    heads = past_keys.shape[1]
    grouped = queries.view(sequences, heads, -1, dim) * scores.scale
    products = torch.cat([grouped @ past_keys.transpose(2, 3), grouped @ present_keys[..., None]], dim=-1)
    visible = pad(counts, (0, 1), value=True)[:, None, None, None]
    weights, sums = _weigh(_wide(products)[..., None, :], visible, scores, lse)
    weights = weights[..., 0, :].to(queries.dtype)
    out = weights[..., :-1] @ past_values + weights[..., -1:] * present_values[:, :, None]
    out = out.view(sequences, query_heads, -1)
    return out if sums is None else (out, sums.view(sequences, query_heads))


def _weigh(logits: Tensor, visible: Tensor, scores: Scores, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Scaled products [..., KV heads, query heads of each, tokens, keys] as weights; their log-sum-exp on request."""
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~visible, float("-inf"))
    keys = logits.shape[-1]
    if scores.sinks is not None:  # one more column
        sinks = scores.sinks.to(logits.dtype).view(*logits.shape[-4:-2], 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    sums = torch.logsumexp(logits, dim=-1).float() if lse else None
    return torch.softmax(logits, dim=-1)[..., :keys], sums


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
