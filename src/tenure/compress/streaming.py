"""Controls: the newest tokens, and a random choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.compress.base import Context, Scorer


@dataclass(frozen=True)
class Streaming(Scorer):
    """StreamingLLM (arXiv 2309.17453): sinks, which stay anyway, and the newest tokens."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def score(self, context: Context) -> Tensor:
        """The later, the higher."""
        tokens = context.shape[2]
        return torch.arange(tokens, dtype=torch.float32, device=context.keys.device).expand(context.shape)


@dataclass(frozen=True)
class Random(Scorer):
    """Random tokens, an own set for every head.

    Args:
        seed: of the choice.
    """

    seed: int = 0
    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "control"

    def score(self, context: Context) -> Tensor:
        """Uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(context.shape, generator=generator).to(context.keys.device)
