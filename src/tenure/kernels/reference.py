"""Attention kernels in plain torch, in fp32: slow, short and the reference for every other kernel.

Shapes, here and in the other kernel modules: ``G`` kv heads, ``g`` query heads a kv head, ``n`` queries,
``m`` keys, ``D`` head size. Queries are ``[G, g, n, D]``, keys and values ``[G, m, D]``, both rotated already.
Kernels know nothing of sessions or policies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[..., tuple[Tensor, Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` by its positions, split-half layout, in fp32.

    ``y1 = x1 cos - x2 sin``, ``y2 = x2 cos + x1 sin`` (RoFormer, arXiv 2104.09864, in the half-split form of
    Llama). Channels past the rotary size are copied (partial rotary).

    Args:
        x: ``[..., T, D]`` in any float dtype.
        cos: ``[T, r/2]`` or broadcastable, fp32, with the attention factor already in it.
        sin: like ``cos``.

    Returns:
        ``[..., T, D]`` in the dtype of ``x``; rounded once.
    """
    half = cos.shape[-1]
    rotary = x[..., : 2 * half].float()
    x1, x2 = rotary[..., :half], rotary[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dtype == torch.float32:
        # Each product is rounded by itself, as in the stock models: then fp32 logits equal theirs to the bit.
        out[..., :half] = x1 * cos - x2 * sin
        out[..., half : 2 * half] = x2 * cos + x1 * sin
    else:
        out[..., :half] = torch.addcmul(x1 * cos, x2, sin, value=-1)
        out[..., half : 2 * half] = torch.addcmul(x2 * cos, x1, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of one block with its log-sum-exp.

    Args:
        q: ``[G, g, n, D]``.
        k: ``[G, m, D]``.
        v: ``[G, m, D]``.
        causal: query ``i`` sees keys ``0..i``; needs ``n == m``. Otherwise every query sees every key.
        scale: factor on the logits.

    Returns:
        Output ``[G, g, n, D]`` in the dtype of ``q`` and log-sum-exp ``[G, g, n]`` in fp32.
    """
    logits = torch.einsum("hgnd,hmd->hgnm", q.float(), k.float()) * scale
    if causal:
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hgnm,hmd->hgnd", logits.softmax(-1), v.float())
    return out.to(q.dtype), logits.logsumexp(-1)


def attend_weighted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over keys that stand for several tokens each; every query sees every key.

    ``out = sum_j m_j e^{s_j} v_j / sum_j m_j e^{s_j}``: the log-multiplicity ``ln m_j`` is added to the scaled logit,
    which is what ``m_j`` copies of the key would give.

    Args:
        q: ``[g, n, D]``, the query heads of one kv head.
        k: ``[m, D]``, ``m`` at least 1.
        v: ``[m, D]``.
        bias: ``[m]`` fp32, log-multiplicities.
        scale: factor on the logits.

    Returns:
        Output ``[g, n, D]`` in the dtype of ``q`` and log-sum-exp ``[g, n]`` in fp32.
    """
    logits = torch.einsum("gnd,md->gnm", q.float(), k.float()) * scale + bias
    out = torch.einsum("gnm,md->gnd", logits.softmax(-1), v.float())
    return out.to(q.dtype), logits.logsumexp(-1)


def extend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of the newest tokens over a segment that ends with them: query ``i`` sees keys ``0 .. m - n + i``.

    Args:
        q: ``[G, g, n, D]``.
        k: ``[G, m, D]``, ``m >= n``, the queries' own keys last.
        v: ``[G, m, D]``.
        scale: factor on the logits.
        window: queries whose mass is wanted.

    Returns:
        Output ``[G, g, n, D]`` and log-sum-exp ``[G, g, n]``, as :func:`attend`, and the :func:`attention_mass` of
        the last ``window`` queries where the kernel has it at hand, else None.
    """
    return *in_two_calls(attend, q, k, v, scale), None


def in_two_calls(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """:func:`extend` by a kernel that knows no offset: the keys before the queries' own, then those, merged."""
    rows = k.shape[1] - q.shape[2]
    own = attend(q, k[:, rows:], v[:, rows:], causal=True, scale=scale)
    if not rows:
        return own
    return merge([attend(q, k[:, :rows], v[:, :rows], causal=False, scale=scale), own])


def attention_mass(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """Softmax mass that each key received from a run of queries which end at the last key.

    ``mass[h, j] = sum_i exp(q_i k_j * scale - lse_i)`` over the ``w`` queries, where query ``i`` stands at key
    ``m - w + i`` and does not see the keys after itself.

    Args:
        q: ``[G, g, w, D]``, the last ``w`` queries.
        k: ``[G, m, D]``, every key of the segment, those of the queries last.
        lse: ``[G, g, w]`` in fp32: log-sum-exp over *all* segments.
        scale: factor on the logits.

    Returns:
        ``[G, g, m]`` in fp32.
    """
    logits = torch.einsum("hgwd,hmd->hgwm", q.float(), k.float()) * scale
    mass = (logits - lse[..., None]).exp()
    w, m = q.shape[2], k.shape[1]
    hidden = torch.ones(w, w, dtype=torch.bool, device=q.device).triu(1)
    mass[..., m - w :].masked_fill_(hidden, 0.0)
    return mass.sum(2)


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the attention over disjoint key sets by their log-sum-exp.

    ``lse = log sum_s exp(lse_s)``, ``out = sum_s exp(lse_s - lse) out_s``: what one softmax over all keys gives.

    Args:
        parts: at least one pair of ``out`` ``[G, g, n, D]`` and ``lse`` ``[G, g, n]``.

    Returns:
        The joined pair, the output in the dtype of the first part.
    """
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        # The share comes from the difference, exp(other_lse - total) as a sigmoid: a log-sum-exp of Qwen2.5 passes
        # 10,000, where fp32 goes in steps of 1e-3, and a rounded total would scale the output by that.
        # Two empty sets (both -inf) differ by no number; what they share is 0 either way.
        share = torch.sigmoid((other_lse - lse).nan_to_num(nan=0.0))[..., None]
        out = torch.lerp(out.float(), other.float(), share).to(out.dtype)
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
