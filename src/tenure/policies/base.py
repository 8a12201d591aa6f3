"""What a retention policy is: a frozen dataclass that ranks slots over a read-only view.

A policy never touches the cache. It says how attention mass becomes a score and how scores become an order;
protection of sinks, pins and recent slots, and the selection itself, are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.attend import Statistics


@dataclass(frozen=True)
class View:
    """What a policy sees of the ledger. All tensors are ``[groups, rows]``, rows in logical order.

    Args:
        logical: logical token index.
        score: what the policy's ``observe`` has made of the attention so far, fp32.
        readers: steps until the slot's span is read next, 0 = by the current step, -1 = by none.
        pin: 0 none, 1 soft, 2 hard.
        length: tokens of the session so far.
        budget: slots that may stay.
    """

    logical: Tensor
    score: Tensor
    readers: Tensor
    pin: Tensor
    length: int
    budget: int


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all retention policies. ``statistics`` is None where attention is not looked at."""

    name: ClassVar[str]
    paper: ClassVar[str]
    granularity: ClassVar[str] = "layer"
    evicts: ClassVar[bool] = True

    @property
    def statistics(self) -> Statistics | None:
        """Attention mass to collect in each forward."""
        return None

    def recent(self, view: View) -> int:
        """How many of the newest slots are safe."""
        return 0

    def observe(self, score: Tensor, mass: Tensor) -> Tensor:
        """New scores from old ones and the attention mass of one forward, both ``[groups, rows]``."""
        return score + mass

    @abstractmethod
    def rank(self, view: View) -> Tensor:
        """Retention order, ``[groups, rows]`` fp32 or int64: higher stays, ties go to the earlier token."""


def select(policy: Policy, view: View, sinks: int) -> Tensor:
    """Rows that stay under the view's budget.

    Hard pins and sinks come first, then recent slots, then soft pins, then the policy's order. Where the protected
    slots alone pass the budget, the newest of the recent ones stay.

    Returns:
        Row numbers ``[groups, kept]``, ascending; all rows where they fit.
    """
    groups, rows = view.logical.shape
    kept = min(view.budget, rows)
    device = view.logical.device
    if kept == rows:
        return torch.arange(rows, device=device).expand(groups, rows)
    order = ascending(policy.rank(view))
    recent = torch.arange(rows, device=device) >= rows - policy.recent(view)
    level = torch.zeros(groups, rows, dtype=torch.int64, device=device)
    level[view.pin == 1] = 1
    level[recent.expand_as(level)] = 2
    level[(view.pin == 2) | (view.logical < sinks)] = 3
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
