"""The server's sessions: which one a request goes on with, which are in memory, which are parked.

All of this lives on the engine's thread. The list for ``/v1/sessions`` is read by calling there.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from tenure.config import SessionConfig
from tenure.errors import ConfigError
from tenure.serve.errors import ApiError
from tenure.serve.events import Bus, SessionChanged, Traffic
from tenure.serve.held import Held
from tenure.serve.parked import no_room, read_parked
from tenure.serve.parking import options_of
from tenure.serve.reuse import shared, useful

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig
    from tenure.serve.jobs import Job
    from tenure.serve.parking import Parking
    from tenure.session import Session

_log = logging.getLogger("tenure.serve")

_DEFAULTS = options_of(SessionConfig())
_WORTH = 32
"""Tokens of another conversation's start that are worth a fork; our choice."""


class Place(NamedTuple):
    """Where a request goes on: in a session as it is, in a fork of it, or in a new one."""

    how: Literal["new", "continued", "branched"]
    held: Held | None
    keep: int
    """Tokens of it that are used."""


class Store:
    """Sessions of all tenants.

    Args:
        engine: whose sessions.
        config: of the server.
        parking: where sessions go that are not in memory.
        bus: told of every change.
        slots: sessions that may be in memory at once.
    """

    def __init__(self, engine: Engine, config: ServeConfig, parking: Parking, bus: Bus, slots: int) -> None:
        self.engine = engine
        self.config = config
        self.parking = parking
        self.bus = bus
        self.slots = slots
        self._options = options_of(config.session)
        self.reserved = 0
        """Room that is promised already."""
        self._held: dict[tuple[str, str], Held] = {}
        for held in parking.found():
            self._held[held.tenant, held.id] = held

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def of(self, tenant: str) -> list[Held]:
        """A tenant's sessions, the last used first."""
        mine = [held for held in self._held.values() if held.tenant == tenant and not held.temporary]
        return sorted(mine, key=lambda held: -held.used)

    def get(self, tenant: str, session: str) -> Held:
        """A tenant's session.

        Raises:
            ApiError: 404; other tenants' sessions do not exist for it.
        """
        held = self._held.get((tenant, session))
        if held is None or held.temporary:
            raise ApiError(404, "session_not_found", "there is no such session", param="session_id")
        return held

    @property
    def resident(self) -> int:
        """Sessions in memory."""
        return sum(held.session is not None for held in self._held.values())

    # -- finding ---------------------------------------------------------------------------------

    def place(self, job: Job) -> Place:
        """Where a request goes on.

        A session that the client names is used as it is. Otherwise the longest common start of token ids decides. A
        conversation that goes on from the messages a session has answered continues in it, and so does a raw text that
        begins with all of a session's; one that was edited, or that only begins alike, gets a fork, and the session
        stays.
        """
        if job.session is not None:
            named = self._held.get((job.tenant, job.session))
            if named is None:
                return Place("new", None, 0)
            return Place("continued", named, shared(named.tokens, job.wanted))
        best, most = None, 0
        for held in self._held.values():
            if held.tenant != job.tenant or held.salt != job.salt or held.temporary or held.foreign:
                continue
            common = shared(held.tokens, job.wanted)
            rank = (common, self._goes_on(held, job, common), held.key == job.key, not held.busy, held.used)
            if best is None or rank > best[0]:
                best, most = (rank, held), common
        if best is None:
            return Place("new", None, 0)
        held = best[1]
        if self._goes_on(held, job, most) and not held.busy:
            return Place("continued", held, most)
        if held.session is not None:
            most = useful(held.session, most)
        elif self._differs(held):
            most = 0
        return Place("branched", held, most) if most >= _WORTH else Place("new", None, 0)

    @staticmethod
    def _goes_on(held: Held, job: Job, common: int) -> bool:
        if job.raw and held.raw and 0 < common == len(held.tokens):
            return True
        return 0 < held.count <= len(job.chain) and job.chain[held.count - 1] == held.chain

    # -- making room -----------------------------------------------------------------------------

    def make_room(self, wanted: int, *, leave: Held | None = None) -> bool:
        """Park idle sessions until ``wanted`` more fit; False, with nothing changed, where too many are busy.

        Raises:
            ApiError: 503; sessions that would have to go could not be stored.
        """
        idle = [
            held
            for held in self._held.values()
            if held.session is not None and not held.busy and held is not leave and not held.temporary
        ]
        needed = self.resident + self.reserved + wanted - self.slots
        if needed > len(idle):
            return False
        now = time.time()
        failed: ApiError | None = None
        idle.sort(key=lambda held: (held.failed is not None, held.keep_until > now, held.priority, held.used))
        for held in idle:
            if needed <= 0:
                break
            try:
                self.park(held)
                needed -= 1
            except ApiError as error:
                failed = error
        if needed > 0 and failed is not None:
            raise failed
        return needed <= 0

    def save(self, held: Held) -> None:
        """Store a session that stays in memory.

        Raises:
            ApiError: 503; it could not be stored.
        """
        begun = time.perf_counter()
        try:
            nbytes = self.parking.store(held)
        except Exception as error:
            self._traffic(held, "out", "error", begun)
            held.failed = held.turns
            _log.error("a session could not be stored: %s", error)
            raise ApiError(
                503, "not_stored", "a session could not be stored; it stays in memory", retry_after=10
            ) from error
        held.stored()
        self._traffic(held, "out", "stored", begun, nbytes)

    def park(self, held: Held) -> None:
        """Move a session out of memory.

        Raises:
            ApiError: 503; it could not be stored and stays in memory.
        """
        session = held.session
        if session is None:
            return
        if held.dirty:
            self.save(held)
        held.ids = array("I", session.memory.ids)
        held.session = None
        session.close()
        self._report(held, "parked")

    def bring_back(self, held: Held, *, again: bool = True) -> None:
        """Move a parked session into memory; there must be room.

        What is missing or broken is computed again, and so is a session of other options than the server's: it is then
        empty, and the request says so. Where the reason lies outside, what was stored stays as it is.

        Args:
            held: the session.
            again: whether a request follows that brings its whole conversation.

        Raises:
            ApiError: 409, another model made it, or ``again`` is false and it has other options or is missing or broken;
                503, it cannot be read now.
        """
        if held.session is not None:
            return
        begun = time.perf_counter()
        other, session = self._differs(held), None
        if not other:
            try:
                session = read_parked(self.parking, held)
            except ApiError:
                self._traffic(held, "in", "error", begun)
                raise
        if session is not None and options_of(session.config) != self._options:
            session.close()
            session, other = None, True
        if other and not again:
            raise ApiError(
                409,
                "session_incompatible",
                "the session was stored with other options than the server's (budget, policy, ...): the next request "
                "with its whole conversation computes it again. Send that, or serve with its options",
                param="session_id",
            )
        if session is None and not other and not again:
            self._traffic(held, "in", "error", begun)
            raise ApiError(
                409,
                "session_broken",
                "what was stored of the session is missing, damaged or of another format: the next request with its "
                "whole conversation computes it again",
                param="session_id",
            )
        outcome = "hit" if session is not None else "miss" if other else "error"
        self._traffic(held, "in", outcome, begun, 0 if session is None else session.memory.rows.nbytes)
        if session is None:
            session = self._made()
            held.changed()
        held.session = session
        held.ids = array("I")
        self._report(held, "restored")

    def _differs(self, held: Held) -> bool:
        """Whether a parked session is known to have other options than the server's."""
        if held.session is not None or held.options is None:
            return False
        return {**_DEFAULTS, **held.options} != self._options  # an earlier version may have had fewer

    def _made(self) -> Session:
        try:
            return self.engine.session(self.config.session)
        except ConfigError as error:
            if error.option != "budget":
                raise
            raise no_room(error) from error

    def _traffic(self, held: Held, direction: str, outcome: str, begun: float, nbytes: int = 0) -> None:
        self.bus.report(
            Traffic(
                tenant=held.tenant,
                session=held.id,
                tier="sessions",
                direction=direction,
                outcome=outcome,
                nbytes=nbytes,
                seconds=time.perf_counter() - begun,
            )
        )

    # -- making and ending -----------------------------------------------------------------------

    def open(self, job: Job) -> Held:
        """A new session for a request.

        Raises:
            ApiError: 409, 429 or 503.
        """
        held = Held(_name(job.session), job.tenant, job.salt, job.key, named=job.session is not None)
        self._check_new(held)
        held.session = self._made()
        self._add(held)
        self._report(held, "opened")
        return held

    def fork(
        self, source: Held, *, session: str | None = None, temporary: bool = False, instead: bool = False
    ) -> Held:
        """A copy of a session that is in memory.

        Args:
            source: the session.
            session: id of the copy; a free one if None.
            temporary: it ends with its turn.
            instead: where the tenant has no other session to give up for it, the source goes.

        Raises:
            ApiError: 409 or 429.
        """
        if source.session is None:
            raise ApiError(500, "internal_error", "a parked session cannot be forked")
        held = Held(_name(session), source.tenant, source.salt, source.key, named=session is not None)
        held.temporary = temporary
        self._check_new(held, source, instead=instead)
        held.session = source.session.fork()
        held.chain, held.count, held.turns = source.chain, source.count, source.turns
        held.raw = source.raw
        self._add(held, source)
        self._report(held, "forked")
        return held

    def delete(self, held: Held) -> None:
        """Forget a session, in memory and in the tier."""
        self._held.pop((held.tenant, held.id), None)
        if held.session is not None:
            held.session.close()
            held.session = None
        if not held.temporary:
            self.parking.forget(held)
            self._report(held, "deleted")

    def _add(self, held: Held, source: Held | None = None) -> None:
        """Enter a session that has been made; beyond the tenant's limit the one that was used longest ago goes."""
        if not held.temporary and len(self.of(held.tenant)) >= self.config.max_sessions:
            self.delete(min(self._spare(held.tenant), key=lambda one: (one is source, one.used)))
        self._held[held.tenant, held.id] = held
        held.changed()

    def _check_new(self, held: Held, source: Held | None = None, *, instead: bool = False) -> None:
        """Refuse a session that could not be entered, before it is made."""
        if (held.tenant, held.id) in self._held:
            raise ApiError(409, "session_exists", "there is a session of this id already", param="session_id")
        many = len(self.of(held.tenant))
        if held.temporary or many < self.config.max_sessions:
            return
        if not any(instead or one is not source for one in self._spare(held.tenant)):
            raise ApiError(
                429,
                "too_many_sessions",
                f"this key keeps {many} sessions, the limit is {self.config.max_sessions}",
                retry_after=60,
            )

    def _spare(self, tenant: str) -> list[Held]:
        return [held for held in self.of(tenant) if not held.busy and not held.named]

    def _report(self, held: Held, change: str) -> None:
        if not held.temporary:
            self.bus.report(SessionChanged(tenant=held.tenant, session=held.id, change=change))


def _name(session: str | None) -> str:
    return session or f"sess_{secrets.token_hex(12)}"
