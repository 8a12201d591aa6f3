"""Recency: attention sinks and the newest slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tenure.policies.base import Policy, View


@dataclass(frozen=True)
class Recency(Policy):
    """StreamingLLM's retention (arXiv 2309.17453): the first ``sinks`` tokens and the most recent ones.

    With compact positions it is StreamingLLM.
    """

    name: ClassVar[str] = "recency"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    granularity: ClassVar[str] = "session"

    def rank(self, view: View) -> Tensor:
        """The logical index."""
        return view.logical
