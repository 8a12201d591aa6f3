"""What a store of spans is: entries by key, whole or not there, and counters that tell a miss from an error."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from tenure.tiers.blob import Blob
from tenure.tiers.spec import TierSpec, shown

SESSIONS = "session:"
"""What keys of saved sessions begin with: entries that a user has asked for, and no cache."""
SOON = 0.1
"""Share of its time to live that an entry must have left to be relied on."""


@dataclass(frozen=True)
class Entry:
    """One entry of a store.

    Args:
        key: of the entry.
        nbytes: that it takes.
        age: seconds since it was written or read last.
    """

    key: str
    nbytes: int
    age: float


class Counters:
    """Counts by name, for any thread: ``hits``, ``misses``, ``errors``, ``broken``, ``timeouts``, ``written``, ..."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += count

    def to_json(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))


class Tier(ABC):
    """A store that outlives a process or is larger than memory. Calls may come from several threads.

    Args:
        spec: its options.
    """

    kind: ClassVar[str]

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.counters = Counters()

    @property
    def name(self) -> str:
        """For messages and statistics, without a password."""
        return f"{self.kind}:{shown(self.spec.where)}" if self.spec.where else self.kind

    @property
    def temporary(self) -> bool:
        """Whether the store ends with this process."""
        return False

    @abstractmethod
    def write(self, key: str, blob: Blob) -> None:
        """Store an entry whole, in place of an older one.

        Raises:
            TierError: it was not stored, and nothing of it is left to be found.
        """

    @abstractmethod
    def read(self, key: str) -> Blob | None:
        """An entry, None if there is none.

        Raises:
            BrokenError: what is there is not what was written.
            TierError: the store gave no answer.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove entries; unknown ones are passed over.

        Raises:
            TierError: the store gave no answer.
        """

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether an entry may be here, as far as this process knows; the store is not asked."""

    def holds(self, key: str) -> bool:
        """Whether an entry is here, and for some time to come; the store is asked.

        Raises:
            TierError: the store gave no answer.
        """
        return self.has(key)

    @abstractmethod
    def expect(self, keys: Iterable[str]) -> None:
        """These may be here, written by an earlier process."""

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Everything in the store, the least recently used first.

        Raises:
            TierError: the store gave no answer.
        """

    @abstractmethod
    def collect(self) -> int:
        """Remove what has expired and what broken writes have left. Returns how many entries went.

        Raises:
            TierError: the store gave no answer.
        """

    def overflow(self) -> list[str]:
        """Keys that must go for the capacity to hold, the least recently used first."""
        return []

    def close(self) -> None:  # noqa: B027  # most have nothing to give up
        """Give up connections and servers of its own."""
