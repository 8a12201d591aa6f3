"""Beginning a request: the session that it goes on with, in memory, brought to its conversation, its turn started."""

from __future__ import annotations

import logging
import time

from tenure.serve.answers import Answers, brought_back, session_of
from tenure.serve.errors import ApiError
from tenure.serve.events import Bus, TurnStarted
from tenure.serve.held import Held
from tenure.serve.jobs import Job, Started
from tenure.serve.reuse import adopt, useful
from tenure.serve.store import Place, Store

_log = logging.getLogger("tenure.serve")


class Starter:
    """Begins requests, used on the engine's thread alone.

    Args:
        store: of the sessions.
        answers: where their turns go.
        bus: told of every turn.
    """

    def __init__(self, store: Store, answers: Answers, bus: Bus) -> None:
        self._store = store
        self._answers = answers
        self._bus = bus

    def start(self, job: Job) -> bool:
        """Find a session and start its turn; False if the request has to wait."""
        store = self._store
        place = store.place(job)
        if place.held is not None and place.how == "continued" and place.held.busy:
            return False
        if job.n > store.slots:
            cause = f"n may be {store.slots} at most: so many sessions fit (--resident, --session-memory)"
            raise ApiError(400, "invalid_value", cause, param="n")
        if place.how == "branched" and (job.n >= store.slots or time.monotonic() > job.deadline):
            place = Place("new", None, 0)  # beside the session that it would branch from there is no room
        held = self._session_for(job, place)
        if held is None:
            return False
        try:
            before = brought_back(held)
            keep = useful(session_of(held), place.keep) if place.how == "branched" else len(held.tokens)
            cached = adopt(held, job, keep)
        except BaseException:
            if place.how != "continued":
                store.delete(held)
            raise
        held.chain, held.count = job.chain[-1] if job.chain else b"", len(job.chain)
        held.raw = job.raw
        held.priority, held.used = job.priority, time.time()
        held.changed()
        held.keep_until = max(held.keep_until, time.time() + job.ttl)
        held.key = job.key or held.key
        prompt = len(job.conversation.ids)
        queued = time.monotonic() - job.arrival
        self._answers.begin(job, held, 0, prompt, cached, before)
        job.emit(Started(held.id, prompt, cached, queued, place.how, job.hints))
        self._bus.report(
            TurnStarted(
                tenant=job.tenant,
                session=held.id,
                request=job.id,
                prompt_tokens=prompt,
                cached_tokens=cached,
                queued=queued,
                how=place.how,
            )
        )
        return True

    def _session_for(self, job: Job, place: Place) -> Held | None:
        store, held = self._store, place.held
        if held is not None and place.how == "continued":
            if not store.make_room(job.n - (held.session is not None), leave=held):
                return None
            return held if self._bring_back(held, job) else None
        if held is None:
            return store.open(job) if store.make_room(job.n) else None
        if not store.make_room(job.n + (held.session is None), leave=held):
            return None
        if not self._bring_back(held, job):
            return None
        return store.fork(held, instead=True)

    def _bring_back(self, held: Held, job: Job) -> bool:
        """Bring a parked session into memory; False where the request has to look for another one."""
        try:
            self._store.bring_back(held)
        except ApiError as error:
            if not held.foreign or job.session is not None:
                raise
            _log.warning("a stored session is left alone: %s", error)
            self._answers.freed = True
            return False
        return True
