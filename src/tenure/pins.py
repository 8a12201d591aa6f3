"""Hard pins that the budget cannot hold: refused with the numbers, or the oldest one gives way.

Decided before anything is queued. A pin that gives way is counted in its span's report; nothing is lost in silence, and
where giving way would not be enough, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tenure.errors import BudgetError
from tenure.interrupt import uninterrupted
from tenure.spans import Span

if TYPE_CHECKING:
    from tenure.memory import Memory

STUB = 8
"""First slots of a spilled pin that stay, as ordinary ones: its header and first words, so that it is seen to exist."""


def admit(memory: Memory, incoming: int, upto: int | None = None) -> list[Span]:
    """See that the budget can hold the hard pins together with ``incoming`` more pinned tokens.

    Args:
        memory: of the session; ``config.pins`` says what happens where it cannot.
        incoming: hard-pinned tokens about to be queued.
        upto: count what is pinned among the first so many tokens; None counts all, the backlog too.

    Returns:
        The spans whose pins gave way, oldest first.

    Raises:
        BudgetError: with the numbers; nothing has changed.
    """
    yielding = giving_way(memory, incoming, upto)
    give_way(memory, yielding)
    return yielding


def giving_way(memory: Memory, incoming: int, upto: int | None = None) -> list[Span]:
    """The spans whose pins must give way for that; see :func:`admit`. Changes nothing."""
    budget = memory.row_budget
    if budget is None or not incoming:
        return []
    edge = len(memory.ids) if upto is None else upto
    pinned = [span for span in memory.ledger.spans.pinned if span.pin == "hard" and span.start < edge]
    held = sum(min(span.stop, edge) - span.start for span in pinned)
    if upto is None:
        held += _waiting(memory)
    over = held + incoming + memory.config.sinks + 1 - budget
    yielding: list[Span] = []
    for span in pinned:
        if over <= 0 or memory.config.pins == "refuse":
            break
        if memory.config.pins == "demote" or _archived(memory, span):
            yielding.append(span)
            over -= min(span.stop, edge) - span.start
    if over > 0:
        raise _refusal(memory, budget, held, incoming)
    return yielding


def give_way(memory: Memory, yielding: Iterable[Span]) -> None:
    """Make pins soft, or spill them, as the session's option ``pins`` says."""
    with uninterrupted():
        for span in yielding:
            if memory.config.pins == "demote":
                memory.ledger.spans.pin(span, "soft")
            else:
                _spill(memory, span)


def stays(memory: Memory) -> int:
    """Slots that no eviction may take: sinks and hard pins, those that wait among them."""
    pinned = sum(len(span) for span in memory.ledger.spans.pinned if span.pin == "hard")
    return memory.config.sinks + pinned + _waiting(memory)


def _waiting(memory: Memory) -> int:
    """Hard-pinned tokens of the backlog."""
    return sum(len(ids) for span, ids, _ in memory.backlog if span.pin == "hard")


def _archived(memory: Memory, span: Span) -> bool:
    """Whether a span can come back; the last one, which may still grow, is in no archive."""
    capture = memory.capture
    if capture is None:
        return False
    capture.take(memory.ledger, memory.rows, memory.ids)
    return capture.archive.get(span.id) is not None


@torch.inference_mode()
def _spill(memory: Memory, span: Span) -> None:
    """Evict all but the stub of a pinned span. Every layer has all of it, so the layers stay of one length."""
    ledger = memory.ledger
    goes = ledger.inside(span) & (
        ledger.logical[:, : ledger.rows] >= max(span.start + STUB, memory.config.sinks)
    )
    ledger.spans.pin(span, None)
    if not bool(goes.any()):
        return
    rows = torch.arange(ledger.rows, device=goes.device).expand_as(goes)
    memory.drop(rows[~goes].view(ledger.groups, -1), "spilled")


def _refusal(memory: Memory, budget: int, held: int, incoming: int) -> BudgetError:
    sinks, slots = memory.config.sinks, memory.frozen.slots
    need = held + incoming + sinks + 1
    way_out = "Pin less, use pin 'soft', or give a larger budget"
    if memory.config.pins == "refuse":
        way_out += "; the option pins='demote' lets the oldest pin give way"
    elif memory.config.pins == "spill" and memory.archive is None:
        way_out += ", or give the session tiers: pins='spill' has nowhere to put a pin"
    return BudgetError(
        f"pinned tokens {held} + {incoming} new, {sinks} sinks and 1 free slot need {need}, the budget is {budget}"
        + (f" besides {slots} compressed" if slots else ""),
        option="pin",
        way_out=way_out,
    )
