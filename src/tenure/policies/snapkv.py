"""SnapKV: what the latest window of queries looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.attend import Statistics
from tenure.errors import ConfigError
from tenure.policies.base import Look, Policy, View


@dataclass(frozen=True)
class SnapKV(Policy):
    """SnapKV (arXiv 2404.14469): mean attention of the last ``window`` queries, average-pooled over neighbours.

    The paper compresses one prompt once; a session goes on, so the window slides. A forward of ``n`` queries that the
    window holds besides older ones adds its attention ``a`` to a share of what is there, as if all queries of the window
    had given alike:

        ``s <- a + s max(0, 1 - n / window)``

    A chunk of a whole window gives the paper's score, and decoding fades into it query by query. One set a layer is
    shared by all kv heads (mean over all query heads). Both are our choice. Pooling runs over resident neighbours.

    Args:
        window: queries that score, and newest slots that are safe.
        kernel: odd width of the pooling.
    """

    window: int = 64
    kernel: int = 5
    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)

    @property
    def statistics(self) -> Statistics | None:
        """The last ``window`` queries, mean over heads."""
        return Statistics(window=self.window, reduce="mean")

    def recent(self, view: View) -> int:
        """The window, at most half of the budget."""
        return min(self.window, view.budget // 2)

    def absorb(self, look: Look) -> Mapping[str, Tensor]:
        """See the class."""
        return {"score": look.mass + look.score * max(0.0, 1 - look.queries / self.window)}

    def rank(self, view: View) -> Tensor:
        """Pooled scores."""
        return torch.nn.functional.avg_pool1d(
            view.score[:, None], self.kernel, stride=1, padding=self.kernel // 2, count_include_pad=False
        )[:, 0]


def check_window(window: int, kernel: int) -> None:
    """Raise ConfigError for a window without queries or a pooling without a middle."""
    if window < 1:
        raise ConfigError(f"{window} queries cannot score", option="window", way_out="Give 1 or more")
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"{kernel} is not an odd width", option="kernel", way_out="Give 1, 3, 5, ...")
