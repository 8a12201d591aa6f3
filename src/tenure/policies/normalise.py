"""How much attention is much: ways to make one forward's attention mass comparable over time and length.

The softmax mass of a slot shrinks as the cache grows and is dominated by the sinks. MemDecay's authors name the
normalisation of attention as the main weakness of their score; their form is not public, so all of these are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from tenure.policies.base import ascending

if TYPE_CHECKING:
    from tenure.policies.base import Look

Normalisation = Literal[
    "raw", "ratio", "log_ratio", "rank", "sink_excluded", "age_corrected", "value_weighted"
]
NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)

MOST = 16.0
"""A ratio above it counts as this: one slot cannot earn a lifetime in one look."""


def normalise(look: Look, how: Normalisation) -> Tensor:
    """Attention of one forward as a score a slot, ``[groups, rows]`` fp32.

    - ``raw``: mean mass a query, 0 to 1.
    - ``ratio``: the share of the whole mass over the fair share ``1 / rows``, at most 16.
    - ``log_ratio``: ``log(1 + ratio)``.
    - ``rank``: the slot's place among those that are neither sinks nor of this forward, 0 to 1.
    - ``sink_excluded``: ``log_ratio`` with the sinks' mass taken out of the whole.
    - ``age_corrected``: the mean over the queries that could see the slot (as ObservedAttention of kvpress), sinks
      excluded, then ``log_ratio``.
    - ``value_weighted``: mass times the norm of the slot's value (after CriticalKV, without its output matrix), sinks
      excluded, then ``log_ratio``.
    """
    mass = look.mass
    if how == "raw":
        return mass / look.queries
    if how in ("ratio", "log_ratio"):
        ratio = _ratio(mass)
        return ratio if how == "ratio" else ratio.log1p()
    rows = mass.shape[1]
    sinks = look.logical < look.sinks
    if how == "rank":
        aside = sinks.clone()
        aside[:, rows - look.new :] = True
        place = ascending(mass.masked_fill(aside, -1.0)) - aside.sum(1, keepdim=True)
        ranked = place.float() / max(1, rows - int(aside.sum(1).min()))
        return ranked.clamp_(min=0).masked_fill_(aside, 0.0)
    if how == "age_corrected":
        mass = mass / visible(look)
    elif how == "value_weighted":
        mass = mass * look.value
    return _ratio(mass.masked_fill(sinks, 0.0)).log1p()


def visible(look: Look) -> Tensor:
    """How many of the counted queries could see each row, ``[rows]`` fp32."""
    rows = look.mass.shape[1]
    behind = torch.arange(rows, 0, -1, device=look.mass.device)
    return behind.clamp_(max=look.queries).float()


def _ratio(mass: Tensor) -> Tensor:
    fair = mass.sum(1, keepdim=True).clamp_(min=1e-12) / mass.shape[1]
    return (mass / fair).clamp_(max=MOST)
