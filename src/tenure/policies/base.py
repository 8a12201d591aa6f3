"""What a retention policy is: a frozen dataclass that ranks slots over a read-only view.

A policy never touches the cache. It says how attention mass becomes a score and how scores become an order;
protection of sinks, pins and recent slots, and the selection itself, are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.aging import Aging, RegionVectors
from tenure.cache.attend import Statistics


@dataclass(frozen=True)
class Look:
    """What a policy learns from one forward. Tensors are ``[groups, rows]``, the forward's own rows last.

    Args:
        logical: logical token index.
        score: what the policy has stored.
        region: number of the slot's region.
        born: when the slot was new, by the clock of its region, fp64.
        energy: what the policy has stored, valid for the last forward that was looked at.
        value: norm of the slot's value; zero where the policy does not ask for it.
        mass: attention mass of the counted queries.
        new: rows of this forward.
        queries: how many queries were counted.
        steps: how many steps the forward is.
        sinks: first tokens of the session that always stay.
        table: the region table and the clocks.
    """

    logical: Tensor
    score: Tensor
    region: Tensor
    born: Tensor
    energy: Tensor
    value: Tensor
    mass: Tensor
    new: int
    queries: int
    steps: float
    sinks: int
    table: Aging


@dataclass(frozen=True)
class View:
    """What a policy sees of the ledger. Tensors are ``[groups, rows]``, rows in logical order, if nothing else is said.

    Args:
        logical: logical token index.
        score: what the policy's ``observe`` has made of the attention so far, fp32.
        readers: steps until the slot's span is read next, 0 = by the current step, -1 = by none, -2 = by none because a
            newer span has taken its place.
        current: whether the plan's current step itself reads the slot's span, bool; what planners guess for the turn and
            overdue readers are 0 steps away too, and do not count here.
        pin: 0 none, 1 soft, 2 hard.
        region: number of the slot's region in the session's table.
        born: when the slot was new, by the clock of its region, fp64.
        energy: see :class:`Look`.
        table: the session's region table.
        span: number of the span that a slot belongs to, ascending along the rows.
        sizes: tokens of each span so far, evicted ones too, ``[spans]``.
        length: tokens of the session so far.
        budget: slots that may stay.
        sinks: first tokens of the session that always stay.
    """

    logical: Tensor
    score: Tensor
    readers: Tensor
    current: Tensor
    pin: Tensor
    region: Tensor
    born: Tensor
    energy: Tensor
    table: RegionVectors
    span: Tensor
    sizes: Tensor
    length: int
    budget: int
    sinks: int

    @property
    def hard(self) -> Tensor:
        """Slots that no order may touch: sinks and hard pins, ``[groups, rows]`` bool."""
        return (self.pin == 2) | (self.logical < self.sinks)


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all retention policies.

    ``statistics`` is None where attention is not looked at. ``follows_plan`` says that what the current step reads
    is kept, so that it must fit ``room``.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    granularity: ClassVar[str] = "layer"
    evicts: ClassVar[bool] = True
    follows_plan: ClassVar[bool] = False

    @property
    def statistics(self) -> Statistics | None:
        """Attention mass to collect in each forward."""
        return None

    @property
    def values(self) -> bool:
        """Whether :class:`Look` needs the norms of values."""
        return False

    def recent(self, view: View) -> int:
        """How many of the newest slots are safe."""
        return 0

    def room(self, budget: int, fixed: int) -> int:
        """Slots that spans may take which have to be whole, beside ``fixed`` ones of sinks and hard pins.

        All that is left but one, for the newest token.
        """
        return budget - fixed - 1

    def spare(self, view: View) -> int:
        """Slots that the spans of a turn may take on a planner's word, beside all that comes before them.

        A span beyond that would be let go as soon as it is there.
        """
        return self.room(view.budget, int(view.hard.sum(1).max()))

    def first(self, view: View) -> Tensor | None:
        """Slots that come before recent ones, ``[groups, rows]`` bool, no more than :meth:`room`; None for none."""
        return None

    def observe(self, score: Tensor, mass: Tensor) -> Tensor:
        """New scores from old ones and the attention mass of one forward, both ``[groups, rows]``."""
        return score + mass

    def absorb(self, look: Look) -> Mapping[str, Tensor]:
        """New contents of the ledger's ``score``, ``energy`` and ``born`` after a forward, by name."""
        return {"score": self.observe(look.score, look.mass)}

    def pinned(self, view: View) -> View:
        """The view with the pins that are the policy's own; compression keeps such slots exact, too."""
        return view

    def told(self, view: View) -> Tensor:
        """The score that reports show, ``[groups, rows]``."""
        return view.score

    @abstractmethod
    def rank(self, view: View) -> Tensor:
        """Retention order, ``[groups, rows]`` fp32 or int64: higher stays, ties go to the earlier token."""


def select(policy: Policy, view: View, *, leave: Tensor | None = None) -> Tensor:
    """Rows that stay under the view's budget.

    Hard pins and sinks come first, then what the policy puts first, then recent slots, then soft pins, then the policy's
    order. Where the protected slots alone pass the budget, the newest of the recent ones stay.

    Args:
        policy: whose order.
        view: of the session.
        leave: ``[groups, rows]`` bool, rows that go in any case; at least ``budget`` others must be left a group.

    Returns:
        Row numbers ``[groups, kept]``, ascending; all rows where they fit.
    """
    groups, rows = view.logical.shape
    kept = min(view.budget, rows)
    device = view.logical.device
    if kept == rows and leave is None:
        return torch.arange(rows, device=device).expand(groups, rows)
    order = ascending(policy.rank(view))
    recent = torch.arange(rows, device=device) >= rows - policy.recent(view)
    level = torch.zeros(groups, rows, dtype=torch.int64, device=device)
    level[view.pin == 1] = 1
    level[recent.expand_as(level)] = 2
    first = policy.first(view)
    if first is not None:
        level[first] = 3
    level[view.hard] = 4
    if leave is not None:
        level[leave] = -1
    # Recent slots are taken newest first, the others by the policy's order.
    within = torch.where(level == 2, torch.arange(rows, device=device).expand_as(order), order)
    key = level * (rows + 1) + within
    index = key.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    return index.sort(1).values


def ascending(rank: Tensor) -> Tensor:
    """Each slot's place ``0..rows-1`` from the lowest rank up; of equal ranks the earlier token is higher."""
    places = torch.arange(rank.shape[1] - 1, -1, -1, device=rank.device).expand_as(rank)
    best_first = rank.sort(dim=1, descending=True, stable=True).indices
    return torch.empty_like(best_first).scatter_(1, best_first, places)
