"""Leaves a store alone for a while after it has failed: a dead one then costs a turn nothing."""

from __future__ import annotations

import logging
import threading
import time

_LOG = logging.getLogger("tenure.tiers")

_FIRST, _MOST = 0.5, 30.0
"""Seconds until the first new try and at most; doubled with each failure."""


class Breaker:
    """Says whether a store may be asked. One warning for each time that it goes, one line when it is back.

    Args:
        name: of the store.
        fails: what it does not do where it fails, for the log.
        works: what it does again.
    """

    def __init__(self, name: str, *, fails: str = "does not answer", works: str = "answers again") -> None:
        self._name, self._fails, self._works = name, fails, works
        self._lock = threading.Lock()
        self._wait = 0.0
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether the store is left alone for now."""
        with self._lock:
            return time.monotonic() < self._until

    def admits(self) -> bool:
        """Whether the store may be asked now. After a rest one caller at a time tries it again."""
        with self._lock:
            if not self._wait:
                return True
            now = time.monotonic()
            if now < self._until:
                return False
            self._until = now + self._wait
            return True

    def failed(self, why: object) -> None:
        """The store has not answered."""
        with self._lock:
            first = not self._wait
            self._wait = min(_MOST, max(_FIRST, 2 * self._wait))
            self._until = time.monotonic() + self._wait
        if first:
            _LOG.warning("%s %s (%s); sessions go on without it", self._name, self._fails, why)

    def worked(self) -> None:
        """The store has answered."""
        with self._lock:
            back, self._wait, self._until = self._wait > 0, 0.0, 0.0
        if back:
            _LOG.warning("%s %s", self._name, self._works)
