"""Attention on the CPU, by kernels that give the log-sum-exp that segments are merged by.

On CPUs with bf16 products of vectors but not of tiles that is our own (``flash.c``), elsewhere torch's flash kernel,
which uses tiles where it can and fp32 otherwise. The latter takes keys and values with a zero stride over the query
heads of a group, so nothing is repeated in memory. The naive reference beside it has the same signatures.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tenure.kernels import common, reference
from tenure.kernels.build import has_tiles
from tenure.kernels.common import decode
from tenure.kernels.native import Native, native
from tenure.kernels.products import MAX_ROWS
from tenure.kernels.reference import in_two_calls, merge

__all__ = ["attend", "attend_weighted", "attention_mass", "decode", "extend", "merge", "rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`tenure.kernels.reference.rotate`."""
    kernels = native()
    if kernels is not None and kernels.can_rotate(x, cos):
        return kernels.rotate_rows(x, cos, sin)
    return reference.rotate(x, cos, sin)


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
    """See :func:`tenure.kernels.reference.attention_mass`; some keys at a time, so that memory stays flat."""
    kernels = _vector_products()
    if kernels is not None and kernels.can_attend(q):
        return kernels.attention_mass(q, k, lse, scale=scale)
    return common.attention_mass(q, k, lse, scale=scale)
