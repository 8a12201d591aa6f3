"""What a compressor is: a frozen dataclass that makes a number of entries out of a stretch of cached tokens.

Methods that only choose tokens give scores and leave the rest to :func:`take`; all of them, and those that merge, end
as :class:`~tenure.cache.ragged.Entries`, so that every method is counted, stored and attended to in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tenure.cache.ragged import Entries
from tenure.cache.rows import CosSin, Layout
from tenure.compress.probes import Probes
from tenure.errors import ConfigError
from tenure.kernels import Kernels


class Reader(Protocol):
    """Reads tokens behind the session without entering them; what the model then looks at is evidence."""

    @property
    def limit(self) -> int:
        """Tokens that one reading may have."""

    def tail(self, count: int) -> Probes:
        """Queries of the newest tokens, at most ``count``, as they were computed; at least one."""

    def behind(self, ids: Sequence[int], first: int = 0) -> Probes:
        """Queries of ``ids[first:]`` as if the session went on with ``ids``; no more than ``limit`` are read.

        Raises:
            ConfigError: none of ``ids[first:]`` would be read.
        """


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens to be compressed, ``T`` in every (layer, kv head), in logical order.

    Args:
        keys: raw keys ``[L, G, T, D]``.
        rotated: the keys at their positions.
        values: like ``keys``.
        logical: logical indices ``[L or 1, T]``; layers may hold different tokens.
        position: rotary positions, like ``logical``.
        ids: token ids, like ``logical``.
        cuts: whether a token is of another span than the one before it, like ``logical``; nothing is merged across.
        reader: for methods that ask the model.
        question: token ids of what will be asked, if it is known.
        delayed: queries that followed these tokens in the session, if they were kept.
        cue: what asks the model to repeat, up to the start of its turn: token ids from the number of a piece and the
            end of the piece before it.
        out: output projection of a layer, ``[hidden, H, D]``; None where it cannot be read.
        cos_sin: angles of positions.
        kernels: the kernel module of the device.
        scale: factor on the logits.
        seconds: where methods enter what their stages took.
        notes: what one part of a method leaves for another.
    """

    keys: Tensor
    rotated: Tensor
    values: Tensor
    logical: Tensor
    position: Tensor
    ids: Tensor
    cuts: Tensor
    reader: Reader
    question: Sequence[int]
    delayed: Probes | None
    cue: Callable[[int, Sequence[int]], list[int]]
    out: Callable[[int], Tensor | None]
    cos_sin: CosSin
    kernels: Kernels
    scale: float
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(L, G, T)``."""
        layers, heads, tokens, _ = self.keys.shape
        return layers, heads, tokens

    def shares(self, layer: int, probes: Probes, tokens: slice = slice(None)) -> Tensor:
        """Attention of probes on tokens of a layer, ``[G, g, P, T]``; see :meth:`Probes.shares`."""
        return probes.shares(
            layer,
            self.rotated[layer][:, tokens],
            self.position[layer % len(self.position), tokens],
            self.cos_sin,
            self.kernels,
            self.scale,
        )


def check_alike(layout: Layout, option: str) -> None:
    """Raise ConfigError where layers see or rotate tokens differently: an entry for several is seen by all alike."""
    if not layout.alike:
        raise ConfigError(
            "some of this model's layers see a window, or rotate by other angles: no entry can stand for several tokens",
            option=option,
            way_out="Let the budget evict; spans can come back from tiers",
        )


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of all compressors."""

    name: ClassVar[str]
    paper: ClassVar[str]

    @property
    def asks(self) -> bool:
        """Whether it looks at :attr:`Context.question`."""
        return False

    @abstractmethod
    def compress(self, context: Context, budget: int) -> Entries:
        """Exactly ``budget`` entries, ``1 <= budget <= L G T``, over all layers and heads."""


@dataclass(frozen=True)
class Scorer(Compressor):
    """A compressor that keeps the tokens of highest score and drops the others."""

    @abstractmethod
    def score(self, context: Context) -> Tensor:
        """``[L, G, T]`` fp32: higher stays."""

    def quota(self, context: Context, score: Tensor, budget: int) -> Tensor:
        """Tokens of each head ``[L, G]`` int64, ``budget`` in all and at most ``T`` each: the same for every head."""
        layers, heads, tokens = context.shape
        return spread(torch.ones(layers, heads), budget, tokens)

    def compress(self, context: Context, budget: int) -> Entries:
        """See :class:`Compressor`."""
        score = self.score(context)
        quota = self.quota(context, score, budget)
        return take(context, best(score, quota), standing(score, quota))


def spread(weight: Tensor, budget: int, most: int) -> Tensor:
    """Share a budget out in proportion to weights, at most ``most`` each, to the last unit.

    Args:
        weight: of any shape, not negative; all zero counts as all equal.
        budget: at most ``most`` times the number of weights.
        most: limit of each share.

    Returns:
        int64 shares of the shape of ``weight`` with the sum ``budget``; what is left over by rounding goes to the
        largest remainders, ties to the first.
    """
    flat = weight.double().flatten()
    if float(flat.sum()) <= 0:
        flat = torch.ones_like(flat)
    share = torch.zeros_like(flat)
    free = torch.ones_like(flat, dtype=torch.bool)
    while free.any():  # each round fills at least one share up, or is the last
        part = flat * free
        part = part if float(part.sum()) > 0 else free.double()
        wanted = part / part.sum() * (budget - float(share[~free].sum()))
        over = free & (wanted >= most)
        share = torch.where(free, wanted, share)
        if not over.any():
            break
        share[over] = most
        free &= ~over
    whole = share.floor()
    rest = budget - int(whole.sum())
    order = torch.where(whole < most, share - whole, -1.0).sort(descending=True, stable=True).indices
    whole[order[:rest]] += 1
    return whole.long().view(weight.shape)


def best(score: Tensor, quota: Tensor) -> Tensor:
    """The ``quota`` ``[L, G]`` tokens of highest score in each head, ``[L, G, T]`` bool; ties go to the earlier token."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(score.shape[-1], device=score.device) < quota[..., None].to(score.device)
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


def top(score: Tensor, budget: int) -> Tensor:
    """The ``budget`` entries of highest score over all heads, a mask of the shape of ``score``."""
    order = score.flatten().sort(descending=True, stable=True).indices[:budget]
    mask = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    mask[order] = True
    return mask.view(score.shape)


def standing(score: Tensor, quota: Tensor) -> Tensor:
    """Worth of tokens by their place within their head's quota, ``[L, G, T]``: 1 for the first, 0 behind the last.

    Whatever share of the tokens of most worth is kept, each head keeps that share of its own.
    """
    place = score.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return 1 - place / quota[..., None].clamp(min=1).to(score.device)


def take(context: Context, mask: Tensor, worth: Tensor) -> Entries:
    """The tokens of a mask ``[L, G, T]`` as they are: same keys and values, no multiplicity.

    Args:
        context: of the tokens.
        mask: which.
        worth: ``[L, G, T]``, see :class:`~tenure.cache.ragged.Entries`.
    """

    def of(array: Tensor) -> Tensor:
        return array[:, None].expand(context.shape)[mask].to(torch.int32)

    start = of(context.logical)
    return Entries(
        lengths=mask.sum(-1),
        keys=context.keys[mask],
        values=context.values[mask],
        bias=torch.zeros(len(start), device=mask.device),
        position=of(context.position),
        start=start,
        stop=start + 1,
        worth=worth[mask].float(),
    )
