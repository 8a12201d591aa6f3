"""H2O: heavy hitters by cumulative attention, and recent slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tenure.cache.attend import Statistics
from tenure.errors import ConfigError
from tenure.policies.base import Policy, View
from tenure.policies.random import check_ratio


@dataclass(frozen=True)
class H2O(Policy):
    """Cumulative attention mass (H2O, arXiv 2306.14048), in the chunked form of long-running engines.

    After each chunk the softmax mass that a slot received from the last ``window`` queries, its maximum over query
    heads, is added to the slot's score; a decode step adds with weight 1. New slots start at 0. One kept set a
    layer, shared by its kv heads. The published chunk form means over the window and multiplies by its length
    again, which is the sum taken here; for decoding it normalises the largest raw logit over heads, where we take
    the largest probability, as for chunks: our choice, so that one score has one meaning.

    Args:
        window: queries of a chunk that are counted; 0 takes all.
        recent_ratio: share of the budget for the newest slots.
    """

    window: int = 128
    recent_ratio: float = 0.5
    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"

    def __post_init__(self) -> None:
        check_ratio(self.recent_ratio)
        if self.window < 0:
            raise ConfigError(
                f"{self.window} queries cannot be counted", option="window", way_out="Give 0 for all"
            )

    @property
    def statistics(self) -> Statistics | None:
        """The last ``window`` queries, maximum over heads."""
        return Statistics(window=self.window, reduce="max")

    def recent(self, view: View) -> int:
        """``recent_ratio`` of the budget, at least one slot."""
        return max(1, int(view.budget * self.recent_ratio))

    def rank(self, view: View) -> Tensor:
        """The cumulative score."""
        return view.score
