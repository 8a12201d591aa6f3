"""Evicted spans come back: whole, from the archive, at new positions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.interrupt import uninterrupted
from tenure.policies import View, select
from tenure.regions import Region
from tenure.spans import Span
from tenure.tiers.prefetch import prefetch
from tenure.tiers.record import SpanRecord

if TYPE_CHECKING:
    from tenure.memory import Memory


@torch.inference_mode()
def restore(memory: Memory, span_ids: Iterable[str], *, guessed: bool = False) -> list[str]:
    """Bring evicted spans back from the archive.

    What the policy ranks lowest makes room; what was brought back or found whole before it in the list does not, nor what
    the current step reads where the policy follows the plan. A span that is unknown, whole already, lost by the archive
    or too large for what these, sinks and pins leave of the budget is passed over.

    Args:
        memory: of the session.
        span_ids: in order of importance.
        guessed: planners say so: what the policy would let go again at once is passed over, too.

    Returns:
        Ids of the spans that came back; all of them are whole now.
    """
    back: list[str] = []
    whole: list[Span] = []
    archive, ledger = memory.archive, memory.ledger
    if archive is None:
        return back
    memory.capture_new()
    span_ids = list(dict.fromkeys(span_ids))
    prefetch(memory, span_ids)  # all of them are read at the same time
    for span_id in span_ids:
        if span_id not in ledger.spans:
            continue
        span = ledger.spans.get(span_id)
        if ledger.resident(span) < 1.0:
            record = archive.get(span_id)
            if record is None or not _belongs(memory, record, span):
                continue
            with uninterrupted():
                if not _splice(memory, record, span, whole, guessed):
                    continue
            back.append(span_id)
        whole.append(span)
    return back


def _belongs(memory: Memory, record: SpanRecord, span: Span) -> bool:
    """Whether a record is this span: a store may have mixed things up, or kept an older session's."""
    return record.start == span.start and array("I", record.ids) == memory.ids[span.start : span.stop]


def _splice(
    memory: Memory, record: SpanRecord, span: Span, whole: Sequence[Span], guessed: bool = False
) -> bool:
    """Make room and put the rows in; False where there is none besides sinks, pins and the spans of ``whole``."""
    ledger, rows, policy = memory.ledger, memory.rows, memory.policy
    own, frozen = ledger.inside(span), memory.frozen.without(span.start, span.stop)
    budget = ledger.rows + len(span)
    if memory.config.budget is not None:
        budget = memory.config.budget - frozen.slots
    view = _beside(memory.view(), own, budget)
    if guessed and len(span) + sum(map(len, whole)) > policy.spare(view):
        return False
    view = policy.pinned(view)  # by the whole budget, not by what the span leaves of it
    stays = [ledger.inside(other) for other in whole]
    first = policy.first(view)
    for slots in stays if first is None else [*stays, first]:
        view = replace(view, pin=view.pin.masked_fill(slots, 2))
    fixed = int((view.hard & ~own).sum(1).max())
    kept = min(budget - len(span), int((~own).sum(1).min()))
    if kept < max(1, fixed) or len(span) > policy.room(budget, fixed):
        return False
    index = select(policy, replace(view, budget=kept), leave=own)
    renumbers = ledger.renumbers
    memory.evictions.record(view, index, policy.told(view), "room", replaced=own)
    memory.freeze(frozen)
    if memory.config.capacity is None and kept + len(span) > rows.capacity:
        memory.resize(kept + len(span))
    rows.keep(index)
    order = ledger.splice(span, index, record.score.to(index.device))
    memory.aging.label(ledger, span)
    rows.splice(order, record.keys, record.values)
    if memory.positions.renumber(ledger.next_position, 0, ledger.gaps):
        ledger.renumber()
    rows.renumber()
    if ledger.renumbers != renumbers:
        memory.frozen = memory.frozen.placed(ledger)
    memory.evictions.sample(memory.view())
    return True


def _beside(view: View, own: Tensor, budget: int) -> View:
    """The view in which the rows that a span has left count for nothing: they go, and it comes back whole."""
    other = list(Region).index(Region.OTHER)
    return replace(
        view,
        budget=budget,
        readers=view.readers.masked_fill(own, -1),
        current=view.current & ~own,
        pin=view.pin.masked_fill(own, 0),
        region=view.region.masked_fill(own, other),
    )
