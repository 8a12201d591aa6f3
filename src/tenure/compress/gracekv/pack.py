"""Stage 5: the frontier of the executed operations as entries."""

from __future__ import annotations

import torch
from torch import Tensor

from tenure.cache.ragged import Entries, in_order
from tenure.compress.gracekv.trees import Forest, Tokens, blend, multiplicity


def frontier(forest: Forest, done: Tensor, short: int = 0) -> tuple[Tensor, Tensor]:
    """Nodes that were made and not split: their first tokens, ascending, and the ones behind the last.

    Args:
        forest: the trees.
        done: executed operations.
        short: entries that are still to be made, 0 or 1: where only splits into three were left, the best of them is
            made into two.
    """
    made = done[forest.op]
    left = made & ~((forest.split >= 0) & done[forest.split.clamp(min=0)])
    low, high = forest.low[left], forest.high[left]
    if short:
        split = forest.split[left]
        utility = torch.where(split >= 0, forest.utility[split.clamp(min=0)], float("-inf"))
        node = int(utility.masked_fill(high - low < 2, float("-inf")).argmax())
        middle = int(low[node] + high[node]) // 2
        low = torch.cat([low, low.new_tensor([middle])])
        high = torch.cat([high, high[node : node + 1]])
        high[node] = middle
    order = low.argsort()
    return low[order], high[order]


def prototypes(
    tokens: Tokens, logical: Tensor, low: Tensor, high: Tensor, sensitivity: Tensor
) -> tuple[Tensor, ...]:
    """Entries of nodes: pair, raw key, value, log-multiplicity, position, start, stop and worth.

    Worth is the relevance that a node stands for, times the sensitivity of its head (our choice).

    Sums are taken token by token in fp32, not from differences of prefix sums; a node of one token is that token to the
    bit.

    Args:
        tokens: the axis.
        logical: ``[N]`` logical indices of the tokens.
        low: ``[n]`` first tokens, ascending; nodes do not overlap.
        high: ``[n]``.
        sensitivity: ``[pairs]`` of the heads.
    """
    count = high - low
    owner = torch.repeat_interleave(torch.arange(len(low), device=low.device), count)
    before = torch.repeat_interleave(count.cumsum(0) - count, count)
    index = torch.arange(len(owner), device=low.device) - before + low[owner]
    keys, values = tokens.keys[index].float(), tokens.values[index].float()
    relevance = tokens.relevance[index, None]
    size = count.float()

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(len(low), *x.shape[1:]).index_add_(0, owner, x)

    key = summed(keys) / size[:, None]
    mass = summed(relevance)
    value = blend(summed(relevance * values), mass, summed(values) / size[:, None])
    bias = multiplicity(key, summed(keys.norm(dim=1)) / size, size).log()
    place = (summed(tokens.position[index].double()) / size).round().int()
    key, value = key.to(tokens.keys.dtype), value.to(tokens.values.dtype)
    single = count == 1
    key[single], value[single] = tokens.keys[low[single]], tokens.values[low[single]]
    bias[single] = 0.0
    pair = tokens.pair[low]
    worth = mass[:, 0] * sensitivity[pair]
    return pair, key, value, bias, place, logical[low].int(), logical[high - 1].int() + 1, worth


def assemble(parts: list[tuple[Tensor, ...]], layers: int, heads: int) -> Entries:
    """Entries of several makers in one, head by head in logical order."""
    pair, *arrays = (torch.cat(one) for one in zip(*parts, strict=True))
    order = in_order(pair, arrays[4])
    lengths = torch.bincount(pair, minlength=layers * heads).view(layers, heads)
    return Entries(lengths, *(array[order] for array in arrays))
