"""CAKE: layers get what their attention's spread and change ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tenure.compress.base import Context, spread
from tenure.compress.snapkv import SnapKV, each_layer, moments, pooled
from tenure.errors import ConfigError


@dataclass(frozen=True)
class Cake(SnapKV):
    """CAKE (arXiv 2503.12491): layer budgets by ``entropy^(1/tau1) variance^(1/tau2)`` of the window's attention.

    Both are of the tokens before the window, as in its code: what the window's queries see of each other says nothing of
    a layer. Tokens rank by ``mean + gamma * variance`` of their attention over the window. All layers are compressed at
    once, so its cascade, which bounds the memory while a prompt is read, is left out; its temperatures come from a table
    of models, 1 for others.

    Args:
        window: queries that score.
        gamma: weight of the variance.
        tau1: see above.
        tau2: see above.
    """

    window: int = 32
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    name: ClassVar[str] = "cake"
    paper: ClassVar[str] = "CAKE, arXiv 2503.12491"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in (("tau1", self.tau1), ("tau2", self.tau2)):
            if value <= 0:
                raise ConfigError(f"{value} is not above 0", option=option, way_out="Give 1, for example")

    def _look(self, context: Context) -> tuple[Tensor, Tensor]:
        scores, weights = [], []
        probes = self.probes(context)
        for layer, (shares, sees) in enumerate(each_layer(context, probes)):
            mean, variance = moments(shares, sees)
            scores.append((mean + self.gamma * variance).mean(1))
            before = context.position[layer % len(context.position)] < probes.position.min()
            entropy = torch.special.entr(shares[..., before]).sum(-1).mean()
            change = variance[..., before].sum(-1).mean()
            weights.append(entropy ** (1 / self.tau1) * change ** (1 / self.tau2))
        return pooled(torch.stack(scores), self.kernel), torch.stack(weights)

    def score(self, context: Context) -> Tensor:
        """See the class; the weights of layers are noted for :meth:`quota`."""
        score, weight = self._look(context)
        context.notes["cake"] = weight
        return score

    def quota(self, context: Context, score: Tensor, budget: int) -> Tensor:
        """See the class."""
        layers, heads, tokens = context.shape
        weight = context.notes["cake"].cpu()
        return spread(weight[:, None].expand(layers, heads), budget, tokens)
