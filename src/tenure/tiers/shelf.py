"""The plainest archive: whole spans in host memory, without a limit."""

from __future__ import annotations

from collections.abc import Iterable

from tenure.tiers.record import SpanRecord


class Shelf:
    """Spans by id. What a fork puts here or forgets, its source does not see."""

    def __init__(self) -> None:
        self.records: dict[str, SpanRecord] = {}

    def put(self, record: SpanRecord) -> None:
        """See :class:`~tenure.tiers.record.Archive`."""
        self.records[record.span] = record

    def get(self, span_id: str) -> SpanRecord | None:
        """See :class:`~tenure.tiers.record.Archive`."""
        return self.records.get(span_id)

    def prefetch(self, span_ids: Iterable[str]) -> None:
        """Everything is at hand."""

    def forget(self, span_ids: Iterable[str]) -> None:
        """See :class:`~tenure.tiers.record.Archive`."""
        for span_id in span_ids:
            self.records.pop(span_id, None)

    def fork(self) -> Shelf:
        """A copy that shares the tensors."""
        copy = Shelf()
        copy.records.update(self.records)
        return copy
