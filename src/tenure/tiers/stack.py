"""The tiers of an engine as one store: whole spans go down when a tier is full and come up when they are asked for.

Records are put into host memory. What host memory cannot hold is written to the next tier in the background, what that
cannot hold moves on to the one below. A record is found again wherever it is, on its way down too. What was read from
below is kept in host memory; its copy below stays, so that it can leave host memory again without being written.
"""

from __future__ import annotations

import logging
import threading
import time
from _thread import start_new_thread  # threading's own takes a lock
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as TimeOut
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tenure.errors import ConfigError
from tenure.tiers.base import Counters, Tier
from tenure.tiers.blob import Blob, BrokenError
from tenure.tiers.codec import decode, encode
from tenure.tiers.disk import DiskTier
from tenure.tiers.host import HostTier
from tenure.tiers.record import SpanRecord
from tenure.tiers.spec import TierSpec, parse_tiers
from tenure.tiers.store import Store
from tenure.tiers.valkey import ValkeyTier

_LOG = logging.getLogger("tenure.tiers")

_ON_THE_WAY = 256 << 20
"""Bytes that may wait to be written; a store that is slower than the session loses what is over it."""


class _Coming(NamedTuple):
    """A read under way, the first store that it asks, when it was begun, and whether nobody waits for it yet."""

    future: Future[SpanRecord | None]
    store: Store
    asked: float
    ahead: bool


class TierStack:
    """Host memory and the stores below it. Safe for several threads.

    Args:
        specs: from the fastest to the slowest, host memory first.
        fingerprint: digest of what keys and values are bound to.
    """

    def __init__(self, specs: Sequence[TierSpec], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.counters = Counters()
        self.host = HostTier(specs[0])
        self.stores = [Store(open_tier(spec)) for spec in specs[1:]]
        self._lock = threading.RLock()  # a read that is taken back reports it in the same thread
        self._leaving: dict[str, SpanRecord] = {}
        """Records that left host memory and are not written yet."""
        self._coming: dict[str, _Coming] = {}
        self._holders: Counter[str] = Counter()
        """How many archives know a key."""
        self._kept: set[str] = set()
        """Keys that a saved session names."""
        self._stale: set[str] = set()
        """Keys that no archive knows any more, and that a store may still have."""
        self._ended: deque[Iterable[str]] = deque()
        """Keys of archives that are gone, until the next call."""

    @classmethod
    def of(cls, texts: Iterable[str], fingerprint: str) -> TierStack:
        """Tiers as options name them.

        Raises:
            ConfigError: one cannot be used.
        """
        specs = parse_tiers(texts)
        if not specs:
            raise ConfigError("no tier is named", option="tiers", way_out="Give host:1GiB for example")
        return cls(specs, fingerprint)

    # -- records ---------------------------------------------------------------------------------

    def put(self, key: str, record: SpanRecord) -> None:
        """Take a record; what has to leave host memory for it is written in the background."""
        self.counters.add("put")
        self._settle()
        self._admit(key, record)

    def get(self, key: str, *, stay: bool = False) -> SpanRecord | None:
        """A record, after a wait for a store's time-out at most; None if it is lost or late.

        Args:
            key: of the record.
            stay: leave it where it is, so that nothing has to make room for it in host memory.
        """
        record = self._here(key)
        if record is not None:
            self.counters.add("hits")
            return record
        coming = self._fetch(key, stay=stay)
        if coming is not None:
            record = self._wait(coming)
        self.counters.add("misses" if record is None else "hits")
        return record

    def prefetch(self, keys: Iterable[str]) -> None:
        """Have records read into host memory in the background."""
        self._settle()
        for key in keys:
            if self._here(key) is None:
                self._fetch(key, ahead=True)

    def hold(self, keys: Iterable[str]) -> None:
        """One more archive knows these keys."""
        with self._lock:
            self._holders.update(keys)

    def keep(self, keys: Iterable[str]) -> None:
        """Leave these in the stores when no archive knows them any more: a later process will."""
        with self._lock:
            self._kept.update(keys)

    def expect(self, keys: Iterable[str]) -> None:
        """These may be in a store, from an earlier process."""
        keys = list(keys)
        for store in self.stores:
            store.tier.expect(keys)

    def release(self, keys: Iterable[str]) -> None:
        """One archive fewer knows these keys; what none knows is removed everywhere."""
        with self._lock:
            for key in keys:
                self._holders[key] -= 1
                if self._holders[key] <= 0:
                    del self._holders[key]
                    self._leaving.pop(key, None)
                    self._coming.pop(key, None)
                    self.host.pop(key)
                    if self.stores and key not in self._kept:
                        self._stale.add(key)
            stale = bool(self._stale)
        if stale:
            self.stores[0].later(self._remove_stale)  # or at the end, where there is no later

    def ended(self, keys: Iterable[str]) -> None:
        """An archive is gone, and the next call releases its keys.

        Safe in a finalizer: one may run in the middle of any line here, with any lock held, so it takes none.
        """
        self._ended.append(keys)

    def stored(self, key: str) -> bool:
        """Whether a store has the record."""
        return any(store.tier.has(key) for store in self.stores)

    def durable(self, key: str) -> bool:
        """Whether a store that outlives this process has the record; they are asked."""
        return any(store.holds(key) for store in self.stores if not store.tier.temporary)

    def place(self, key: str) -> str | None:
        """Kind of the tier that a record is in, as far as this process knows; None if it is lost."""
        with self._lock:
            here = key in self._leaving or key in self.host
        if here:
            return self.host.kind
        return next((store.tier.kind for store in self.stores if store.tier.has(key)), None)

    # -- other entries ---------------------------------------------------------------------------

    @property
    def last(self) -> Store | None:
        """The tier that is shared most widely, of those that outlive this process: where named sessions are saved."""
        return next((store for store in reversed(self.stores) if not store.tier.temporary), None)

    # -- all of it -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and sizes: of the stack, and of each tier."""
        self._settle()
        tiers = [
            {
                "tier": self.host.name,
                "entries": len(self.host),
                "nbytes": self.host.nbytes,
                "capacity": self.host.spec.capacity,
                **self.host.counters.to_json(),
            }
        ]
        for store in self.stores:
            tier = store.tier
            known = {"nbytes": tier.nbytes} if isinstance(tier, DiskTier) else {}
            tiers.append(
                {"tier": tier.name, **known, "capacity": tier.spec.capacity, **tier.counters.to_json()}
            )
        return {**self.counters.to_json(), "tiers": tiers}

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that is on its way down has arrived or was given up."""
        self._settle()
        for store in self.stores:
            done = store.later(lambda: None)
            if done is not None:
                done.result(timeout)

    def close(self) -> None:
        """Finish what is under way, remove what no saved session names, and give everything up."""
        self._settle()
        with self._lock:
            self._stale.update(key for key in self._holders if key not in self._kept)
            self._holders.clear()
            self._leaving.clear()
        for store in self.stores:
            store.stop()
        self._remove_stale()
        for store in self.stores:
            store.tier.close()

    def abandon(self) -> None:
        """:meth:`close` for a finalizer, which may run in the middle of any call with any lock held: a thread does it.

        At the end of the process nothing is in the middle of anything, and nobody would wait for that thread.
        """
        if threading.main_thread().is_alive():
            start_new_thread(self.close, ())
        else:
            self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Release what archives knew that are gone by now."""
        while self._ended:
            with suppress(IndexError):  # another thread was faster
                self.release(list(self._ended.popleft()))

    def _remove_stale(self) -> None:
        """Remove what nobody knows. In the thread of all writes and moves, so that none of them is under way."""
        with self._lock:
            stale, self._stale = self._stale, set()
        for store in self.stores:
            if store.closed and store.tier.temporary:
                continue
            here = [key for key in stale if store.tier.has(key)]
            if here and not store.delete(here):
                with self._lock:
                    self._stale.update(here)

    def _here(self, key: str) -> SpanRecord | None:
        with self._lock:
            record = self._leaving.get(key)
            return self.host.get(key) if record is None else record

    def _admit(self, key: str, record: SpanRecord, *, read: bool = False) -> None:
        """Take a record into host memory. One that was read is not taken up if it was forgotten meanwhile."""
        with self._lock:
            if read and key not in self._coming:
                return
            gone = self.host.put(key, record)
            if read:  # one that is too large was read off a store just now
                gone = [one for one in gone if one[0] != key]
            left = [old for old, one in gone if self._demoted(old, one)]
        for old in left:
            if self.stores[0].later(partial(self._write, old)) is None:  # it is closed
                with self._lock:
                    self._leaving.pop(old, None)
                self.counters.add("lost")

    def _demoted(self, key: str, record: SpanRecord) -> bool:
        """Whether a record that left host memory waits to be written, unless a store turns out to have it."""
        self.host.counters.add("demoted")
        waiting = sum(one.nbytes for one in self._leaving.values())
        if not self.stores or (waiting and waiting + record.nbytes > _ON_THE_WAY):
            if not self.stored(key):
                self.counters.add("lost")
            return False
        self._leaving[key] = record
        return True

    def _write(self, key: str) -> None:
        """Write a record that left host memory to the first store that takes it, if none has it."""
        with self._lock:
            record = self._leaving.get(key)
        if record is None:
            return  # nobody knows it any more
        done = any(store.holds(key) for store in self.stores) or any(
            self._written(store, key, record) for store in self.stores
        )
        with self._lock:
            self._leaving.pop(key, None)
        if not done:
            self.counters.add("lost")
        self._make_room()

    def _written(self, store: Store, key: str, record: SpanRecord) -> bool:
        """Whether a store has taken a record. Never raises: nobody looks at what becomes of a write."""
        try:
            return store.write(key, encode(key, record, self.fingerprint, store.tier.spec.codec))
        except Exception as error:
            store.tier.counters.add("write errors")
            _LOG.warning("%s: a span was not written (%s: %s)", store.tier.name, type(error).__name__, error)
            return False

    def make_room(self) -> None:
        """Move on, in the background, what has become too much for a store."""
        for store in self.stores[:1]:
            store.later(self._make_room)

    def _make_room(self) -> None:
        self._remove_stale()
        for number, store in enumerate(self.stores):
            for key in store.tier.overflow():
                below = self.stores[number + 1 : number + 2]
                blob = store.read(key) if below and not below[0].holds(key) else None
                moved = blob is not None and below[0].write(key, blob)
                if store.delete([key]):
                    store.tier.counters.add("demoted" if moved else "evicted")
            store.tidy()

    def _wait(self, coming: _Coming) -> SpanRecord | None:
        """What comes, within the store's time-out since it was asked for: several reads wait at the same time."""
        start = time.monotonic()
        left = coming.asked + coming.store.tier.spec.timeout - start
        try:
            return coming.future.result(0 if coming.store.breaker.resting else max(0.0, left))
        except TimeOut:
            self.counters.add("timeouts")
            if not (coming.store.breaker.resting or coming.store.answered_since(coming.asked)):
                coming.store.breaker.failed("time-out")
            return None
        except CancelledError:  # the stack is closed
            return None
        finally:
            self.counters.add("waited ms", round(1e3 * (time.monotonic() - start)))

    def _fetch(self, key: str, *, stay: bool = False, ahead: bool = False) -> _Coming | None:
        """The read of a record, under way or new; None where no store can have it."""
        with self._lock:
            coming = self._coming.get(key)
            # One that is wanted now does not wait its turn behind those that are not.
            if coming is not None and (ahead or not coming.ahead or not coming.future.cancel()):
                return coming
            first = next((store for store in self.stores if self._may_have(store, key)), None)
            if first is None:
                return None
            future = first.reading(partial(self._read, key, stay), ahead=ahead)
            if future is None:
                return None
            coming = self._coming[key] = _Coming(future, first, time.monotonic(), ahead)
        if ahead:
            self.counters.add("prefetched")
        future.add_done_callback(lambda _: self._arrived(key, coming))
        return coming

    def _arrived(self, key: str, coming: _Coming) -> None:
        with self._lock:
            if self._coming.get(key) is coming:
                del self._coming[key]

    def _read(self, key: str, stay: bool) -> SpanRecord | None:
        for store in self.stores:
            if not self._may_have(store, key):
                continue
            blob = store.read(key)
            record = None if blob is None else self._decode(store, key, blob)
            store.tier.counters.add("misses" if record is None else "hits")
            if record is not None:
                if not stay:
                    self._admit(key, record, read=True)
                return record
        return None

    @staticmethod
    def _may_have(store: Store, key: str) -> bool:
        return store.tier.has(key) and not store.breaker.resting

    def _decode(self, store: Store, key: str, blob: Blob) -> SpanRecord | None:
        try:
            return decode(blob, key, self.fingerprint)
        except BrokenError:
            store.tier.counters.add("broken")
            return None


def open_tier(spec: TierSpec) -> Tier:
    """The store of a spec; see :class:`DiskTier` and :class:`ValkeyTier`."""
    return DiskTier(spec) if spec.kind == "disk" else ValkeyTier(spec)
