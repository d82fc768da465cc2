"""What mixers with a recurrent state compute, in plain torch: convolutions, the gated delta rule, Mamba-2's scan.

All take [sequences, tokens, …] and the states before the first token, and give results and the states behind the last
one, in float32. Several tokens are computed in chunks by matrix products; what a chunk cannot see comes from the state.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
import torch.nn.functional as F

from windowpane.kv.delta_workspace import CHUNK_TOKENS

L2_EPS = 1e-6


def causal_convolution(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel of x [sequences, tokens, channels] by itself; `weight` is [channels, width].

    `tail` [sequences, channels, width - 1] are the inputs before x, oldest first.
    """
    tokens, width = x.shape[1], weight.shape[1]
    inputs = torch.cat([tail.transpose(1, 2).to(x.dtype), x], dim=1)
    out = inputs[:, :tokens].float() * weight[:, 0]
    for tap in range(1, width):
        out.addcmul_(inputs[:, tap : tap + tokens].float(), weight[:, tap])
    if bias is not None:
        out += bias
    return out, inputs[:, tokens:].transpose(1, 2)


def gated_delta_rule(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, log_decays: torch.Tensor, rates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """S ← e^g S; δ = β (v − Sᵀk); S ← S + k δᵀ; o = Sᵀq, with q and k of unit length and q over √dim.

    queries, keys and values are [sequences, tokens, heads, dim], log_decays (g) and rates (β) [sequences, tokens,
    heads], state [sequences, heads, key dim, value dim].
    """
    queries, keys, values = (x.float().transpose(1, 2) for x in (queries, keys, values))
    log_decays, rates = log_decays.transpose(1, 2), rates.transpose(1, 2)[..., None]
    queries, keys = _unit(queries) * queries.shape[-1] ** -0.5, _unit(keys)
    if queries.shape[2] == 1:
        read, state = _delta_token(queries, keys, values, log_decays, rates, state.float())
    else:
        read, state = _delta_chunks(queries, keys, values, log_decays, rates, state.float())
    return read.transpose(1, 2), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _delta_token(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, log_decays: torch.Tensor, rates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token: the old state is read once for key and query, since o = e^g Sᵀq + (k·q) δ."""
    decays = log_decays.exp()[..., None]
    at_key, at_query = (torch.cat([keys, queries], dim=2) @ state * decays).split(1, dim=2)
    learned = (values - at_key) * rates
    read = at_query + (keys * queries).sum(-1, keepdim=True) * learned
    return read, torch.addcmul(state * decays, keys.transpose(2, 3), learned)


def _delta_chunks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, log_decays: torch.Tensor, rates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The WY form: within a chunk, what each token learns solves a unit lower triangular system."""
    tokens = queries.shape[2]
    queries, keys, values, rates = (_in_chunks(x, tokens) for x in (queries, keys, values, rates))
    total = _in_chunks(log_decays[..., None], tokens).cumsum(-2)  # log of the decay from the chunk's first token on
    between = (total - total.transpose(-1, -2)).tril().exp().tril()
    weighted = keys * rates
    system = (weighted @ keys.transpose(-1, -2) * between).tril(-1)
    right = torch.cat([values * rates, weighted * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, known = solved.split([values.shape[-1], keys.shape[-1]], dim=-1)
    inside = queries @ keys.transpose(-1, -2) * between
    from_state, last = queries * total.exp(), total[..., -1:, :]
    to_state = (keys * (last - total).exp()).transpose(-1, -2)
    reads = []
    for chunk in range(queries.shape[2]):
        learned = fresh[:, :, chunk] - known[:, :, chunk] @ state
        reads.append(from_state[:, :, chunk] @ state + inside[:, :, chunk] @ learned)
        state = state * last[:, :, chunk].exp() + to_state[:, :, chunk] @ learned
    return torch.cat(reads, dim=2)[:, :, :tokens], state


def _in_chunks(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[sequences, heads, chunks, tokens, …], padded with tokens of zeros, which neither decay nor write anything."""
    padded: torch.Tensor = F.pad(x, (0, 0, 0, -tokens % CHUNK_TOKENS)).unflatten(2, (-1, CHUNK_TOKENS))
    return padded


def mamba2_scan(
    x: torch.Tensor, write: torch.Tensor, read: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """S ← e^(−rate · dt) S + dt · x Bᵀ; y = S C.

    x is [sequences, tokens, heads, dim], write (B) and read (C) [sequences, tokens, groups, state dim], steps (dt)
    [sequences, tokens, heads], rates [heads], state [sequences, heads, dim, state dim].
    """
    heads, groups = x.shape[2], write.shape[2]
    x, write, read = (part.float().transpose(1, 2) for part in (x, write, read))
    write, read = (part.repeat_interleave(heads // groups, dim=1) for part in (write, read))
    steps = steps.transpose(1, 2)[..., None]
    log_decays = -rates[:, None, None] * steps
    if x.shape[2] == 1:
        state = torch.addcmul(state.float() * log_decays.exp(), (x * steps).transpose(2, 3), write)
        return (state @ read.transpose(2, 3)).permute(0, 3, 1, 2), state
    y, state = _scan_chunks(x * steps, write, read, log_decays, state.float())
    return y.transpose(1, 2), state


def _scan_chunks(
    x: torch.Tensor, write: torch.Tensor, read: torch.Tensor, log_decays: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[2]
    x, write, read, log_decays = (_in_chunks(part, tokens) for part in (x, write, read, log_decays))
    total = log_decays.cumsum(-2)
    between = (total - total.transpose(-1, -2)).tril().exp().tril()
    inside = (read @ write.transpose(-1, -2) * between) @ x
    last = total[..., -1:, :]
    gained = (x * (last - total).exp()).transpose(-1, -2) @ write
    from_state = (read * total.exp()).transpose(-1, -2)
    outputs = []
    for chunk in range(x.shape[2]):
        outputs.append(inside[:, :, chunk] + (state @ from_state[:, :, chunk]).transpose(-1, -2))
        state = state * last[:, :, chunk].exp() + gained[:, :, chunk]
    return torch.cat(outputs, dim=2)[:, :, :tokens], state
