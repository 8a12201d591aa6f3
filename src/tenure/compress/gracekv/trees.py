"""Stage 2: prototype trees, all of them at once, and what each of their operations is worth.

A node stands for a run of tokens by one prototype: the mean of the unrotated keys, the relevance-weighted mean of the
values, and a multiplicity. Leaves are tokens as they are. Trees grow level by level over every layer, head and slot
together, and only where the auction can still reach (equations (6) to (8), (12) and (13) in a third-party reading of
arXiv 2608.07001; splits are chosen by weighted variance in place of probe distortion, which is our choice).

All tokens of all (layer, kv head) pairs lie on one axis, pair after pair; a node is a range of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tenure.compress.gracekv.allocate import cut_value, path_minimum, pooled_utility

_DEEP = 8
"""From this level on, nodes are halved: a chain of extractions would be as long as the slot."""

_PART = 1 << 15
"""Nodes that are priced at once: bounds the memory."""

_FEATURES = 16
_VALUES = 8
_OVER = 3.0
"""Largest log of a prototype's share of a probe: beyond, it is wrong anyhow."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The token axis ``N``.

    Args:
        pair: ``[N]`` layer * kv_heads + head, ascending.
        slot: ``[N]`` slot of each token.
        root: ``[N]`` bool, where a tree begins.
        position: ``[N]`` rotary positions.
        keys: raw keys ``[N, D]``.
        values: ``[N, D]``.
        relevance: ``[N]`` fp32.
        turn: ``[N]`` turning scores: a good place to split behind a token.
        shares: ``[N, Q]`` attention of the slot's queries.
    """

    pair: Tensor
    slot: Tensor
    root: Tensor
    position: Tensor
    keys: Tensor
    values: Tensor
    relevance: Tensor
    turn: Tensor
    shares: Tensor

    def __len__(self) -> int:
        return len(self.pair)

    def keep(self, mask: Tensor, root: Tensor) -> Tokens:
        """The tokens of a mask, with other roots ``[kept]``."""
        return Tokens(
            self.pair[mask],
            self.slot[mask],
            root,
            self.position[mask],
            self.keys[mask],
            self.values[mask],
            self.relevance[mask],
            self.turn[mask],
            self.shares[mask],
        )


@dataclass(frozen=True, eq=False)
class Judges:
    """What distortions are measured by.

    Args:
        queries: rotated queries ``[pairs, S, Q, D]``.
        lse: ``[pairs, S, Q]``.
        sensitivity: ``[pairs]``.
        base: ``[pairs]``, added to relevance where splits are chosen: a tenth of its mean.
        scale: factor on the logits.
        cos: ``[P, r/2]`` for the positions ``first, first + 1, ...``.
        sin: like ``cos``.
        first: see ``cos``.
    """

    queries: Tensor
    lse: Tensor
    sensitivity: Tensor
    base: Tensor
    scale: float
    cos: Tensor
    sin: Tensor
    first: int


@dataclass(eq=False)
class Forest:
    """Nodes and operations. Operation ``i`` makes the nodes whose ``op`` is ``i``.

    Args:
        low: ``[nodes]`` first token.
        high: ``[nodes]`` behind the last one.
        op: ``[nodes]`` operation that makes it.
        split: ``[nodes]`` operation that splits it, -1 where none was priced.
        utility: ``[ops]``.
        kappa: ``[ops]``: the smallest utility from the root down.
        cost: ``[ops]`` entries.
        parent: ``[ops]`` operation that must come before, -1 for none.
        level: ``[ops]``.
    """

    low: Tensor
    high: Tensor
    op: Tensor
    split: Tensor
    utility: Tensor
    kappa: Tensor
    cost: Tensor
    parent: Tensor
    level: Tensor


def grow(tokens: Tokens, judges: Judges, budget: int, *, lazy: bool = True, pooled: bool = False) -> Forest:
    """Grow and price trees.

    Args:
        tokens: the axis.
        judges: queries and weights.
        budget: of the auction, to know what it cannot reach.
        lazy: leave nodes alone that the auction cannot reach; the result of the auction is the same.
        pooled: price operations by what they make possible; needs whole trees.
    """
    lazy = lazy and not pooled
    pricer = _Pricer(tokens, judges)
    low = tokens.root.nonzero().flatten()
    high = torch.cat([low[1:], low.new_tensor([len(tokens)])])
    damage, dropped = pricer.distortion(low, high)
    weight = pricer.weight(low, high)
    utility = weight * (dropped - damage)
    cost = torch.ones_like(low)
    ops = torch.arange(len(low), device=low.device)
    parent = torch.full_like(low, -1)
    nodes = _Level(low, high, ops, damage)
    levels, gains = [nodes], [utility]
    kappas, costs, parents, depths = [utility], [cost], [parent], [torch.zeros_like(low)]
    splits: list[Tensor] = []
    total = len(low)
    depth = 0
    while True:
        kappa = torch.cat(kappas)
        known = cut_value(kappa, torch.cat(costs), budget) if lazy else float("-inf")
        able = (nodes.high - nodes.low > 1) & (kappa[nodes.op] >= known)
        split = torch.full_like(nodes.low, -1)
        chosen = able.nonzero().flatten()
        splits.append(split)
        if not len(chosen):
            break
        split[chosen] = total + torch.arange(len(chosen), device=low.device)
        depth += 1
        parts = pricer.split(nodes.low[chosen], nodes.high[chosen], halve=depth > _DEEP)
        start, stop, owner = parts.flat()
        children = _Level(start, stop, total + owner, pricer.distortion(start, stop)[0])
        below = torch.zeros(len(chosen), device=low.device).index_add_(0, owner, children.damage)
        gain = pricer.weight(nodes.low[chosen], nodes.high[chosen]) * (nodes.damage[chosen] - below)
        utility = gain / parts.cost
        kappas.append(torch.minimum(utility, kappa[nodes.op[chosen]]))
        gains.append(gain)
        costs.append(parts.cost)
        parents.append(nodes.op[chosen])
        depths.append(torch.full_like(chosen, depth))
        total += len(chosen)
        nodes = children
        levels.append(nodes)
    cost, parent, level, gain = (torch.cat(part) for part in (costs, parents, depths, gains))
    utility, kappa = gain / cost, torch.cat(kappas)
    if pooled:
        utility = pooled_utility(gain, cost, parent, level)
        kappa = path_minimum(utility, parent)
    return Forest(
        torch.cat([one.low for one in levels]),
        torch.cat([one.high for one in levels]),
        torch.cat([one.op for one in levels]),
        torch.cat(splits),
        utility,
        kappa,
        cost,
        parent,
        level,
    )


@dataclass(frozen=True, eq=False)
class _Level:
    low: Tensor
    high: Tensor
    op: Tensor
    damage: Tensor


@dataclass(frozen=True, eq=False)
class _Parts:
    """How nodes are split: before ``first``, ``first .. second``, from ``second`` on; two parts where they are equal."""

    low: Tensor
    first: Tensor
    second: Tensor
    high: Tensor

    @property
    def cost(self) -> Tensor:
        """Entries more than before."""
        return 1 + (self.first < self.second).long()

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Start, stop and owner of every part, in order."""
        start = torch.stack([self.low, self.first, self.second], 1)
        stop = torch.stack([self.first, self.second, self.high], 1)
        some = stop > start
        owner = torch.arange(len(self.low), device=self.low.device)[:, None].expand_as(start)
        return start[some], stop[some], owner[some]


class _Pricer:
    """Prefix sums over the token axis, from which every node is one difference."""

    def __init__(self, tokens: Tokens, judges: Judges) -> None:
        self.tokens, self.judges = tokens, judges
        pair = tokens.pair
        pairs = len(judges.sensitivity)
        self._edges = torch.searchsorted(pair, torch.arange(pairs + 1, device=pair.device)).tolist()
        keys, values = tokens.keys.float(), tokens.values.float()
        means = torch.stack(
            [keys[a:b].mean(0) if b > a else keys.new_zeros(keys.shape[1]) for a, b in self._spans()]
        )
        centred = keys - means[pair]
        self._means = means
        base = judges.base[pair]
        lean = tokens.relevance + base
        # Nodes may have a millionth of their head's relevance: what is divided by it is summed in fp64.
        relevance = tokens.relevance.double()
        projected = values @ _projection(values, _VALUES)
        self._keys = self._sums(centred)
        self._norms = self._sums(keys.norm(dim=1))
        self._positions = self._sums(tokens.position.double())
        self._relevance = self._sums(relevance)
        self._leaning = self._sums(relevance[:, None] * projected)
        self._plain = self._sums(projected)
        self._lean = self._sums(lean)
        self._shares = self._sums(tokens.shares)
        moved = tokens.shares[:, :, None] * projected[:, None]
        self._moved = self._sums(moved.flatten(1))
        spread = torch.cat([_scaled(centred), _scaled(values)], 1)
        spread = spread @ _projection(spread, _FEATURES)
        self._spread = self._sums(lean[:, None] * spread)
        self._first = _Argmax(tokens.relevance)
        self._turn = _Argmax(tokens.turn)

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self._edges[:-1], self._edges[1:], strict=True))

    def _sums(self, x: Tensor) -> Tensor:
        """Sums before each token of a pair, and behind its last one: token ``i`` of pair ``p`` is at ``i + p``."""
        sums = x.new_zeros(len(x) + len(self._edges) - 1, *x.shape[1:])
        for pair, (start, stop) in enumerate(self._spans()):
            if stop > start:
                torch.cumsum(x[start:stop], 0, out=sums[start + pair + 1 : stop + pair + 1])
        return sums

    def _between(self, sums: Tensor, low: Tensor, high: Tensor, pair: Tensor) -> Tensor:
        return sums.index_select(0, high + pair) - sums.index_select(0, low + pair)

    def weight(self, low: Tensor, high: Tensor) -> Tensor:
        """Relevance of nodes times the sensitivity of their heads."""
        pair = self.tokens.pair[low]
        relevance = self._between(self._relevance, low, high, pair).clamp_(min=0).float()
        return relevance * self.judges.sensitivity[pair]

    def distortion(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """What prototypes do to the probes, and what nothing in their place would: ``[n]`` each; 0 for a leaf.

        ``D = mean_q pi_q (0.25 (Z - Z~)^2 / Z^2 + 0.75 |M - M~|^2 / |M|^2)``, values in a random projection.
        """
        damage, dropped = torch.zeros(len(low), device=low.device), torch.zeros(len(low), device=low.device)
        for start in range(0, len(low), _PART):
            part = slice(start, start + _PART)
            damage[part], dropped[part] = self._distortion(low[part], high[part])
        return damage.masked_fill_(high - low == 1, 0.0), dropped

    def _distortion(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        tokens, judges = self.tokens, self.judges
        pair, slot = tokens.pair[low], tokens.slot[low]
        mass = self._between(self._shares, low, high, pair).clamp_(min=0)
        moved = self._between(self._moved, low, high, pair).view(len(low), -1, _VALUES)
        key, bias, place = self.prototype(low, high)
        index = place - judges.first
        rotated = _rotate(key, judges.cos[index], judges.sin[index])
        logits = torch.bmm(judges.queries[pair, slot], rotated[:, :, None])[:, :, 0] * judges.scale
        share = (logits + bias[:, None] - judges.lse[pair, slot]).clamp_(max=_OVER).exp_()
        relevance = self._between(self._relevance, low, high, pair)[:, None]
        plain = self._between(self._plain, low, high, pair) / (high - low)[:, None]
        value = blend(self._between(self._leaning, low, high, pair), relevance, plain).float()
        wrong = 0.25 * (mass - share).square() / (mass.square() + 1e-12)
        off = (moved - share[:, :, None] * value[:, None]).square().sum(-1)
        wrong += 0.75 * off / (moved.square().sum(-1) + 1e-12)
        return (mass * wrong.clamp_(max=4.0)).mean(1), mass.mean(1)

    def prototype(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean raw key ``[n, D]``, log-multiplicity and position of nodes.

        ``m = clamp(n h^2, 1, n)`` with the coherence ``h = |mean k| / mean |k|``.
        """
        pair = self.tokens.pair[low]
        count = (high - low).float()
        key = self._between(self._keys, low, high, pair) / count[:, None] + self._means[pair]
        norm = self._between(self._norms, low, high, pair) / count
        bias = multiplicity(key, norm, count).log()
        place = (self._between(self._positions, low, high, pair) / count).round().long()
        return key, bias, place

    def split(self, low: Tensor, high: Tensor, *, halve: bool) -> _Parts:
        """The best split of each node: at the sharpest turn, in the middle, or around the most valuable token.

        By the weighted variance that it removes for each entry that it costs.
        """
        middle = (low + high) // 2
        if halve:
            return _Parts(low, middle, middle, high)
        pair = self.tokens.pair[low]
        turn = self._turn(low, high - 1) + 1
        token = self._first(low, high)
        # At an end there is nothing on one side of the most valuable token: two parts, not three.
        first = torch.where(token == low, token + 1, token)
        second = torch.where((token == low) | (token == high - 1), first, token + 1)
        options = [(middle, middle), (turn, turn), (first, second)]
        gain = torch.stack([self._gain(low, a, b, high, pair) for a, b in options])
        gain[2] /= 1 + (first < second).float()
        pick = gain.argmax(0)[None]
        return _Parts(
            low,
            torch.stack([a for a, _ in options]).gather(0, pick)[0],
            torch.stack([b for _, b in options]).gather(0, pick)[0],
            high,
        )

    def _gain(self, low: Tensor, first: Tensor, second: Tensor, high: Tensor, pair: Tensor) -> Tensor:
        """Sum of squared weighted sums over weights of the parts, less that of the whole: the variance removed."""

        def term(a: Tensor, b: Tensor) -> Tensor:
            weight = self._between(self._lean, a, b, pair)
            return self._between(self._spread, a, b, pair).square().sum(1) / weight.clamp(min=1e-20)

        return term(low, first) + term(first, second) + term(second, high) - term(low, high)


class _Argmax:
    """Place of the largest value of any range up to 256 long, from a table of powers of two."""

    def __init__(self, values: Tensor, levels: int = 8) -> None:
        self._values = values
        table = [torch.arange(len(values), device=values.device)]
        for level in range(levels):
            step = 1 << level
            left, right = table[-1][:-step], table[-1][step:]
            if not len(right):
                break
            table.append(torch.where(values[right] > values[left], right, left))
        self._table = table
        self._offsets = torch.tensor([0, *(len(one) for one in table[:-1])], device=values.device).cumsum(0)
        self._flat = torch.cat(table)

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        """The first of the largest of ``low .. high``, ``high > low``."""
        level = (high - low).double().log2().floor().long().clamp(max=len(self._table) - 1)
        left = self._flat[self._offsets[level] + low]
        right = self._flat[self._offsets[level] + high - (1 << level)]
        return torch.where(self._values[right] > self._values[left], right, left)


def multiplicity(key: Tensor, norm: Tensor, count: Tensor) -> Tensor:
    """``clamp(n h^2, 1, n)`` of prototypes: mean key ``[n, D]``, mean norm ``[n]``, tokens ``[n]``."""
    coherence = key.norm(dim=1) / (norm + 1e-12)
    return torch.minimum((count * coherence.square()).clamp(min=1.0), count)


def blend(leaning: Tensor, relevance: Tensor, plain: Tensor) -> Tensor:
    """Values of prototypes: ``sum (R + beta) v / sum (R + beta)`` with a tenth of the node's mean relevance as ``beta``.

    That is 10/11 of the relevance-weighted mean and 1/11 of the plain one; the plain one alone where nothing is relevant.

    Args:
        leaning: ``[n, D]`` sums of ``R v``.
        relevance: ``[n, 1]`` sums of ``R``.
        plain: ``[n, D]`` means of ``v``.
    """
    some = relevance > 0
    weighted = leaning / torch.where(some, relevance, 1.0)
    return torch.where(some, (weighted + 0.1 * plain) / 1.1, plain)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2 = x[:, :half], x[:, half : 2 * half]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[:, 2 * half :]], 1)


def _scaled(x: Tensor) -> Tensor:
    return x / (x.square().mean().sqrt() + 1e-9)


def _projection(x: Tensor, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(x.shape[1], width, generator=generator).div(width**0.5)
    return drawn.to(x.device)
