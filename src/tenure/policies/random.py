"""Random retention: the control without any knowledge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tenure.errors import ConfigError
from tenure.policies.base import Policy, View


@dataclass(frozen=True)
class Random(Policy):
    """Each token draws one fixed rank from its logical index: a uniform sample of the session stays.

    Args:
        seed: of the draw.
        recent_ratio: share of the budget for the newest slots.
    """

    seed: int = 0
    recent_ratio: float = 0.5
    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "none: a control"
    granularity: ClassVar[str] = "session"

    def __post_init__(self) -> None:
        check_ratio(self.recent_ratio)

    def recent(self, view: View) -> int:
        """``recent_ratio`` of the budget."""
        return int(view.budget * self.recent_ratio)

    def rank(self, view: View) -> Tensor:
        """A hash of the logical index (the finaliser of splitmix64, Steele et al. 2014)."""
        x = view.logical * -7046029254386353131 + self.seed
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        return x ^ ((x >> 31) & 0x1FFFFFFFF)


def check_ratio(value: float) -> None:
    """Raise ConfigError unless ``recent_ratio`` is a share."""
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{value} is not in [0, 1)", option="recent_ratio")
