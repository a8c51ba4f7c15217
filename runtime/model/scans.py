"""Recurrences over a sequence, in chunks of tokens: products inside a chunk, and states from chunk to chunk.

Sums and outputs are in max(float32, type of the inputs). Chunks come first, each contiguous, so that no product copies
what it reads: what autograd keeps is what the memory model counts (`recurrent` in `hexiopt/problem/layer_rows.py`).
Shapes: B samples, T tokens, h heads, K the width of keys and queries and that of a state's rows, V the width of a
head's values.
"""

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from runtime.model.functions import exact

_NORM_EPS = 1e-6  # of squared lengths of keys and queries


def mamba_scan(
    chunk: int, values_bthv: Tensor, steps_bth: Tensor, decays_h: Tensor, keys_bthk: Tensor, queries_bthk: Tensor
) -> Tensor:
    """The outputs [B, T, h, V] of Mamba-2 (Dao and Gu, arXiv 2405.21060, section 6): after token t a head has the state
    S = exp(step · decay) S + step · key ⊗ value, of which the query reads its output."""
    values, steps, keys, queries = _to_chunks(chunk, values_bthv, steps_bth, keys_bthk, queries_bthk)
    logs = (steps * exact(decays_h)[:, None]).cumsum(-1)  # of what is left of a state since the chunk began
    values = values * steps.unsqueeze(-1)
    inside = queries @ keys.mT * _decay(logs) @ values
    updates = (keys * (logs[..., -1:] - logs).exp().unsqueeze(-1)).mT @ values
    left, read = logs[..., -1].exp()[..., None, None], queries * logs.exp().unsqueeze(-1)
    state, outputs = torch.zeros_like(updates[0]), []
    for intra, query, rest, more in zip(inside, read, left, updates, strict=True):
        outputs.append(intra + query @ state)
        state = rest * state + more
    return _join_chunks(outputs, values_bthv)


def delta_scan(
    chunk: int, values_bthv: Tensor, writes_bth: Tensor, logs_bth: Tensor, keys_bthk: Tensor, queries_bthk: Tensor
) -> Tensor:
    """The outputs [B, T, h, V] of the gated delta rule (Yang et al., arXiv 2412.06464, section 3): token t decays the
    state by exp(log), and writes so much of its value, less what its key reads, under its key; its query reads.

    Keys and queries are of length one, queries divided by sqrt K. Inside a chunk what is written follows from a
    triangular system of its keys.
    """
    values, writes, logs, keys, queries = _to_chunks(chunk, values_bthv, writes_bth, logs_bth, keys_bthk, queries_bthk)
    keys, queries, logs = _unit(keys), _unit(queries) / sqrt(queries.shape[-1]), logs.cumsum(-1)
    decay, since, written = _decay(logs), logs.exp().unsqueeze(-1), keys * writes.unsqueeze(-1)
    system = (written @ keys.mT * decay).tril(-1)
    wanted = torch.cat([values * writes.unsqueeze(-1), written * since], dim=-1)
    solved = torch.linalg.solve_triangular(_with_ones(system), wanted, upper=False, unitriangular=True)
    fresh, stale = solved.split_with_sizes([values.shape[-1], keys.shape[-1]], dim=-1)
    inside, read = queries @ keys.mT * decay, queries * since
    decayed, left = keys * (logs[..., -1:] - logs).exp().unsqueeze(-1), logs[..., -1].exp()[..., None, None]
    state, outputs = keys.new_zeros(*keys.shape[1:3], keys.shape[-1], values.shape[-1]), []
    for new, old, query, pairs, key, rest in zip(fresh, stale, read, inside, decayed, left, strict=True):
        change = new - old @ state
        outputs.append(query @ state + pairs @ change)
        state = rest * state + key.mT @ change
    return _join_chunks(outputs, values_bthv)


def causal_convolution(x_btc: Tensor, weight_c1k: Tensor, bias_c: Tensor | None) -> Tensor:
    """silu of each channel's sum over the last k tokens, its own included [B, T, C]."""
    width = weight_c1k.shape[-1]
    if not x_btc.shape[-1]:
        return x_btc
    # Padded at both ends by the convolution itself: a copy padded at the first would be kept for the backward.
    sums = functional.conv1d(x_btc.transpose(1, 2), weight_c1k, bias_c, padding=width - 1, groups=len(weight_c1k))
    return functional.silu(sums[:, :, : x_btc.shape[1]]).transpose(1, 2)


def _to_chunks(chunk: int, *of_tokens: Tensor) -> list[Tensor]:
    """[B, T, n, ...] as [chunks, B, n, chunk, ...]; tokens after the last are zero, which decays and writes nothing."""
    missing = -of_tokens[0].shape[1] % chunk
    padded = (functional.pad(exact(x), (0, 0) * (x.ndim - 2) + (0, missing)) for x in of_tokens)
    whole = (x.unflatten(1, (-1, chunk)) for x in padded)  # type: ignore[no-untyped-call]
    return [x.transpose(2, 3).transpose(0, 1).contiguous() for x in whole]


def _decay(logs: Tensor) -> Tensor:
    """What is left at each token of what each earlier one of its chunk wrote; of later ones nothing."""
    later = logs.new_full((logs.shape[-1],) * 2, -torch.inf).triu(1)
    return (logs.unsqueeze(-1) - logs.unsqueeze(-2) + later).exp()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def _with_ones(system: Tensor) -> Tensor:
    return system + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)


def _join_chunks(outputs: list[Tensor], like_bthv: Tensor) -> Tensor:
    """Outputs of chunks [B, h, chunk, V] one after another, without tokens after the last."""
    return torch.cat(outputs, dim=2)[:, :, : like_bthv.shape[1]].transpose(1, 2)
