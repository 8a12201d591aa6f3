"""Auto: what a session gets that names no policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tenure.errors import ConfigError
from tenure.policies.base import View, ascending
from tenure.policies.foresight import Foresight, protected
from tenure.policies.memdecay import MemDecay
from tenure.regions import Region

_RULES = (list(Region).index(Region.SYSTEM), list(Region).index(Region.TOOLS))


@dataclass(frozen=True)
class Auto(MemDecay):
    """Pins, then the plan, then regions and attention: one order of all that is known about a slot. Our choice.

    - What the current step of the plan reads comes right behind sinks and hard pins, as in :class:`Foresight`.
    - System text and tool schemas are pinned softly, whole texts that fit ``rules`` of the budget and what the current
      step leaves of it, or the beginning of a first one that does not.
    - Other spans that the plan reads stay whole or go whole, nearest reader first, as in :class:`Foresight`.
    - The rest is ranked by the hybrid of :class:`MemDecay`. What a newer span has taken the place of goes before it.

    Needs no hint: without a plan, regions guessed from roles and attention decide.

    Args:
        rules: share of the budget that system text and tool schemas may hold by their region alone.
        min_recent: newest slots that planned ones cannot take, at most a quarter of the budget; for what the current step
            reads, a quarter of this.
    """

    rules: float = 0.5
    min_recent: int = 256
    follows_plan: ClassVar[bool] = True
    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "PACE (retention) over MemDecay; the composition is ours"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rules <= 1:
            raise ConfigError(f"{self.rules} is no share", option="rules", way_out="Give 0 to 1")

    @property
    def _plan(self) -> Foresight:
        return Foresight(min_recent=self.min_recent)

    def recent(self, view: View) -> int:
        """MemDecay's share, less what rules and planned spans need."""
        pinned = self.pinned(view)
        taken = int((self._plan.whole(pinned) | protected(pinned)).sum(1).max())
        return min(super().recent(view), max(self._plan.floor(view.budget), view.budget - taken))

    def room(self, budget: int, fixed: int) -> int:
        """As in :class:`Foresight`."""
        return self._plan.room(budget, fixed)

    def spare(self, view: View) -> int:
        """As in :class:`Foresight`, beside the rules."""
        return self._plan.spare(self.pinned(view))

    def first(self, view: View) -> Tensor | None:
        """As in :class:`Foresight`."""
        return self._plan.first(view)

    def rank(self, view: View) -> Tensor:
        """Rules, planned spans by reader, the hybrid, and last what was spilled or superseded."""
        order = ascending(super().rank(view))
        pinned = self.pinned(view)
        rules = (pinned.pin == 1) & (view.pin == 0)
        planned, superseded = view.readers >= 0, view.readers == -2
        if not bool((planned | rules | superseded).any()):
            return order
        above = int(view.readers.max()) + 1
        level = torch.where(planned, above - view.readers, 0)
        level[superseded | (planned & ~self._plan.whole(pinned))] = -1
        level[rules] = above + 1
        return level * order.shape[1] + order

    def pinned(self, view: View) -> View:
        """The view with soft pins on the rules that fit their share, and beside what comes first."""
        kind = view.table.kind[view.region]
        rules = ((kind == _RULES[0]) | (kind == _RULES[1])) & (view.pin == 0) & (view.readers != -2)
        most = int(self.rules * view.budget)
        first = self.first(view)
        if first is not None:
            rules &= ~first
            taken = int((first | view.hard).sum(1).max())
            most = min(most, view.budget - taken - self._plan.floor(view.budget))
        if int(rules.sum(1).max()) > most:
            rules = fitting(view.span, view.region, rules, most)
        return replace(view, pin=torch.where(rules, 1, view.pin))


def fitting(span: Tensor, region: Tensor, slots: Tensor, most: int) -> Tensor:
    """Slots of the texts that fit ``most`` slots together, earliest first, bool like ``slots``.

    A text is what a message says in one region. One that does not fit is passed over, but for the first: a kept
    beginning reads better than scattered words.

    Args:
        span: number of each slot's message, ``[groups, rows]``.
        region: like ``span``.
        slots: which slots count, bool.
        most: slots of a group.
    """
    found = torch.zeros_like(slots)
    texts = span * (int(region.max()) + 1) + region
    for number in sorted(set(texts[slots].tolist())):
        text = slots & (texts == number)
        taken = found.sum(1, keepdim=True)
        fits = (taken == 0) | (taken + text.sum(1, keepdim=True) <= most)
        found |= text & fits & (text.cumsum(1) <= most)
    return found
