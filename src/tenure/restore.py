"""Evicted spans come back: whole, from the archive, at new positions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tenure.interrupt import uninterrupted
from tenure.policies import select
from tenure.spans import Span
from tenure.tiers.prefetch import prefetch
from tenure.tiers.record import SpanRecord

if TYPE_CHECKING:
    from tenure.memory import Memory


@torch.inference_mode()
def restore(memory: Memory, span_ids: Iterable[str]) -> list[str]:
    """Bring evicted spans back from the archive.

    What the policy ranks lowest makes room. A span that is unknown, whole already, lost by the archive or too large for
    what sinks and pins leave of the budget is passed over.

    Args:
        memory: of the session.
        span_ids: in order of importance.

    Returns:
        Ids of the spans that came back.
    """
    back: list[str] = []
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
        if ledger.resident(span) == 1.0:
            continue
        record = archive.get(span_id)
        if record is not None and _belongs(memory, record, span):
            with uninterrupted():
                if _splice(memory, record, span):
                    back.append(span_id)
    return back


def _belongs(memory: Memory, record: SpanRecord, span: Span) -> bool:
    """Whether a record is this span: a store may have mixed things up, or kept an older session's."""
    return record.start == span.start and array("I", record.ids) == memory.ids[span.start : span.stop]


def _splice(memory: Memory, record: SpanRecord, span: Span) -> bool:
    """Make room and put the rows in; False where sinks and pins leave none."""
    ledger, rows = memory.ledger, memory.rows
    view, own = memory.view(), ledger.inside(span)
    frozen = memory.frozen.without(span.start, span.stop)
    room = (
        view.budget + memory.frozen.slots - frozen.slots if memory.config.budget else ledger.rows + len(span)
    ) - len(span)
    safe = int((view.hard & ~own).sum(1).max())
    kept = min(room, int((~own).sum(1).min()))
    if kept <= safe:
        return False
    index = select(memory.policy, replace(view, budget=kept), leave=own)
    renumbers = ledger.renumbers
    memory.freeze(frozen)
    rows.keep(index)
    order = ledger.splice(span, index, record.score.to(index.device))
    memory.aging.label(ledger, span)
    rows.splice(order, record.keys, record.values)
    if memory.positions.renumber(ledger.next_position, 0, ledger.gaps):
        ledger.renumber()
    rows.renumber()
    if ledger.renumbers != renumbers:
        memory.frozen = memory.frozen.placed(ledger)
    return True
