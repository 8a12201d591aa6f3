"""SnapKV on ragged heads: what the last window of queries looks at, an own set for every kv head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.compress.base import Context, Scorer
from tenure.compress.probes import Probes
from tenure.policies.snapkv import check_window


@dataclass(frozen=True)
class SnapKV(Scorer):
    """SnapKV (arXiv 2404.14469): mean attention of a window of queries, pooled over neighbours.

    The window is the question where it is known, behind the newest tokens, else the newest tokens alone. Query heads
    of a kv head are averaged, as in kvpress. A token of the window itself counts by the queries that it is not behind.

    Args:
        window: queries that score.
        kernel: odd width of the pooling.
    """

    window: int = 64
    kernel: int = 5
    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)

    @property
    def asks(self) -> bool:
        """Its window is the question."""
        return True

    def probes(self, context: Context) -> Probes:
        """The window."""
        if context.question:
            return context.reader.behind(context.question[-min(self.window, context.reader.limit) :])
        return context.reader.tail(self.window)

    def score(self, context: Context) -> Tensor:
        """Pooled mean shares."""
        means = [moments(*seen)[0].mean(1) for seen in each_layer(context, self.probes(context))]
        return pooled(torch.stack(means), self.kernel)


def each_layer(context: Context, probes: Probes) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention shares ``[G, g, P, T]`` of a layer and which tokens a probe is not before, ``[P, T]``, by layers."""
    for layer in range(context.shape[0]):
        sees = context.position[layer % len(context.position)] <= probes.position[:, None]
        yield context.shares(layer, probes), sees


def moments(shares: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a layer's shares over the probes that see a token, ``[G, g, T]``."""
    count = sees.sum(0).clamp(min=1)
    mean = shares.sum(2) / count
    return mean, ((shares - mean[:, :, None]).square_() * sees).sum(2) / count


def pooled(score: Tensor, kernel: int) -> Tensor:
    """Average of each token's neighbourhood along the last axis."""
    return torch.nn.functional.avg_pool1d(
        score, kernel, stride=1, padding=kernel // 2, count_include_pad=False
    )
