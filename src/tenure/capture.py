"""Capture: every span's rows are copied out before an eviction can touch them, and archived once the span is whole.

New rows of a session always lie behind all others in every layer, so what was not captured yet is one run of rows at
the end of the slab, the same for all layers; only where a rollback opens a span again whose record cannot be had, its
rows are looked for layer by layer. Rows that wait for the rest of their span are held in host memory.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch

from tenure.cache.rows import RowSegment
from tenure.ledger import Ledger
from tenure.spans import Span
from tenure.tiers.record import Archive, SpanRecord


class Capture:
    """Hands complete spans of one session to its archive.

    Args:
        archive: where they go.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.upto = 0
        """Logical index before which everything was captured."""
        self._parts: list[SpanRecord] = []

    @property
    def parts(self) -> list[SpanRecord]:
        """Rows that wait for the rest of their span."""
        return list(self._parts)

    def resume(self, upto: int, parts: list[SpanRecord]) -> None:
        """Go on from where a saved session stopped.

        Args:
            upto: see the attribute.
            parts: see the property.
        """
        self.upto, self._parts = upto, parts

    def take(self, ledger: Ledger, rows: RowSegment, ids: array[int]) -> None:
        """Copy the rows that were not captured yet, and archive the spans that are complete with them.

        A span is complete when another one has begun behind it.
        """
        if self.upto == ledger.length:
            return
        first = max(0, ledger.spans.index_at(self.upto - 1))  # the span that is still open
        for number in range(first, len(ledger.spans)):
            span = ledger.spans[number]
            start, stop = max(span.start, self.upto), span.stop
            if start < stop:
                row = ledger.rows - (ledger.length - start)
                keys, values = rows.copy(row, row + stop - start)
                score = ledger.score[:, row : row + stop - start].to("cpu", copy=True)
                self._parts.append(SpanRecord(span.id, start, ids[start:stop], keys, values, score))
            if number + 1 < len(ledger.spans):
                self._seal(span)
        self.upto = ledger.length

    def _seal(self, span: Span) -> None:
        """Archive the span of the parts at hand, if they are all of it."""
        parts, self._parts = self._parts, []
        if not parts or parts[0].start != span.start or sum(map(len, parts)) != len(span):
            return  # an empty span, or one whose first part was lost with a store
        whole = replace(parts[0], span=span.id)  # it may have got another name since
        if len(parts) > 1:
            ids = array("I")
            for part in parts:
                ids.extend(part.ids)
            whole = replace(
                whole,
                ids=ids,
                keys=torch.cat([part.keys for part in parts], 2),
                values=torch.cat([part.values for part in parts], 2),
                score=torch.cat([part.score for part in parts], 1),
            )
        self.archive.put(whole)

    def truncate(self, ledger: Ledger, rows: RowSegment, ids: array[int], count: int) -> None:
        """The session goes back to its first ``count`` tokens; call it after :meth:`take` and before the ledger's."""
        if count == ledger.length:
            return
        spans = ledger.spans
        last = spans.index_at(count - 1) if count else -1
        if last == len(spans) - 1:
            self._parts = [part.first(count - part.start) for part in self._parts if part.start < count]
        else:
            record = self.archive.get(spans[last].id) if count else None
            self._parts = [] if record is None else [record.first(count - record.start)]
            if count and record is None and ledger.resident(spans[last]) == 1.0:
                # Its store gives no answer, and all of it is here, though not in the same rows of all layers.
                self._parts = [_resident(ledger, rows, ids, spans[last], count)]
        # The last span that stays is open again: what comes may add to it.
        self.archive.forget([spans[number].id for number in range(max(0, last), len(spans))])
        self.upto = count

    def fork(self) -> Capture:
        """For a fork of the session."""
        copy = Capture(self.archive.fork())
        copy.upto, copy._parts = self.upto, list(self._parts)
        return copy


def _resident(ledger: Ledger, rows: RowSegment, ids: array[int], span: Span, stop: int) -> SpanRecord:
    """What comes before ``stop`` of a span of which every group of layers holds all rows."""
    count = stop - span.start
    starts = (ledger.logical[:, : ledger.rows] == span.start).int().argmax(1).tolist()
    keys, values = rows.copy_runs(starts, count)
    score = torch.stack([ledger.score[group, start : start + count] for group, start in enumerate(starts)])
    return SpanRecord(span.id, span.start, ids[span.start : stop], keys, values, score.cpu())
