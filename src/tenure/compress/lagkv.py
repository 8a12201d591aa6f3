"""LagKV: a token stays if the text after it makes it stand out. Looks at no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.compress.base import Context, Scorer
from tenure.errors import ConfigError


@dataclass(frozen=True)
class LagKV(Scorer):
    """LagKV (arXiv 2504.04704).

    Keys and values of a stretch are scaled by the smallest and largest of each channel in the *next* stretch; the
    standard deviation over the channels, as a softmax over the stretch, is the score, keys and values averaged. Ranks are
    taken inside each stretch, so that all keep the same share. The last stretch and what is left over stay first. Keys
    are raw: the paper's are rotated, whose channels are not comparable over positions (our choice).

    Args:
        lag: tokens of a stretch.
    """

    lag: int = 128
    name: ClassVar[str] = "lagkv"
    paper: ClassVar[str] = "LagKV, arXiv 2504.04704"

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ConfigError(f"{self.lag} tokens are no stretch", option="lag", way_out="Give 1 or more")

    def score(self, context: Context) -> Tensor:
        """See the class."""
        layers, heads, tokens = context.shape
        stretches = tokens // self.lag
        recency = torch.arange(tokens, dtype=torch.float32, device=context.keys.device)
        score = (2 + recency / tokens).expand(layers, heads, tokens).clone()
        if stretches < 2:
            return score
        used = (stretches - 1) * self.lag
        found = torch.zeros(layers, heads, stretches - 1, self.lag, device=score.device)
        for state in (context.keys, context.values):
            parts = state[:, :, : stretches * self.lag].float().view(layers, heads, stretches, self.lag, -1)
            reference = parts[:, :, 1:]
            low = reference.amin(3, keepdim=True)
            scale = (reference.amax(3, keepdim=True) - low).clamp(min=1e-6)
            found += ((parts[:, :, :-1] - low) / scale).std(-1).softmax(-1) / 2
        order = found.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True).float() / self.lag
        score[:, :, :used] = order.flatten(2)
        return score
