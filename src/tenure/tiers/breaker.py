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
    """

    def __init__(self, name: str) -> None:
        self._name = name
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
            _LOG.warning("%s does not answer (%s); sessions go on without it", self._name, why)

    def worked(self) -> None:
        """The store has answered."""
        with self._lock:
            back, self._wait, self._until = self._wait > 0, 0.0, 0.0
        if back:
            _LOG.warning("%s answers again", self._name)
