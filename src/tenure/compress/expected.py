"""Expected Attention: what coming queries will look at, if they are like those so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.cache.ragged import Entries
from tenure.compress.adakv import shared
from tenure.compress.base import Context, Scorer, standing, take
from tenure.errors import ConfigError


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Expected Attention (arXiv 2510.00636, kvpress).

    Queries are taken to be Gaussian before rotation, so that ``E[exp(q k / sqrt d)] = exp(mu k / sqrt d + k S k / 2d)``
    with mean and covariance rotated by the mean rotation over the next positions; the softmax over tokens, a mean over
    the heads of a kv head, times the norm of the value. Mean and covariance come from the newest tokens, whose queries
    are computed again; kvpress has those of the whole prompt at hand (our choice).

    Args:
        future: positions that are looked ahead.
        sample: newest tokens whose queries are taken.
        epsilon: added to the share before it is weighted by the value's norm.
    """

    future: int = 512
    sample: int = 256
    epsilon: float = 0.0
    name: ClassVar[str] = "expected"
    paper: ClassVar[str] = "Expected Attention, arXiv 2510.00636"

    def __post_init__(self) -> None:
        for option in ("future", "sample"):
            if getattr(self, option) < 1:
                raise ConfigError("0 is too few", option=option, way_out="Give 1 or more")

    def score(self, context: Context) -> Tensor:
        """See the class."""
        layers, heads, _ = context.shape
        probes = context.reader.tail(self.sample)
        first = int(probes.position[-1]) + 1
        places = torch.arange(first, first + self.future, device=context.keys.device)
        turn = _mean_rotation(*context.cos_sin(places), context.keys.shape[-1])
        found = []
        for layer in range(layers):
            queries = probes.raw[layer].float()
            mean = queries.mean(1)
            centred = queries - mean[:, None]
            covariance = centred.transpose(1, 2) @ centred / max(1, len(probes) - 1)
            mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
            keys = context.rotated[layer].float()
            keys = keys.repeat_interleave(len(mean) // heads, 0)
            logits = (keys @ mean[:, :, None])[..., 0] * context.scale
            logits += ((keys @ covariance) * keys).sum(-1) * context.scale**2 / 2
            share = logits.softmax(-1).view(heads, -1, logits.shape[-1]).mean(1)
            found.append((share + self.epsilon) * context.values[layer].float().norm(dim=-1))
        return torch.stack(found)


@dataclass(frozen=True)
class AdaExpectedAttention(ExpectedAttention):
    """Expected Attention with heads of a layer sharing its budget as in Ada-KV.

    Args:
        safe: share of an even budget that each head keeps in any case.
    """

    safe: float = 0.2
    name: ClassVar[str] = "adakv-expected"
    paper: ClassVar[str] = "Expected Attention with Ada-KV's budgets"

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`~tenure.compress.base.Compressor`."""
        score = self.score(context)
        mask = shared(context, score, budget, self.safe)
        return take(context, mask, standing(score, mask.sum(-1)))


def _mean_rotation(cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """Mean over positions of the rotation as a matrix ``[D, D]``; channels that are not rotated stay."""
    half = cos.shape[-1]
    c, s = cos.mean(0), sin.mean(0)
    turn = torch.eye(width, device=cos.device)
    index = torch.arange(half, device=cos.device)
    turn[index, index] = turn[index + half, index + half] = c
    turn[index, index + half], turn[index + half, index] = -s, s
    return turn
