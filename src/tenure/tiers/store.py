"""A tier behind threads of its own: a store that stalls keeps nobody waiting longer than its time-out.

Writes are done one after the other by one thread, reads by a few; those that nobody waits for yet have threads of their
own, so that they are in nobody's way. Whoever waits for a read gives up after the tier's time-out and takes it for a
miss; the breaker then keeps further ones away. A store that is full is still read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tenure.errors import TierError
from tenure.kernels.threads import compute_alone
from tenure.tiers.base import Tier
from tenure.tiers.blob import Blob, BrokenError, RefusedError, TooLargeError
from tenure.tiers.breaker import Breaker
from tenure.tiers.disk import DiskTier

T = TypeVar("T")

_READERS = 4
_TIDY = 600.0
"""Seconds between two looks for what has expired."""


class Store:
    """A tier, its breaker and its threads.

    Args:
        tier: what is asked.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.breaker = Breaker(tier.name)
        self._room = Breaker(tier.name, fails="takes nothing more", works="takes entries again")
        self._writer = ThreadPoolExecutor(1, f"tenure-{tier.kind}-write", compute_alone)
        self._readers = ThreadPoolExecutor(_READERS, f"tenure-{tier.kind}-read", compute_alone)
        self._ahead = ThreadPoolExecutor(_READERS, f"tenure-{tier.kind}-ahead", compute_alone)
        # A server removes by itself what has expired; in a folder it has waited for the first write.
        self._tidied = time.monotonic() - (_TIDY if isinstance(tier, DiskTier) else 0.0)
        self._closed = threading.Event()
        self._answered = 0.0

    def write(self, key: str, blob: Blob) -> bool:
        """Store an entry, in this thread. False where it was not stored; never raises for trouble of the store."""
        if not self._room.admits():
            self.tier.counters.add("skipped")
            return False
        done = self._ask("write", lambda: (self.tier.write(key, blob), True)[1])
        if done:
            self._room.worked()
            self.tier.counters.add("written")
            self.tier.counters.add("bytes written", blob.nbytes)
        return bool(done)

    def read(self, key: str) -> Blob | None:
        """An entry, in this thread. None where there is none; never raises for trouble of the store."""
        blob = self._ask("read", lambda: self.tier.read(key))
        if blob is not None:
            self.tier.counters.add("bytes read", blob.nbytes)
        return blob

    def delete(self, keys: Iterable[str]) -> bool:
        """Remove entries, in this thread. False where the store was not asked or gave no answer."""
        return bool(self._ask("delete", lambda: (self.tier.delete(keys), True)[1]))

    def holds(self, key: str) -> bool:
        """Whether an entry is here, in this thread; as far as this process knows where the store gives no answer."""
        if not self.tier.has(key):
            return False
        answer = self._ask("look", lambda: self.tier.holds(key))
        return self.tier.has(key) if answer is None else answer

    def later(self, work: Callable[[], None]) -> Future[None] | None:
        """Have the writing thread do something; None if there is none any more."""
        return self._submit(self._writer, work)

    def reading(self, work: Callable[[], T], *, ahead: bool) -> Future[T] | None:
        """Have a reading thread do something, ``ahead`` of when it is asked for; None if there is none any more."""
        return self._submit(self._ahead if ahead else self._readers, work)

    def answered_since(self, moment: float) -> bool:
        """Whether it has answered something within its time-out since a moment of ``time.monotonic()``.

        If so, a read that is late has waited for others, and the store does not stall.
        """
        return self._answered >= moment

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    def tidy(self) -> None:
        """Remove what has expired, now and then, in this thread."""
        now = time.monotonic()
        if now - self._tidied >= _TIDY:
            self._tidied = now
            gone = self._ask("collect", self.tier.collect)
            self.tier.counters.add("expired", gone or 0)

    def stop(self) -> None:
        """Finish what was begun, drop what was not, and end the threads; calls in one's own thread still work."""
        self._closed.set()
        for pool in (self._writer, self._readers, self._ahead):
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T] | None:
        if self.closed:
            return None
        try:
            return pool.submit(work)
        except RuntimeError:  # the interpreter is about to end
            return None

    def _ask(self, what: str, call: Callable[[], T]) -> T | None:
        counters = self.tier.counters
        if not self.breaker.admits():
            counters.add("skipped")
            return None
        answer: T | None
        start = time.monotonic()
        try:
            answer = call()
        except BrokenError:
            counters.add("broken")
            return None
        except TooLargeError:
            counters.add("too large")
            answer = None
        except RefusedError as error:
            counters.add(f"{what} errors")
            self._room.failed(error.cause)
            answer = None
        except TierError as error:
            counters.add(f"{what} errors")
            self.breaker.failed(error.cause)
            return None
        now = time.monotonic()
        if now - start < self.tier.spec.timeout:
            self._answered = now
        self.breaker.worked()
        return answer
