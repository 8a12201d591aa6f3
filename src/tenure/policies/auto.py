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

    - System text and tool schemas are pinned softly, whole texts that fit ``rules`` of the budget, or the beginning of a
      first one that does not.
    - Spans that the plan reads stay whole or go whole, nearest reader first, as in :class:`Foresight`.
    - The rest is ranked by the hybrid of :class:`MemDecay`.

    Needs no hint: without a plan, regions guessed from roles and attention decide.

    Args:
        rules: share of the budget that system text and tool schemas may hold by their region alone.
        min_recent: newest slots that planned ones cannot take, at most a quarter of the budget.
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
        floor = min(self.min_recent, max(1, view.budget // 4))
        return min(super().recent(view), max(floor, view.budget - taken))

    def rank(self, view: View) -> Tensor:
        """Rules, planned spans by reader, the hybrid, and last what was spilled."""
        order = ascending(super().rank(view))
        pinned = self.pinned(view)
        rules = (pinned.pin == 1) & (view.pin == 0)
        planned = view.readers >= 0
        if not bool(planned.any()) and not bool(rules.any()):
            return order
        above = int(view.readers.max()) + 1
        level = torch.where(planned, above - view.readers, 0)
        level[planned & ~self._plan.whole(pinned)] = -1
        level[rules] = above + 1
        return level * order.shape[1] + order

    def pinned(self, view: View) -> View:
        """The view with soft pins on the rules that fit their share."""
        kind = view.table.kind[view.region]
        rules = ((kind == _RULES[0]) | (kind == _RULES[1])) & (view.pin == 0)
        most = int(self.rules * view.budget)
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
