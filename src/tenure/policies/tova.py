"""TOVA: what the last query looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tenure.cache.attend import Statistics
from tenure.policies.base import Policy, View


@dataclass(frozen=True)
class TOVA(Policy):
    """Token Omission Via Attention (arXiv 2401.06104): drop the slots that the last query attends to least.

    Attention is a mean over all heads of a layer; the newest slot is safe.
    """

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "TOVA, arXiv 2401.06104"

    @property
    def statistics(self) -> Statistics | None:
        """The last query, mean over heads."""
        return Statistics(window=1, reduce="mean")

    def recent(self, view: View) -> int:
        """The newest slot."""
        return 1

    def observe(self, score: Tensor, mass: Tensor) -> Tensor:
        """Only the latest look counts."""
        return mass

    def rank(self, view: View) -> Tensor:
        """The last query's attention."""
        return view.score
