"""PyramidKV: lower layers keep more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.compress.base import Context, spread
from tenure.compress.snapkv import SnapKV
from tenure.errors import ConfigError


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (arXiv 2406.02069): SnapKV's scores, budgets that fall evenly from the first layer to the last.

    The last layer gets ``1 / beta`` of the mean, the first one the rest of twice the mean. To the last unit, without the
    losses of rounding that its code has (our choice).

    Args:
        beta: steepness, at least 1.
    """

    beta: float = 20.0
    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "PyramidKV, arXiv 2406.02069"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ConfigError(f"{self.beta} is too flat", option="beta", way_out="Give 1 or more")

    def quota(self, context: Context, score: Tensor, budget: int) -> Tensor:
        """See the class."""
        layers, heads, tokens = context.shape
        last = min(1.0, 1 / self.beta)
        weight = torch.linspace(2 - last, last, layers) if layers > 1 else torch.ones(1)
        return spread(weight[:, None].expand(layers, heads), budget, tokens)
