"""TwinKV: a repair pass over any choice of tokens. Tokens without a near duplicate come back for those that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tenure.cache.ragged import Entries
from tenure.compress.base import Compressor, Context, Scorer, standing, take
from tenure.errors import ConfigError

_BLOCK = 512


@dataclass(frozen=True)
class TwinKV(Compressor):
    """TwinKV (its code is not public) over another method's choice, at the same number of tokens.

    In each head, evicted tokens whose raw key has no kept key at a cosine of ``near`` or more (orphans) are exchanged for
    kept tokens that have another kept one so near (donors): the orphan with the best score for the donor with the
    worst, as long as there are both, at most ``share`` of the kept ones. The threshold, the order and the limit are our
    choice.

    Args:
        base: name of a method that keeps tokens as they are.
        options: of that method.
        near: cosine from which two keys are duplicates.
        share: of the kept tokens that may be exchanged.
    """

    base: str = "snapkv"
    options: Mapping[str, Any] = field(default_factory=dict)
    near: float = 0.9
    share: float = 0.3
    name: ClassVar[str] = "twinkv"
    paper: ClassVar[str] = "TwinKV, a repair pass"

    def __post_init__(self) -> None:
        self._method()
        if not 0 <= self.share <= 1:
            raise ConfigError(f"{self.share} is no share", option="share", way_out="Give 0 to 1")

    @property
    def asks(self) -> bool:
        """As the method that it repairs."""
        return self._method().asks

    def _method(self) -> Scorer:
        from tenure.compress import make_compressor

        method = make_compressor(self.base, self.options)
        if not isinstance(method, Scorer):
            raise ConfigError(
                f"{self.base} does not keep tokens by a score",
                option="base",
                way_out="Give snapkv or another",
            )
        return method

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`~tenure.compress.base.Compressor`."""
        method = self._method()
        score = method.score(context)
        kept = _mask(context, method.compress(context, budget))
        layers, heads, _ = context.shape
        for layer in range(layers):
            for head in range(heads):
                keys = normalize(context.keys[layer, head].float(), dim=-1)
                repair(kept[layer, head], score[layer, head], keys, self.near, self.share)
        return take(context, kept, standing(score, kept.sum(-1)))


def _mask(context: Context, made: Entries) -> Tensor:
    """Which tokens a choice has kept, ``[L, G, T]``."""
    layers, heads, tokens = context.shape
    owner = made.owner
    mask = torch.zeros(layers * heads, tokens, dtype=torch.bool, device=owner.device)
    for group, logical in enumerate(context.logical):
        mine = owner // heads % len(context.logical) == group
        mask[owner[mine], torch.searchsorted(logical, made.start[mine].long())] = True
    return mask.view(layers, heads, tokens)


def repair(kept: Tensor, score: Tensor, keys: Tensor, near: float, share: float) -> None:
    """Exchange donors for orphans in one head, in place.

    Args:
        kept: ``[T]`` bool.
        score: ``[T]``.
        keys: ``[T, D]`` of length one.
        near: see :class:`TwinKV`.
        share: the same.
    """
    inside = kept.nonzero().flatten()
    outside = (~kept).nonzero().flatten()
    if not len(inside) or not len(outside):
        return
    alone = torch.cat([(keys[part] @ keys[inside].T).amax(1) < near for part in torch.split(outside, _BLOCK)])
    twin = torch.zeros(len(inside), dtype=torch.bool, device=keys.device)
    alike = keys[inside] @ keys[inside].T >= near
    alike.fill_diagonal_(False)
    # Of two duplicates only the worse one may go: a token may give way to a better one alone.
    better = score[inside][None] > score[inside][:, None]
    better |= (score[inside][None] == score[inside][:, None]) & (inside[None] < inside[:, None])
    twin |= (alike & better).any(1)
    orphans = outside[alone]
    orphans = orphans[score[orphans].sort(descending=True, stable=True).indices]
    donors = inside[twin]
    donors = donors[score[donors].sort(stable=True).indices]
    count = min(len(orphans), len(donors), int(share * len(inside)))
    kept[donors[:count]] = False
    kept[orphans[:count]] = True
