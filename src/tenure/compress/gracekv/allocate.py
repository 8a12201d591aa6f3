"""Stage 4: one auction over all layers, heads and resolutions.

Operations (add a slot's root, split a node) have a utility for each entry that they cost, and need their parent to be
executed. Best-first execution with a priority queue pops them in the order of ``kappa``, the smallest utility on the
way from the root; so the whole auction is one sort by ``kappa``, and a few small ones where it ends. Proof: while an
operation is not executed, it or an ancestor of it is in the queue with at least its ``kappa``.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def path_minimum(utility: Tensor, parent: Tensor) -> Tensor:
    """``kappa``: the smallest utility of an operation and all that must come before it, ``[N]``."""
    kappa, above = utility.clone(), parent.clone()
    while bool((above >= 0).any()):
        known = above >= 0
        kappa = torch.where(known, torch.minimum(kappa, kappa[above.clamp(min=0)]), kappa)
        above = torch.where(known, above[above.clamp(min=0)], above)
    return kappa


def sort_auction(utility: Tensor, cost: Tensor, parent: Tensor, budget: int) -> Tensor:
    """Which operations are executed, ``[N]`` bool: those of the priority queue, ties and all.

    All with a larger ``kappa`` than the first one that does not fit are executed. Those with the same one are what its
    utility holds back: one cluster below each operation of that very utility, in the order of their numbers; of the first
    cluster that does not fit, the head is executed and the rest is an auction of its own. A last unit that the next
    operation cannot use goes to the best one that can.

    Args:
        utility: ``[N]`` fp32.
        cost: ``[N]`` int64, 1 or 2.
        parent: ``[N]`` number of the operation that must come before, smaller than its own; -1 for none.
        budget: entries to spend.
    """
    done = torch.zeros(len(utility), dtype=torch.bool, device=utility.device)
    active = torch.arange(len(utility), device=utility.device)
    above = parent
    while budget > 0 and len(active):
        value, price = utility[active], cost[active]
        kappa = path_minimum(value, above)
        order = kappa.sort(descending=True, stable=True).indices
        fits = int((price[order].cumsum(0) <= budget).sum())
        if fits == len(active):
            done[active] = True
            budget -= int(price.sum())
            break
        cut = kappa[order[fits]]
        larger = kappa > cut
        done[active[larger]] = True
        budget -= int(price[larger].sum())
        head = (kappa == cut) & (value == cut)
        owner = _heads(head, above)
        owner = torch.where(kappa == cut, owner, -1)
        group = (owner >= 0).nonzero().flatten()
        group = group[owner[group].sort(stable=True).indices]
        heads, sizes = torch.unique_consecutive(owner[group], return_counts=True)
        ends = sizes.cumsum(0)
        paid = price[group].cumsum(0)[ends - 1]
        whole = int((paid <= budget).sum())
        edge = int(ends[whole - 1]) if whole else 0
        done[active[group[:edge]]] = True
        budget -= int(paid[whole - 1]) if whole else 0
        cluster = group[edge : int(ends[whole])]
        first = int(heads[whole])
        if int(price[first]) > budget:
            break
        done[active[first]] = True
        budget -= int(price[first])
        cluster = cluster[cluster != first].sort().values
        local = torch.full((len(active) + 1,), -1, device=utility.device)
        local[cluster] = torch.arange(len(cluster), device=utility.device)
        above = local[above[cluster]]
        active = active[cluster]
    if budget > 0:
        ready = ~done & (cost <= budget) & ((parent < 0) | done[parent.clamp(min=0)])
        if bool(ready.any()):
            done[utility.masked_fill(~ready, float("-inf")).argmax()] = True
    return done


def _heads(head: Tensor, parent: Tensor) -> Tensor:
    """The nearest of some operations at or above each, -1 where there is none."""
    index = torch.arange(len(head), device=head.device)
    found = torch.where(head, index, -1)
    above = parent.clone()
    while bool(((found < 0) & (above >= 0)).any()):
        open_ = (found < 0) & (above >= 0)
        found = torch.where(open_, found[above.clamp(min=0)], found)
        above = torch.where(open_ & (found < 0), parent[above.clamp(min=0)], above)
    return found


def heap_auction(utility: list[float], cost: list[int], parent: list[int], budget: int) -> list[bool]:
    """The auction with a priority queue, operation by operation: the reference."""
    children: dict[int, list[int]] = {}
    for op, above in enumerate(parent):
        children.setdefault(above, []).append(op)
    queue = [(-utility[op], op) for op in children.get(-1, [])]
    heapq.heapify(queue)
    done = [False] * len(utility)
    while queue and budget:
        _, op = heapq.heappop(queue)
        if cost[op] > budget:
            continue
        budget -= cost[op]
        done[op] = True
        for child in children.get(op, []):
            heapq.heappush(queue, (-utility[child], child))
    return done


def cut_value(kappa: Tensor, cost: Tensor, budget: int) -> float:
    """The ``kappa`` at which the budget is spent; -inf while the operations do not spend it.

    More operations can only raise it, and no descendant's ``kappa`` is larger than a node's own: what lies below it need
    not be looked into further (exact lazy pricing).
    """
    if int(cost.sum()) <= budget:
        return float("-inf")
    values, order = kappa.sort(descending=True, stable=True)
    place = int((cost[order].cumsum(0) <= budget).sum())
    return float(values[place])


def pooled_utility(gain: Tensor, cost: Tensor, parent: Tensor, level: Tensor) -> Tensor:
    """Utilities under which an operation is carried by what it makes possible, ``[N]``.

    From the deepest level up, an operation is joined with the best bundles below it while these are denser than itself
    (Horn 1972; one bundle a node, an approximation of the full Sidney decomposition).

    Args:
        gain: ``[N]`` of each operation.
        cost: ``[N]``.
        parent: ``[N]``, -1 for none.
        level: ``[N]`` depth of each operation; a parent's is smaller.
    """
    total, spent = gain.double().clone(), cost.double().clone()
    for depth in range(int(level.max()), 0, -1):
        ops = (level == depth).nonzero().flatten()
        density = total[ops] / spent[ops]
        ops = ops[density.sort(descending=True, stable=True).indices]
        while len(ops):  # best child of each parent first
            above = parent[ops]
            first = torch.full((len(gain),), len(ops), device=gain.device)
            place = torch.arange(len(ops), device=gain.device)
            first.scatter_reduce_(0, above, place, "amin")
            lead = first[above] == place
            child = ops[lead]
            up = parent[child]
            better = total[child] / spent[child] > total[up] / spent[up]
            total[up[better]] += total[child[better]]
            spent[up[better]] += spent[child[better]]
            ops = ops[~lead]
    return (total / spent).float()
