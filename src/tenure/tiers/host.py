"""Records in host memory: the fastest tier, and the staging place of all others."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tenure.tiers.base import Counters
from tenure.tiers.record import SpanRecord
from tenure.tiers.spec import TierSpec


class HostTier:
    """Records by key, the least recently used first to go. Safe for several threads.

    Args:
        spec: its options; ``capacity`` counts keys and values.
    """

    kind = "host"

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.counters = Counters()
        self.nbytes = 0
        self._records: OrderedDict[str, SpanRecord] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """For messages and statistics."""
        return self.kind

    def put(self, key: str, record: SpanRecord) -> list[tuple[str, SpanRecord]]:
        """Take a record.

        Returns:
            Those that had to leave for it, the least recently used first; the record alone if it is too large.
        """
        capacity = self.spec.capacity or 0
        left = []
        with self._lock:
            self._pop(key)
            if record.nbytes > capacity:
                return [(key, record)]
            self._records[key] = record
            self.nbytes += record.nbytes
            while self.nbytes > capacity:
                old = next(iter(self._records))
                gone = self._pop(old)
                if gone is not None:
                    left.append((old, gone))
        return left

    def get(self, key: str) -> SpanRecord | None:
        """A record, which is from now on the most recently used."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self._records.move_to_end(key)
            return record

    def pop(self, key: str) -> None:
        """Remove a record, if it is here."""
        with self._lock:
            self._pop(key)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def _pop(self, key: str) -> SpanRecord | None:
        record = self._records.pop(key, None)
        if record is not None:
            self.nbytes -= record.nbytes
        return record
