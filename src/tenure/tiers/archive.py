"""A session's view of the tiers: its spans by id, and what it needs to find them again after a restart."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tenure.tiers.base import Counters
from tenure.tiers.record import Archive, SpanRecord
from tenure.tiers.stack import TierStack


def span_archive(archive: Archive | None) -> SpanArchive | None:
    """A session's archive of the tiers, also where a planner has put its own before it; None without one."""
    inner = getattr(archive, "inner", archive)
    return inner if isinstance(inner, SpanArchive) else None


class SpanArchive:
    """See :class:`~tenure.tiers.record.Archive`. What it knows is removed when it and its forks are gone.

    Args:
        stack: where records live.
    """

    def __init__(self, stack: TierStack) -> None:
        self.stack = stack
        self.counters = Counters()
        """Of this archive alone: ``stored``, ``hits`` and ``misses``, in spans, and ``bytes in`` and ``bytes out``."""
        self._name = secrets.token_hex(8)
        """No other archive writes keys that begin so: equal span ids of two sessions are two entries."""
        self._count = 0
        self._keys: dict[str, str] = {}
        weakref.finalize(self, stack.ended, self._keys.values())

    @property
    def keys(self) -> Mapping[str, str]:
        """Under which key each span was put, wherever that is now."""
        return self._keys

    def put(self, record: SpanRecord) -> None:
        """Take a complete span; on a GPU its tensors are copied to host memory."""
        self.forget([record.span])
        key = f"{self._name}-{self._count}"
        self._count += 1
        if record.keys.device.type != "cpu":
            record = replace(
                record, keys=record.keys.cpu(), values=record.values.cpu(), score=record.score.cpu()
            )
        self._keys[record.span] = key
        self.counters.add("stored")
        self.counters.add("bytes out", record.nbytes)
        self.stack.hold([key])
        self.stack.put(key, record)

    def get(self, span_id: str) -> SpanRecord | None:
        """A span's record, or None if it is lost or late."""
        key = self._keys.get(span_id)
        record = None if key is None else self.stack.get(key)
        self.counters.add("misses" if record is None else "hits")
        if record is not None:
            self.counters.add("bytes in", record.nbytes)
        return record

    def places(self) -> dict[str, str]:
        """Kind of the tier that each span is in now; lost ones are left out. Asks no store."""
        found = {span: self.stack.place(key) for span, key in self._keys.items()}
        return {span: place for span, place in found.items() if place is not None}

    def prefetch(self, span_ids: Iterable[str]) -> None:
        """Read these into host memory in the background."""
        self.stack.prefetch([self._keys[span] for span in span_ids if span in self._keys])

    def forget(self, span_ids: Iterable[str]) -> None:
        """These spans no longer exist in the session."""
        self.stack.release([self._keys.pop(span) for span in span_ids if span in self._keys])

    def fork(self) -> SpanArchive:
        """Knows the same spans; each is kept as long as one of the two knows it."""
        copy = SpanArchive(self.stack)
        copy._keys.update(self._keys)
        self.stack.hold(self._keys.values())
        return copy

    def adopt(self, keys: Mapping[str, str]) -> None:
        """Know spans that are in the tiers already; they stay for the saved session, which still names them."""
        self._keys.update(keys)
        self.stack.keep(keys.values())
        self.stack.expect(keys.values())
        self.stack.hold(keys.values())

    def describe(self) -> tuple[dict[str, str], list[SpanRecord]]:
        """What a saved session needs: keys of what outlives this process, which is kept for it, and other records."""
        keys, records = {}, []
        for span, key in self._keys.items():
            if self.stack.durable(key):
                keys[span] = key
            elif (record := self.stack.get(key, stay=True)) is not None:
                records.append(record)
        self.stack.keep(keys.values())
        return keys, records
