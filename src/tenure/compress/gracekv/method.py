"""GraceKV: the five stages in order, and what its evidence is where the question is not known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tenure.cache.ragged import Entries
from tenure.compress.base import Compressor, Context, spread, take, top
from tenure.compress.gracekv.allocate import sort_auction
from tenure.compress.gracekv.evidence import gather
from tenure.compress.gracekv.flow import Flow
from tenure.compress.gracekv.pack import assemble, frontier, prototypes
from tenure.compress.gracekv.partition import features, partition, rarity, uniform
from tenure.compress.gracekv.trees import Forest, Judges, Tokens, grow
from tenure.errors import ConfigError
from tenure.timing import now


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of the tokens before a budget is: the same for every budget.

    Args:
        slot: number of each token's slot, ``[L or 1, T]``.
        turn: turning scores ``[T]`` of the first group's tokens.
        flow: how much each token counts, and for whom.
    """

    slot: Tensor
    turn: Tensor
    flow: Flow


@dataclass(frozen=True)
class GraceKV(Compressor):
    """GraceKV (arXiv 2608.07001; its code is not public): one budget over layers, heads and resolution.

    Slots of the text become trees of prototypes; one auction spends the budget on adding slots and on splitting nodes,
    wherever an entry is worth most.

    Args:
        floor: share of the budget for single tokens that are sure to stay, the most relevant ones of all heads. The paper
            takes 0.6; with 0.9 more is left that is needed word for word.
        apart: how single tokens leave their trees: ``joined`` lets one prototype stand for all others of the slot,
            ``split`` one for each run between them, as paths of three-way splits do, at a higher price.
        slots: ``curvature`` or ``uniform``.
        hops: with the question known, how often what it leads to is read again: first the stretches that it looks at,
            then those that they look at. The paper's hops take single tokens, which tell little out of their place.
        trees: False keeps single tokens alone.
        quotas: every head has the same budget.
        pooled: utilities by what an operation makes possible, instead of one at a time.
        lazy: grow trees only where the auction can reach; the same result, sooner.
        watchers: queries a slot that distortions are measured by.
        probes: queries that everything is measured by; evenly thinned.
        pool: odd width over which neighbours share what the question looks at.
        repeat: share of the tokens that is read again.
        guess: where the question is unknown, judge tokens that were not read again by what their head needs of those that
            were.
    """

    floor: float = 0.9
    apart: Literal["joined", "split"] = "joined"
    slots: Literal["curvature", "uniform"] = "curvature"
    hops: int = 1
    trees: bool = True
    quotas: bool = False
    pooled: bool = False
    lazy: bool = True
    watchers: int = 8
    probes: int = 64
    pool: int = 5
    repeat: float = 0.15
    guess: bool = True
    name: ClassVar[str] = "gracekv"
    paper: ClassVar[str] = "GraceKV, arXiv 2608.07001"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("apart", self.apart, ("joined", "split")),
            ("slots", self.slots, ("curvature", "uniform")),
        ):
            if value not in known:
                raise ConfigError(
                    f"{value!r} is not known", option=option, way_out="Give " + " or ".join(known)
                )
        for option, share in (("floor", self.floor), ("repeat", self.repeat)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{share} is no share", option=option, way_out="Give 0 to 1")
        for option, count, least in (
            ("hops", self.hops, 0),
            ("watchers", self.watchers, 1),
            ("probes", self.probes, 1),
        ):
            if count < least:
                raise ConfigError(f"{count} is too few", option=option, way_out=f"Give {least} or more")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ConfigError(
                f"{self.pool} has no middle", option="pool", way_out="Give an odd number, 1 for none"
            )

    @property
    def asks(self) -> bool:
        """Its evidence is the question."""
        return True

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`~tenure.compress.base.Compressor`."""
        return self.build(context, self.evidence(context), budget)

    def evidence(self, context: Context) -> Evidence:
        """The first stages, which no budget enters: most of the time."""
        with _timed(context, "partition"):
            starts, turn = self._slots(context)
        with _timed(context, "flow"):
            slot = torch.searchsorted(starts, context.logical.contiguous(), right=True) - 1
            flow = gather(
                context, slot, len(starts),
                probes=self.probes, watchers=self.watchers, pool=self.pool, hops=self.hops,
                repeat=self.repeat, guess=self.guess,
            )  # fmt: skip
        return Evidence(slot, turn, flow)

    def build(self, context: Context, evidence: Evidence, budget: int) -> Entries:
        """The other stages; see :class:`~tenure.compress.base.Compressor`."""
        flow = evidence.flow
        value = flow.relevance * flow.sensitivity[..., None]
        if not self.trees:
            return take(context, self._best(value, budget), value)
        singles = torch.zeros_like(value, dtype=torch.bool)
        kept = int(self.floor * budget)
        if kept:
            singles = self._best(value, kept)
        with _timed(context, "trees"):
            tokens, logical = self._axis(context, evidence, singles)
            judges = _judges(context, flow, tokens)
            forest = grow(
                tokens, judges, budget - kept, lazy=self.lazy and not self.quotas, pooled=self.pooled
            )
        with _timed(context, "allocate"):
            done, short = self._auction(forest, tokens, context, budget - kept)
        with _timed(context, "pack"):
            low, high = frontier(forest, done, short)
            parts = [prototypes(tokens, logical, low, high, flow.sensitivity.flatten())]
            if kept:
                parts.append(_single(context, singles, value))
            return assemble(parts, *context.shape[:2])

    def _slots(self, context: Context) -> tuple[Tensor, Tensor]:
        """First logical index of each slot, and turning scores ``[T]`` of the first group's tokens."""
        layers = context.shape[0]
        logical = context.logical[0]
        depths = sorted({layers // 4, layers // 2, 3 * layers // 4, max(0, layers - 2)})
        if len(context.logical) > 1:
            depths = [0]  # layers hold different tokens, so only one can be compared with itself
        starts, turn = partition(
            features(context.keys, context.values, depths), context.cuts[0], rarity(context.ids[0])
        )
        if self.slots == "uniform":
            starts = uniform(len(logical), context.cuts[0])
        first = logical[starts].clone()
        first[0] = 0  # tokens of other layers may lie before
        return first, turn

    def _best(self, value: Tensor, count: int) -> Tensor:
        if not self.quotas:
            return top(value, count)
        from tenure.compress.base import best

        return best(value, spread(torch.ones(value.shape[:2]), count, value.shape[2]))

    def _axis(self, context: Context, evidence: Evidence, singles: Tensor) -> tuple[Tokens, Tensor]:
        """All tokens that are not single, pair after pair, and their logical indices."""
        layers, heads, length = context.shape
        device, slot, flow = context.keys.device, evidence.slot, evidence.flow

        def flat(x: Tensor) -> Tensor:
            return x[:, None].expand(layers, heads, length).reshape(-1)

        pair = torch.arange(layers * heads, device=device).repeat_interleave(length)
        place, logical = flat(slot), flat(context.logical)
        cut = flat(context.cuts)
        tree = (pair * (int(slot.max()) + 1) + place)[None]
        keep = ~singles.flatten()
        # Where spans were cut, slots were too; cuts matter only for layers that hold other tokens than the first.
        run = (torch.cumsum(cut, 0) if len(context.logical) > 1 else torch.zeros_like(pair))[keep]
        kept = tree[0][keep]
        root = torch.ones(len(kept), dtype=torch.bool, device=device)
        root[1:] = (kept[1:] != kept[:-1]) | (run[1:] != run[:-1])
        if self.apart == "split":
            index = keep.nonzero().flatten()
            root[1:] |= index[1:] != index[:-1] + 1
        everything = Tokens(
            pair, place, keep, flat(context.position), context.keys.flatten(0, 2), context.values.flatten(0, 2),
            flow.relevance.flatten(), flat(evidence.turn[None]), flow.shares.flatten(0, 2),
        )  # fmt: skip
        return everything.keep(keep, root), logical[keep]

    def _auction(self, forest: Forest, tokens: Tokens, context: Context, budget: int) -> tuple[Tensor, int]:
        if not self.quotas:
            done = sort_auction(forest.utility, forest.cost, forest.parent, budget)
            return done, budget - int(forest.cost[done].sum())
        layers, heads, _ = context.shape
        pair = torch.zeros_like(forest.cost)
        pair[forest.op] = tokens.pair[forest.low]
        size = torch.bincount(tokens.pair, minlength=layers * heads)
        share = spread(torch.ones(layers * heads), budget, int(size.max()))
        done = torch.zeros(len(pair), dtype=torch.bool, device=pair.device)
        for number, quota in enumerate(share.tolist()):
            ops = (pair == number).nonzero().flatten()
            local = torch.full((len(pair) + 1,), -1, device=pair.device)
            local[ops] = torch.arange(len(ops), device=pair.device)
            parent = local[forest.parent[ops]]
            done[ops] = sort_auction(
                forest.kappa[ops], forest.cost[ops], parent, min(quota, int(size[number]))
            )
        left = budget - int(forest.cost[done].sum())
        if left:  # of heads that could not spend theirs
            done |= _rest(forest, done, left)
        return done, budget - int(forest.cost[done].sum())


def _rest(forest: Forest, done: Tensor, budget: int) -> Tensor:
    """Spend what is left over anywhere."""
    utility = torch.where(done, float("inf"), forest.utility)
    cost = torch.where(done, 0, forest.cost)
    return sort_auction(utility, cost, forest.parent, budget)


def _judges(context: Context, flow: Flow, tokens: Tokens) -> Judges:
    first, last = int(context.position.min()), int(context.position.max())
    cos, sin = context.cos_sin(torch.arange(first, last + 1, device=context.keys.device))
    return Judges(
        flow.queries.flatten(0, 1),
        flow.lse.flatten(0, 1),
        flow.sensitivity.flatten(),
        0.1 * flow.relevance.mean(-1).flatten(),
        context.scale,
        cos,
        sin,
        first,
    )


def _single(context: Context, mask: Tensor, worth: Tensor) -> tuple[Tensor, ...]:
    made = take(context, mask, worth)
    return made.owner, made.keys, made.values, made.bias, made.position, made.start, made.stop, made.worth


@contextmanager
def _timed(context: Context, stage: str) -> Iterator[None]:
    device = context.keys.device
    started = now(device)
    yield
    context.seconds[stage] = context.seconds.get(stage, 0.0) + now(device) - started
