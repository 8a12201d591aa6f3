"""No eviction: the control that every method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tenure.policies.base import Policy, View


@dataclass(frozen=True)
class Full(Policy):
    """Keeps every slot; memory grows with the session."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "none: the unbounded cache"
    granularity: ClassVar[str] = "session"
    evicts: ClassVar[bool] = False

    def rank(self, view: View) -> Tensor:
        """All equal."""
        return view.score
