"""MemDecay: each region has a priority and a half-life, and attention refreshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tenure.cache.attend import Statistics
from tenure.errors import ConfigError
from tenure.policies.base import Look, Policy, View, ascending
from tenure.policies.normalise import NORMALISATIONS, Normalisation, normalise
from tenure.policies.random import check_ratio
from tenure.regions import Region

Refresh = Literal["energy", "soft", "impulse", "none"]


@dataclass(frozen=True)
class MemDecay(Policy):
    """Region-aware retention with decaying attention (MemDecay, arXiv 2607.10582; only its abstract is public).

    A slot ``i`` of region ``r`` with base priority ``B``, half-life ``h`` and energy ``E`` scores

        ``s_i(t) = B f + B (1 - f) 2^(-(t - born_i) / h) + E_i(t)``
        ``E_i(t) = E_i(t - dt) 2^(-dt / h) + eta a_i(t) steps``

    where ``a`` is the normalised attention of the forward and time runs on the region's clock: a leaky integrator, of
    which H2O is the limit without base and decay. Slots leave in pages: runs of ``page`` tokens of one region and
    message, scored by ``page_max`` times their maximum and the rest their mean, and partly by the pages beside them.
    One score is shared by all layers, which measured no worse than one a layer and costs less. The formula and all
    defaults but the two half-lives are our choice.

    The hybrid mixes the ranks of this score and of the accumulated attention that H2O ranks by, which the paper
    reports to be better on unpinned content: ``mix * rank(s) + (1 - mix) * rank(accumulated)``.

    Args:
        normalise: what makes attention comparable, see :mod:`tenure.policies.normalise`.
        mix: weight of the decaying score; 1 leaves accumulated attention out, 0 leaves decay out.
        eta: gain of the attention.
        persistent: ``f``, the share of the base priority that never fades.
        refresh: ``energy`` as above; ``soft`` moves the energy towards the region's cap, ``E += eta (cap - E) min(1, a)``
            (cap 1 where the region has none); ``impulse`` counts a slot as new when ``a`` reaches ``threshold``; ``none``
            lets it fade.
        threshold: of ``impulse``.
        regions: False treats every slot as region ``other``.
        decay: False lets nothing fade.
        page: tokens of a page; 1 ranks slots one by one. With 16 more lines are cut in two, see ``docs/LOG.md``.
        page_max: weight of a page's best slot against its mean.
        spread: weight of the two pages beside a page in the same message and region, so that what is kept is connected.
        window: queries of a chunk that are counted; 0 takes all.
        reduce: how query heads are joined, ``max`` or ``mean``.
        recent_ratio: share of the budget for the newest slots.
        recent_slots: newest slots that are safe in any case, at most half of the budget: a question outlives
            its answer.
    """

    normalise: Normalisation = "sink_excluded"
    mix: float = 0.5
    eta: float = 0.15
    persistent: float = 0.2
    refresh: Refresh = "energy"
    threshold: float = 1.0
    regions: bool = True
    decay: bool = True
    page: int = 32
    page_max: float = 0.25
    spread: float = 0.5
    window: int = 128
    reduce: Literal["max", "mean"] = "max"
    recent_ratio: float = 0.35
    recent_slots: int = 64
    granularity: ClassVar[str] = "session"
    name: ClassVar[str] = "memdecay"
    paper: ClassVar[str] = "MemDecay, arXiv 2607.10582"

    def __post_init__(self) -> None:
        check_ratio(self.recent_ratio)
        for option, known in (
            ("normalise", NORMALISATIONS),
            ("refresh", get_args(Refresh)),
            ("reduce", ("max", "mean")),
        ):
            if getattr(self, option) not in known:
                raise ConfigError(
                    f"{getattr(self, option)!r} is not known",
                    option=option,
                    way_out="Give " + ", ".join(known),
                )
        for option in ("mix", "persistent", "page_max", "spread"):
            if not 0 <= getattr(self, option) <= 1:
                raise ConfigError(
                    f"{getattr(self, option)} is no share", option=option, way_out="Give 0 to 1"
                )
        for option, least in (("eta", 0), ("threshold", 0), ("page", 1), ("window", 0)):
            if getattr(self, option) < least:
                raise ConfigError(
                    f"{getattr(self, option)} is too small", option=option, way_out=f"Give at least {least}"
                )

    @property
    def statistics(self) -> Statistics | None:
        """The last ``window`` queries."""
        return Statistics(window=self.window, reduce=self.reduce)

    @property
    def values(self) -> bool:
        """Whether the norms of values are wanted."""
        return self.normalise == "value_weighted"

    def recent(self, view: View) -> int:
        """``recent_ratio`` of the budget, and not less than ``recent_slots`` or half of it."""
        return max(1, int(view.budget * self.recent_ratio), min(self.recent_slots, view.budget // 2))

    def absorb(self, look: Look) -> Mapping[str, Tensor]:
        """Decay the energies to the present and add this forward's attention."""
        found: dict[str, Tensor] = {"score": look.score + look.mass}
        if self.refresh == "none" or self.mix == 0:
            return found
        attention = normalise(look, self.normalise)
        if self.refresh == "impulse":
            now = look.table.vectors().now[self._region(look.region)]
            return found | {"born": torch.where(attention >= self.threshold, now, look.born)}
        table, energy = look.table.fade(), look.energy
        if self.decay:
            energy = energy * table.decay[self._region(look.region)]
        if self.refresh == "soft":
            cap = table.cap.masked_fill(table.cap.isinf(), 1.0)[self._region(look.region)]
            energy = energy + self.eta * (cap - energy) * attention.clamp(max=1.0)
        else:
            energy = energy.add(attention, alpha=self.eta * look.steps)
            if bool(table.cap.isfinite().any()):
                energy = energy.minimum(table.cap[self._region(look.region)])
        return found | {"energy": energy}

    def rank(self, view: View) -> Tensor:
        """The score of the slot's page."""
        score = self.priority(view) if self.mix > 0 else view.score
        if 0 < self.mix < 1:
            safe = view.hard | (view.pin > 0)
            safe[:, view.logical.shape[1] - self.recent(view) :] = True
            score = self.mix * share(score, safe) + (1 - self.mix) * share(view.score, safe)
        return score if self.page == 1 else pages(view, score, self.page, self.page_max, self.spread)

    def told(self, view: View) -> Tensor:
        """The score of the slot's page."""
        return MemDecay.rank(self, view)

    def priority(self, view: View) -> Tensor:
        """``s`` of the class, ``[groups, rows]`` fp32, decayed to the present."""
        region, table = self._region(view.region), view.table
        base = table.base[region]
        if not self.decay:
            return base + view.energy
        age = (table.now[region] - view.born).float()
        fresh = torch.exp2(-age * table.rate[region])
        energy = view.energy * table.decay[region]
        return base * (self.persistent + (1 - self.persistent) * fresh) + energy

    def _region(self, region: Tensor) -> Tensor:
        return region if self.regions else torch.full_like(region, list(Region).index(Region.OTHER))


def share(score: Tensor, safe: Tensor) -> Tensor:
    """Each slot's place among those that may go, from 0 for the lowest towards 1; 1 for safe ones."""
    free = score.shape[1] - safe.sum(1, keepdim=True)
    place = ascending(score.masked_fill(safe, float("inf"))).float()
    return (place / free.clamp(min=1)).clamp_(max=1.0)


def page_numbers(view: View, size: int) -> Tensor:
    """The page of each row, counted from 0 along the rows, ``[groups, rows]`` int64.

    A page holds the residents of ``size`` consecutive tokens, cut where the message or the region changes.
    """
    block = view.logical // size
    begins = torch.zeros_like(block)
    for key in (block, view.span, view.region):
        begins[:, 1:] |= key[:, 1:] != key[:, :-1]
    return begins.cumsum(1)


def runs(view: View) -> Tensor:
    """The run of rows of one message and region that each row belongs to, counted from 1, ``[groups, rows]`` int64."""
    begins = torch.ones_like(view.span)
    begins[:, 1:] = (view.span[:, 1:] != view.span[:, :-1]) | (view.region[:, 1:] != view.region[:, :-1])
    return begins.cumsum(1)


def pages(view: View, score: Tensor, size: int, weight: float, spread: float = 0.0) -> Tensor:
    """Each slot's score replaced by that of its page: ``weight * max + (1 - weight) * mean``."""
    page = page_numbers(view, size)
    count = torch.zeros_like(score).scatter_add_(1, page, torch.ones_like(score))
    mean = torch.zeros_like(score).scatter_add_(1, page, score) / count.clamp(min=1)
    best = torch.full_like(score, float("-inf")).scatter_reduce_(1, page, score, "amax")
    found = weight * best + (1 - weight) * mean
    if spread:
        # Pages beside each other in one message and region support each other; elsewhere a page is its own neighbour.
        run = torch.zeros_like(page).scatter_(1, page, runs(view))
        same = torch.zeros_like(found, dtype=torch.bool)
        same[:, 1:] = run[:, 1:] == run[:, :-1]
        left = torch.where(same, found.roll(1, 1), found)
        right = torch.where(same.roll(-1, 1), found.roll(-1, 1), found)
        found = (1 - spread) * found + spread / 2 * (left + right)
    return found.gather(1, page)


__all__ = ["MemDecay", "Refresh", "page_numbers", "pages", "share"]
