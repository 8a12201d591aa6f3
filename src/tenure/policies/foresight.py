"""Foresight: PACE's retention. What the agent's plan reads next stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tenure.errors import ConfigError
from tenure.policies.base import View, ascending
from tenure.policies.h2o import H2O


@dataclass(frozen=True)
class Foresight(H2O):
    """H2O's score under the order that the plan gives (PACE; its text and code are not public).

    A slot of a span that a step ``delta`` steps ahead reads gets, at selection and never in the stored score:

    - ``lexicographic``: planned before unplanned, then nearer before farther reader, then the score. Needs no
      constant and holds at any length. Our choice, and the default.
    - ``paper``: ``score + phi/2 * (1 + 1/(1 + delta))``: phi for the current step, falling towards the reported
      floor of phi/2. The form between phi and the floor is our proposal; with a score above the gap between two
      deltas it can flip their order, which the lexicographic mode cannot.

    A span without a remaining reader has no bonus. A superseded one goes before all others (``paper``: minus phi).

    In lexicographic mode a planned span stays whole or goes whole, since half a definition is worth little: spans are
    taken nearest reader first, of one step the smaller first, as long as they fit what sinks, pins and ``min_recent``
    leave of the budget. One that does not fit is spilled, and comes back for its step where the session has a tier.
    Planned spans take from the recent slots' share down to ``min_recent``. All of this is our choice.

    Args:
        mode: `lexicographic`, the order of readers first, or `paper`, an additive bonus.
        phi: bonus of what the current step reads.
        min_recent: newest slots that planned ones cannot take, at most a quarter of the budget.
    """

    mode: Literal["lexicographic", "paper"] = "lexicographic"
    phi: float = 1e5
    min_recent: int = 256
    follows_plan: ClassVar[bool] = True
    name: ClassVar[str] = "foresight"
    paper: ClassVar[str] = "PACE (retention), foresight over H2O"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("lexicographic", "paper"):
            raise ConfigError(
                f"{self.mode!r} is not known", option="mode", way_out="Give lexicographic or paper"
            )
        if self.phi <= 0:
            raise ConfigError(f"{self.phi} is no bonus", option="phi", way_out="Give a positive number")

    def recent(self, view: View) -> int:
        """H2O's share, less what planned spans need."""
        share = super().recent(view)
        if self.mode == "paper":
            return share
        taken = int((self.whole(view) | protected(view)).sum(1).max())
        return min(share, max(self._floor(view), view.budget - taken))

    def rank(self, view: View) -> Tensor:
        """See the class."""
        planned = view.readers >= 0
        if self.mode == "paper":
            bonus = self.phi / 2 * (1 + 1 / (1 + view.readers.clamp(min=0).float()))
            bonus = torch.where(view.readers == -2, -self.phi, torch.where(planned, bonus, 0.0))
            return view.score + bonus
        rows = view.score.shape[1]
        farthest = int(view.readers.max()) + 1
        nearness = torch.where(planned, farthest - view.readers, 0)
        nearness[planned & ~self.whole(view)] = -1  # spilled: before everything else
        nearness[view.readers == -2] = -1
        return nearness * rows + ascending(view.score)

    def whole(self, view: View) -> Tensor:
        """Slots of the planned spans that stay, ``[groups, rows]`` bool; a span stays in all layers or in none."""
        planned = (view.readers >= 0) & ~protected(view)
        if not bool(planned.any()):
            return (view.readers >= 0) & protected(view)
        spans, place = torch.unique(view.span[planned], return_inverse=True)
        # The whole span counts: what is left of one that was spilled must not creep back in.
        size = view.sizes[spans].tolist()
        delta = torch.zeros_like(spans).index_copy_(0, place, view.readers[planned]).tolist()
        room = view.budget - int(protected(view).sum(1).max()) - self._floor(view)
        stays = torch.zeros(len(spans), dtype=torch.bool, device=place.device)
        for number in sorted(range(len(size)), key=lambda span: (delta[span], size[span])):
            if size[number] <= room:
                room -= size[number]
                stays[number] = True
        whole = torch.zeros_like(planned)
        whole[planned] = stays[place]
        return whole | ((view.readers >= 0) & protected(view))

    def _floor(self, view: View) -> int:
        return min(self.min_recent, max(1, view.budget // 4))


def protected(view: View) -> Tensor:
    """Slots that come before planned ones: sinks and pins of either kind."""
    return view.hard | (view.pin > 0)
