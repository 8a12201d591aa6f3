"""What the kernel modules share: plain torch on the device of its arguments, with temporaries of bounded size.

Logits are taken some at a time, so that memory stays flat however long a cache is. The naive reference has the same
signatures and no blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tenure.kernels import reference

_BLOCK_BYTES = 32 * 2**20
"""Upper limit of one block of logits, as far as one query or key allows."""

_QUERIES = 128
"""Most queries of a block that look back through a window: so few that little of what is computed is hidden."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend`; queries that see every key come some at a time."""
    if causal:
        return reference.attend(q, k, v, causal=True, scale=scale)
    keys, values = k.float(), v.float()
    return _in_blocks(
        q, k.shape[1], lambda part: reference.attend(part, keys, values, causal=False, scale=scale)
    )


def attend_weighted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend_weighted`; the queries come some at a time."""
    keys, values = k.float(), v.float()
    return _in_blocks(
        q, len(k), lambda part: reference.attend_weighted(part, keys, values, bias, scale=scale)
    )


def _in_blocks(
    q: Tensor, keys: int, attend: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Attention of queries ``[..., n, D]`` over ``keys`` keys each."""
    queries = max(1, _BLOCK_BYTES // (4 * q.shape[:-2].numel() * keys))
    parts = [attend(part) for part in torch.split(q, queries, -2)]
    return torch.cat([out for out, _ in parts], -2), torch.cat([lse for _, lse in parts], -1)


def decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query, which sees every key, with its probabilities.

    Two batched products, and the logits are taken once; torch's flash kernel for the CPU runs one thread a kv head.

    Args:
        q: ``[G, g, 1, D]``.
        k: ``[G, m, D]``.
        v: ``[G, m, D]``.
        scale: factor on the logits.

    Returns:
        Output ``[G, g, 1, D]``, log-sum-exp ``[G, g, 1]`` and probabilities ``[G, g, m]`` in fp32.
    """
    # In fp32: a product in bf16 is rounded to 8 bits, and logits of Qwen2.5 go into the thousands.
    logits = torch.bmm(q.squeeze(2).float(), k.float().transpose(1, 2)).mul_(scale)
    lse = logits.logsumexp(-1, keepdim=True)
    mass = logits.softmax(-1)  # not exp(logits - lse): a large log-sum-exp is rounded too coarsely for that
    out = torch.bmm(mass.to(v.dtype), v)
    return out.unsqueeze(2), lse, mass


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logical: Tensor,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    watched: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the newest tokens over those rows that are not too many tokens behind them.

    A query of token ``t`` sees the rows that hold the tokens ``t - window + 1 .. t``, as many of them as are there.

    Args:
        q: ``[G, g, n, D]``.
        k: ``[G, m, D]``, ``m >= n``, the queries' own keys last.
        v: ``[G, m, D]``.
        logical: ``[m]`` ascending, the token of each row.
        window: tokens, at least 1.
        scale: factor on the logits.
        sinks: see :func:`beside_sinks`.
        watched: last queries whose :func:`attention_mass` is summed.

    Returns:
        Output ``[G, g, n, D]`` in the dtype of ``q``, log-sum-exp ``[G, g, n]`` and mass ``[G, g, m]`` in fp32.
    """
    (heads, groups, n, _), m = q.shape, k.shape[1]
    first = torch.searchsorted(logical.contiguous(), logical[m - n :] - (window - 1))
    out, lse = torch.empty_like(q), q.new_empty(heads, groups, n, dtype=torch.float32)
    mass = q.new_zeros(heads, groups, m, dtype=torch.float32)
    widest = min(m, window + _QUERIES)
    block = max(1, min(_QUERIES, _BLOCK_BYTES // (4 * heads * groups * widest)))
    for start in range(0, n, block):
        stop = min(start + block, n)
        low, high = int(first[start]), m - n + stop
        column = torch.arange(low, high, device=q.device)
        own = torch.arange(high - (stop - start), high, device=q.device)
        hidden = (column < first[start:stop, None]) | (column > own[:, None])
        logits = torch.einsum("hgnd,hmd->hgnm", q[:, :, start:stop].float(), k[:, low:high].float()) * scale
        logits.masked_fill_(hidden, float("-inf"))
        shares, total = logits.softmax(-1), logits.logsumexp(-1)
        if sinks is not None:
            shares, total = beside_sinks(shares, total, sinks)
        out[:, :, start:stop] = torch.einsum("hgnm,hmd->hgnd", shares, v[:, low:high].float())
        lse[:, :, start:stop] = total
        if stop > n - watched:
            mass[..., low:high] += shares[:, :, max(0, n - watched - start) :].sum(2)
    return out, lse, mass


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention once each head has a key more that has a logit and no value, as in gpt-oss.

    Args:
        out: ``[G, g, n, D]`` without it.
        lse: ``[G, g, n]`` without it.
        sinks: ``[G, g, 1]`` fp32, the logits.

    Returns:
        Output in the dtype of ``out``, and log-sum-exp.
    """
    share = torch.sigmoid(lse - sinks)[..., None]
    return (out.float() * share).to(out.dtype), torch.logaddexp(lse, sinks)


def attention_mass(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """See :func:`tenure.kernels.reference.attention_mass`; some keys at a time, the product in the dtype of ``q``."""
    heads, groups, w, _ = q.shape
    m = k.shape[1]
    flat = q.reshape(heads, groups * w, -1)
    shift = lse.reshape(heads, groups * w, 1)
    mass = torch.empty(heads, groups, m, dtype=torch.float32, device=q.device)
    block = max(1, _BLOCK_BYTES // (heads * groups * w * 4))
    for start in range(0, m, block):
        stop = min(start + block, m)
        keys = k[:, start:stop].to(q.dtype).transpose(1, 2)
        part = torch.bmm(flat, keys).float().mul_(scale).sub_(shift).exp_()
        part = part.view(heads, groups, w, stop - start)
        first = max(start, m - w)
        if first < stop:  # keys of the queries themselves: a query does not see those after it
            column = torch.arange(first - (m - w), stop - (m - w), device=q.device)
            hidden = column[None, :] > torch.arange(w, device=q.device)[:, None]
            part[..., first - start :].masked_fill_(hidden, 0.0)
        torch.sum(part, 2, out=mass[..., start:stop])
    return mass
