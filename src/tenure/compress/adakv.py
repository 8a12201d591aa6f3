"""Ada-KV: heads of a layer share its budget by what they look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.ragged import Entries
from tenure.compress.base import Context, best, spread, standing, take, top
from tenure.compress.snapkv import SnapKV
from tenure.errors import ConfigError


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Ada-KV (arXiv 2407.11550) over SnapKV's scores.

    The tokens of highest score over all heads of a layer stay; each head keeps a share of an even budget in any case.

    Args:
        safe: that share; 0.2 as in kvpress.
    """

    safe: float = 0.2
    name: ClassVar[str] = "adakv"
    paper: ClassVar[str] = "Ada-KV, arXiv 2407.11550"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.safe <= 1:
            raise ConfigError(f"{self.safe} is no share", option="safe", way_out="Give 0 to 1")

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`~tenure.compress.base.Compressor`."""
        score = self.score(context)
        mask = shared(context, score, budget, self.safe)
        return take(context, mask, standing(score, mask.sum(-1)))


def shared(context: Context, score: Tensor, budget: int, safe: float) -> Tensor:
    """Ada-KV's choice: an even budget a layer, its heads share it. Mask ``[L, G, T]``."""
    layers, heads, tokens = context.shape
    quota = spread(torch.ones(layers), budget, heads * tokens)
    floor = (quota[:, None].expand(layers, heads) * safe / heads).long()
    raised = score.masked_fill(best(score, floor), float("inf"))
    return torch.stack([top(one, int(count)) for one, count in zip(raised, quota, strict=True)])
