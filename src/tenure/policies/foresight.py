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

    In lexicographic mode a planned span stays whole or goes whole, since half a definition is worth little. All of this
    is our choice:

    - What the current step reads comes right behind sinks and hard pins, as long as it fits :meth:`room`: that is all
      but a quarter of ``min_recent``. So much stays for the newest slots in any case (64 by default, from a budget of
      1,024 on), the end of the question and of what is being written: without its own last sentence a model does not
      go on with it, whatever it may look up.
    - Other planned spans are taken nearest reader first, of one step the smaller first, as long as they fit what that,
      sinks, pins and ``min_recent`` leave of the budget. They take from the recent slots' share down to ``min_recent``.
    - One that does not fit is spilled, and comes back for its step where the session has a tier.

    Args:
        mode: `lexicographic`, the order of readers first, or `paper`, an additive bonus.
        phi: bonus of what the current step reads.
        min_recent: newest slots that planned ones cannot take, at most a quarter of the budget; for what the current step
            reads, a quarter of this.
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
        return min(share, max(self.floor(view.budget), view.budget - taken))

    def room(self, budget: int, fixed: int) -> int:
        """All but a quarter of the recent slots' floor; see the class."""
        return budget - fixed - max(1, self.floor(budget) // 4)

    def first(self, view: View) -> Tensor | None:
        """What the current step reads, as far as whole spans of it fit :meth:`room`."""
        if self.mode == "paper" or not bool(view.current.any()):
            return None
        return self._first(view)[0]

    def floor(self, budget: int) -> int:
        """Newest slots that spans of later steps cannot take."""
        return min(self.min_recent, max(1, budget // 4))

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
        planned = view.readers >= 0
        if not bool(planned.any()):
            return planned
        first = self._first(view)[0]
        safe = protected(view) & ~first
        return first | whole_spans(view, planned & ~first & ~safe, self._beside(view))[0] | (planned & safe)

    def spare(self, view: View) -> int:
        """What sinks, pins, reads of the current step and the recent slots' floor leave of the budget."""
        return super().spare(view) if self.mode == "paper" else self._beside(view)

    def _beside(self, view: View) -> int:
        first, taken = self._first(view)
        safe = int((protected(view) & ~first).sum(1).max())
        return view.budget - safe - taken - self.floor(view.budget)

    def _first(self, view: View) -> tuple[Tensor, int]:
        room = self.room(view.budget, int(view.hard.sum(1).max()))
        return whole_spans(view, view.current & ~view.hard, room)


def whole_spans(view: View, slots: Tensor, room: int) -> tuple[Tensor, int]:
    """The whole spans that fit, nearest reader first, of one step the smaller first.

    Args:
        view: of the session.
        slots: of the spans in question, ``[groups, rows]`` bool.
        room: slots for them.

    Returns:
        Those of ``slots`` that fit, and the slots that their spans take. A whole span counts, not only what is left of
        it: the rest of one that was spilled must not creep back in.
    """
    found = torch.zeros_like(slots)
    if room < 1 or not bool(slots.any()):
        return found, 0
    spans, place = torch.unique(view.span[slots], return_inverse=True)
    size = view.sizes[spans].tolist()
    delta = torch.zeros_like(spans).index_copy_(0, place, view.readers[slots]).tolist()
    stays = torch.zeros(len(spans), dtype=torch.bool, device=place.device)
    taken = 0
    for number in sorted(range(len(size)), key=lambda span: (delta[span], size[span])):
        if taken + size[number] <= room:
            taken += size[number]
            stays[number] = True
    found[slots] = stays[place]
    return found, taken


def protected(view: View) -> Tensor:
    """Slots that come before planned ones: sinks and pins of either kind."""
    return view.hard | (view.pin > 0)
