"""Stage 3: what each token is worth. Attention of probes, what they lead on to, and how much a head matters.

GraceKV's equations (9) and (11) in a third-party reading of arXiv 2608.07001; the largest share in place of the sum, and
all that is read again (``evidence.py``), are our choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tenure.compress.base import Context
from tenure.compress.probes import Probes


@dataclass(frozen=True, eq=False)
class Flow:
    """Evidence about the tokens of a context.

    Args:
        relevance: ``[L, G, T]`` fp32, not negative.
        sensitivity: ``[L, G]``: how much a head's output weighs.
        queries: rotated queries that distortions are measured by, ``[L, G, S, Q, D]`` fp32: for each slot those that
            look at it most.
        shares: their attention on the tokens of their slot, ``[L, G, T, Q]``.
        lse: their log-sum-exps, ``[L, G, S, Q]``.
    """

    relevance: Tensor
    sensitivity: Tensor
    queries: Tensor
    shares: Tensor
    lse: Tensor


def direct(context: Context, probes: Probes, slot: Tensor, slots: int, *, most: int) -> Flow:
    """What probes look at.

    ``s_t = max_u max_h softmax_u(q_u^h k)_t`` over probes and the query heads of a kv head, as KVzip takes it. The paper
    sums, and scales the sums of each head to one; the largest share does not let a token gain by being looked at a
    little by many, and leaves heads as they are.

    Args:
        context: the tokens.
        probes: the queries.
        slot: number of each token's slot, ``[L or 1, T]``.
        slots: how many there are.
        most: queries a slot that are kept for distortions.
    """
    layers, heads, _ = context.shape
    relevance = torch.empty(context.shape, device=context.keys.device)
    sensitivity = torch.ones(layers, heads, device=context.keys.device)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in range(layers):
        shares = context.shares(layer, probes)
        relevance[layer] = shares.amax((1, 2))
        sensitivity[layer] = head_weight(context, layer, shares)
        kept.append(
            _watchers(context, probes, layer, shares.flatten(1, 2), slot[layer % len(slot)], slots, most)
        )
    queries, looked, lse = (torch.stack(part) for part in zip(*kept, strict=True))
    return Flow(relevance, sensitivity, queries, looked, lse)


def head_weight(context: Context, layer: int, shares: Tensor) -> Tensor:
    """``sqrt(sqrt(sum_h |W_O^h|_F^2) mean_u |sum_h W_O^h o_u^h|)`` of each kv head, ``[G]``.

    ``o`` is what the probes read from the compressed tokens; 1 where the output projection cannot be read.

    Args:
        context: the tokens.
        layer: which layer.
        shares: ``[G, g, P, T]``.
    """
    weight = context.out(layer)
    if weight is None:
        return torch.ones(len(shares), device=shares.device)
    few = shares[:, :, :: max(1, shares.shape[2] // 16)]
    read = few.flatten(1, 2) @ context.values[layer].float()
    read = read.view(*few.shape[:3], -1)
    projection = weight.float().view(weight.shape[0], *few.shape[:2], -1)
    static = projection.square().sum((0, 2, 3)).sqrt()
    moved = torch.einsum("Ggpd,oGgd->Gpo", read, projection).norm(dim=-1).mean(1)
    return torch.sqrt(static * moved)


def _watchers(
    context: Context, probes: Probes, layer: int, shares: Tensor, slot: Tensor, slots: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each slot the ``most`` queries that look at it most.

    Returns:
        Queries ``[G, S, Q, D]``, their shares of the slot's tokens ``[G, T, Q]``, their log-sum-exps ``[G, S, Q]``.
    """
    heads, count, tokens = shares.shape
    most = min(most, count)
    edges = torch.searchsorted(slot, torch.arange(slots + 1, device=slot.device))
    sums = torch.nn.functional.pad(shares.cumsum(-1), (1, 0))[:, :, edges]
    mass = sums.diff(dim=-1)
    index = mass.transpose(1, 2).topk(most, dim=-1).indices  # [G, S, Q]
    queries = probes.queries(layer, heads, context.cos_sin, context.kernels)
    lse = probes.lse[layer].view(heads, -1)
    head = torch.arange(heads, device=shares.device)[:, None, None]
    own = index[:, slot]  # [G, T, Q]
    looked = shares[head, own, torch.arange(tokens, device=shares.device)[None, :, None]]
    return queries[head, index], looked, lse[head, index]
