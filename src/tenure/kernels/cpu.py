"""Attention on the CPU, by kernels that give the log-sum-exp that segments are merged by.

On CPUs with bf16 products of vectors but not of tiles that is our own (``flash.c``), elsewhere torch's flash kernel,
which uses tiles where it can and fp32 otherwise. The latter takes keys and values with a zero stride over the query
heads of a group, so nothing is repeated in memory. The naive reference beside it has the same signatures.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tenure.kernels.build import has_tiles
from tenure.kernels.native import MAX_ROWS, Native, native
from tenure.kernels.reference import in_two_calls, merge, rotate

__all__ = ["attend", "attend_weighted", "attention_mass", "decode", "extend", "merge", "rotate"]


_BLOCK_BYTES = 32 * 2**20
"""Upper limit of one block of attention statistics."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend`."""
    kernels = _vector_products()
    if kernels is not None and kernels.can_attend(q):
        return kernels.attend(q, k, v, first=0 if causal else k.shape[1], scale=scale)
    groups = q.shape[1]
    heads = (k.shape[0], groups, k.shape[1], k.shape[2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k[:, None].expand(heads), v[:, None].expand(heads), 0.0, causal, scale=scale
    )
    return out, lse


def extend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`tenure.kernels.reference.extend`; the mass comes along where the queries are few."""
    kernels = _vector_products()
    if kernels is None or not kernels.can_attend(q):
        return *in_two_calls(attend, q, k, v, scale), None
    if q.shape[2] <= MAX_ROWS:
        return kernels.extend(q, k, v, window=window, scale=scale)
    return *kernels.attend(q, k, v, first=k.shape[1] - q.shape[2], scale=scale), None


@functools.cache
def _vector_products() -> Native | None:
    """Our kernels, where torch's would not use bf16 products."""
    return None if has_tiles() else native()


def decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query, which sees every key, with its probabilities.

    Two batched products beat the flash kernel here: it runs one thread a kv head.

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


def attend_weighted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """See :func:`tenure.kernels.reference.attend_weighted`."""
    groups, n, dim = q.shape
    if n == 1:
        logits = torch.mm(q[:, 0].float(), k.float().t()).mul_(scale).add_(bias)
        out = torch.mm(logits.softmax(-1).to(v.dtype), v)
        return out[:, None], logits.logsumexp(-1, keepdim=True)
    heads = (1, groups, len(k), dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None],
        k[None, None].expand(heads),
        v[None, None].expand(heads),
        0.0,
        False,
        attn_mask=bias.expand(1, 1, n, len(k)),
        scale=scale,
    )
    return out[0], lse[0]


def attention_mass(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """See :func:`tenure.kernels.reference.attention_mass`; blocked over keys, so that memory stays flat."""
    kernels = _vector_products()
    if kernels is not None and kernels.can_attend(q):
        return kernels.attention_mass(q, k, lse, scale=scale)
    heads, groups, w, _ = q.shape
    m = k.shape[1]
    flat = q.reshape(heads, groups * w, -1)
    shift = lse.reshape(heads, groups * w, 1)
    mass = torch.empty(heads, groups, m, dtype=torch.float32)
    block = max(w, _BLOCK_BYTES // (heads * groups * w * 4))
    for start in range(0, m, block):
        stop = min(start + block, m)
        logits = torch.bmm(flat, k[:, start:stop].transpose(1, 2)).float().mul_(scale)
        part = logits.sub_(shift).exp_().view(heads, groups, w, stop - start)
        first = max(start, m - w)
        if first < stop:  # keys of the queries themselves: a query does not see those after it
            column = torch.arange(first - (m - w), stop - (m - w))
            hidden = column[None, :] > torch.arange(w)[:, None]
            part[..., first - start :].masked_fill_(hidden, 0.0)
        torch.sum(part, 2, out=mass[..., start:stop])
    return mass
