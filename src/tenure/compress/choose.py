"""Which rows of a session are compressed, which stay as they are, and how many entries are left for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.errors import ConfigError
from tenure.policies.base import ascending
from tenure.reads import needed

if TYPE_CHECKING:
    from tenure.memory import Memory

Where = str | tuple[int, int] | Sequence[str] | None
"""A span's id, a range of logical indices, several span ids, or None for all."""

_ROWS = 8
"""The share of a budget that is left for rows besides pins and sinks, one in so many."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What a compression would do.

    Args:
        mask: rows to compress, ``[groups, rows]`` bool, the same number in each.
        chosen: rows of the part, in the group of layers that has most; the other counts too.
        counted: of these, those that a ratio counts.
        exact: of ``chosen``, those that stay.
        outside: of ``counted``, those that stay.
        entries: over all layers and heads.
        heads: layers times kv heads.
    """

    mask: Tensor
    chosen: int
    counted: int
    exact: int
    outside: int
    entries: int
    heads: int

    @property
    def tokens(self) -> int:
        """To compress, in each (layer, kv head)."""
        return int(self.mask[0].sum())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.tokens or self.entries >= self.heads * self.tokens


def choose(
    memory: Memory, span: Where, ratio: float | None, budget: int | None, recent: int, most: int | None
) -> Choice:
    """What :func:`tenure.compress.apply.compress` would do with these arguments; changes nothing."""
    layout = memory.device.layout
    heads = layout.layers * layout.kv_heads
    inside = chosen(memory, span)
    kept, planned = protected(memory)
    logical = memory.ledger.logical[:, : memory.ledger.rows]

    def left(counted: int) -> int:
        return int(heads * counted / ratio) if ratio is not None else heads * min(budget or 1, counted)

    counted = _most(inside & ~planned)
    sinks = _most(inside & (logical < memory.config.sinks))
    newest = max(0, min(recent, (left(counted) // heads - sinks) // 4))
    exact = kept | (inside & (logical >= memory.ledger.length - newest))
    mask = torch.zeros_like(inside)
    if left(counted) < heads * counted:
        mask = even(memory, inside & ~exact, most)
        planned = planned | (inside & ~exact & ~mask)
        exact, counted = exact | planned, _most(inside & ~planned)
    outside = _most(inside & exact & ~planned)
    entries = max(1, left(counted) - heads * outside)
    return Choice(mask, _most(inside), counted, _most(inside & exact), outside, entries, heads)


def check_amount(ratio: float | None, budget: int | None, *, named: str = "budget") -> None:
    """Raise ConfigError where nothing can be compressed to these; see :func:`tenure.compress.apply.compress`.

    Args:
        ratio: see there.
        budget: see there.
        named: how the caller's option for the budget is called.
    """
    if (ratio is None) == (budget is None):
        raise ConfigError("give a ratio or a budget", option="ratio", way_out="One of the two")
    if ratio is not None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not math.isfinite(ratio):
            raise ConfigError(f"{ratio!r} is no number", option="ratio", way_out="Give 8, for example")
        if ratio < 1:
            raise ConfigError(f"{ratio} is below 1", option="ratio", way_out="Give 1 (nothing) or more")
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise ConfigError(f"{budget!r} is no whole number", option=named, way_out="Give 256, for example")
        if budget < 1:
            raise ConfigError(
                f"{budget} entries cannot stand for anything", option=named, way_out="Give 1 or more"
            )


def chosen(memory: Memory, where: Where) -> Tensor:
    """Rows of the ranges or spans, ``[groups, rows]`` bool."""
    ledger = memory.ledger
    logical = ledger.logical[:, : ledger.rows]
    if where is None:
        return torch.ones_like(logical, dtype=torch.bool)
    if isinstance(where, tuple) and len(where) == 2 and all(isinstance(one, int) for one in where):
        first, stop = int(where[0]), int(where[1])
        if not 0 <= first < stop or first >= ledger.length > 0:
            raise ConfigError(
                f"({first}, {stop}) holds none of {ledger.length:,} tokens",
                option="span",
                way_out="Give the first token, counted from 0, and the one behind the last",
            )
        return (logical >= first) & (logical < stop)
    names = [where] if isinstance(where, str) else [str(name) for name in where]
    mask = torch.zeros_like(logical, dtype=torch.bool)
    for name in names:
        mask |= ledger.inside(ledger.spans.get(name))
    return mask


def protected(memory: Memory) -> tuple[Tensor, Tensor]:
    """Rows that must stay, and of them those that no ratio counts: pins, the policy's too, and what the plan reads."""
    if not memory.ledger.rows:
        empty = torch.zeros_like(memory.ledger.logical[:, :0], dtype=torch.bool)
        return empty, empty
    view = memory.policy.pinned(memory.view())
    outside = (view.pin > 0) | (view.readers >= 0)
    return outside | (view.logical < view.sinks), outside & (view.logical >= view.sinks)


def _most(mask: Tensor) -> int:
    """Rows of a mask in the group of layers that has most of them."""
    return int(mask.sum(1).max())


def check_room(memory: Memory, slots: int) -> None:
    """Raise ConfigError where ``slots`` more of compressed tokens would starve the rows of a budget."""
    budget, taken = memory.config.budget, memory.frozen.slots + slots
    if budget is None or not memory.policy.evicts:
        return
    fixed, least = needed(memory), max(1, budget // _ROWS)
    if budget - taken - fixed < least:
        raise ConfigError(
            f"compressed tokens would take {taken} of {budget} slots, pins and sinks take {fixed}; "
            f"{least} are for new tokens",
            option="ratio",
            way_out="Give a higher ratio or less to compress, or the session a larger budget",
        )


def even(memory: Memory, mask: Tensor, most: int | None = None) -> Tensor:
    """The same number of rows in every group, at most ``most``: the most wanted of the chosen ones are left out."""
    count = mask.sum(1)
    least = int(count.min()) if mask.numel() else 0
    if most is not None and least > most:
        least = most
    if bool((count == least).all()):
        return mask
    if not least and most != 0:
        raise ConfigError(
            f"layers hold between none and {int(count.max())} of these tokens",
            option="span",
            way_out="Compress before the budget evicts, or give the session granularity 'session'",
        )
    order = ascending(memory.policy.rank(memory.view())).masked_fill(~mask, mask.shape[1])
    return mask & (order.argsort(1).argsort(1) < least)
