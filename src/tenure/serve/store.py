"""The server's sessions: which one a request goes on with, which are in memory, which are parked.

All of this lives on the engine's thread. The list for ``/v1/sessions`` is read by calling there.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from tenure.errors import BudgetError, MessageError, SaveError, TenureError
from tenure.serve.errors import ApiError
from tenure.serve.events import Bus, SessionChanged, Traffic
from tenure.serve.held import Held

if TYPE_CHECKING:
    from tenure.conversation import Conversation
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig
    from tenure.serve.jobs import Job
    from tenure.serve.parking import Parking
    from tenure.session import Session

_log = logging.getLogger("tenure.serve")

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
        conversation that goes on from the messages a session has answered continues in it; one that was edited, or
        that only begins alike, gets a fork, and the session stays.
        """
        if job.session is not None:
            named = self._held.get((job.tenant, job.session))
            if named is None:
                return Place("new", None, 0)
            return Place("continued", named, shared(named.tokens, job.wanted))
        best, most = None, 0
        for held in self._held.values():
            if held.tenant != job.tenant or held.salt != job.salt or held.temporary:
                continue
            common = shared(held.tokens, job.wanted)
            rank = (common, self._goes_on(held, job), held.key == job.key, not held.busy, held.used)
            if best is None or rank > best[0]:
                best, most = (rank, held), common
        if best is None:
            return Place("new", None, 0)
        held = best[1]
        if self._goes_on(held, job) and not held.busy:
            return Place("continued", held, most)
        if held.session is not None:
            most = useful(held.session, most)
        return Place("branched", held, most) if most >= _WORTH else Place("new", None, 0)

    @staticmethod
    def _goes_on(held: Held, job: Job) -> bool:
        return 0 < held.count <= len(job.chain) and job.chain[held.count - 1] == held.chain

    # -- making room -----------------------------------------------------------------------------

    def make_room(self, wanted: int, *, leave: Held | None = None) -> bool:
        """Park idle sessions until ``wanted`` more fit; False, with nothing lost, where too many are busy."""
        while self.resident + self.reserved + wanted > self.slots:
            idle = [
                held
                for held in self._held.values()
                if held.session is not None and not held.busy and held is not leave and not held.temporary
            ]
            if not idle:
                return False
            now = time.time()
            self.park(min(idle, key=lambda held: (held.keep_until > now, held.priority, held.used)))
        return True

    def save(self, held: Held) -> None:
        """Store a session that stays in memory.

        Raises:
            TenureError: it could not be stored.
        """
        begun = time.perf_counter()
        try:
            nbytes = self.parking.store(held)
        except BaseException:
            self._traffic(held, "out", "error", begun)
            raise
        held.dirty = False
        self._traffic(held, "out", "stored", begun, nbytes)

    def park(self, held: Held) -> None:
        """Move a session out of memory.

        Raises:
            TenureError: it could not be stored; it stays in memory.
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

    def bring_back(self, held: Held) -> None:
        """Move a parked session into memory; there must be room.

        What a tier has lost or broken is computed again: the session is then empty, and the request says so.
        """
        if held.session is not None:
            return
        begun = time.perf_counter()
        try:
            held.session = self.parking.load(held)
            self._traffic(held, "in", "hit", begun, held.session.memory.rows.nbytes)
        except TenureError as error:
            _log.warning("a parked session could not be read: %s", type(error).__name__)
            self._traffic(held, "in", "error" if isinstance(error, SaveError) else "miss", begun)
            held.session = self.engine.session(self.config.session)
            held.dirty = True
        held.ids = array("I")
        self._report(held, "restored")

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

    def open(self, job: Job, *, temporary: bool = False) -> Held:
        """A new session for a request."""
        held = self._add(job.tenant, None if temporary else job.session, job.salt, job.key)
        held.temporary = temporary
        held.session = self.engine.session(self.config.session)
        held.dirty = True
        self._report(held, "opened")
        return held

    def fork(self, source: Held, *, session: str | None = None, temporary: bool = False) -> Held:
        """A copy of a session that is in memory."""
        if source.session is None:
            raise ApiError(500, "internal_error", "a parked session cannot be forked")
        held = self._add(source.tenant, session, source.salt, source.key)
        held.temporary = temporary
        held.session = source.session.fork()
        held.chain, held.count, held.turns = source.chain, source.count, source.turns
        held.dirty = True
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

    def _add(self, tenant: str, session: str | None, salt: str, key: str) -> Held:
        mine = [held for held in self._held.values() if held.tenant == tenant and not held.temporary]
        if len(mine) >= self.config.max_sessions:
            idle = [held for held in mine if not held.busy and not held.named]
            if not idle:
                raise ApiError(
                    429,
                    "too_many_sessions",
                    f"this key keeps {len(mine)} sessions, the limit is {self.config.max_sessions}",
                    retry_after=60,
                )
            self.delete(min(idle, key=lambda held: held.used))
        name = session or f"sess_{secrets.token_hex(12)}"
        if (tenant, name) in self._held:
            raise ApiError(409, "session_exists", "there is a session of this id already", param="session_id")
        held = Held(name, tenant, salt, key, named=session is not None)
        self._held[tenant, name] = held
        return held

    def _report(self, held: Held, change: str) -> None:
        if not held.temporary:
            self.bus.report(SessionChanged(tenant=held.tenant, session=held.id, change=change))


def shared(tokens: array[int], wanted: np.ndarray[Any, np.dtype[np.uint32]]) -> int:
    """Length of the common start of a session's ids and of those that are wanted; compares in place."""
    size = min(len(tokens), len(wanted))
    if not size or tokens[0] != wanted[0]:
        return 0
    differ = np.frombuffer(tokens, dtype=np.uint32, count=size) != wanted[:size]
    first = int(differ.argmax())
    return first if differ[first] else size


def useful(session: Session, keep: int) -> int:
    """Tokens of a session that a fork should keep, of ``keep`` that it could.

    Where less than half is shared it is another conversation, and what this one has evicted of the shared start would
    be missed there.
    """
    return keep if keep >= len(session) // 2 else min(keep, intact(session))


def intact(session: Session) -> int:
    """Tokens from the start on of which every row is in memory."""
    ledger = session.memory.ledger
    logical = ledger.logical[:, : ledger.rows]
    same = (logical == torch.arange(ledger.rows, device=logical.device)).all(0)
    return int(same.long().cumprod(0).sum())


def adopt(held: Held, job: Job, keep: int) -> int:
    """Bring a session to a request's conversation, using ``keep`` of its tokens at most.

    Marks that the session cannot take (a step's reads that do not fit, a span's id that it has already, pins on top of
    its own) are given up: they are hints.
    """
    session, whole = held.session, job.conversation
    if session is None:
        raise TenureError("the session is parked", option="session")
    if keep < len(session):
        session.keep_first(keep)
    for _ in range(2):  # a refusal for each of the two kinds of marks
        try:
            return session.adopt(whole)
        except (BudgetError, MessageError) as error:
            whole = _give_up(whole, job.hints, error)
    return session.adopt(whole)


def _give_up(whole: Conversation, hints: list[dict[str, Any]], error: TenureError) -> Conversation:
    """The conversation without the marks that were refused; the report of the hints says so."""
    if error.option == "reads":
        refused = ("step", "reads")
        pieces = [replace(piece, step=None, reads=()) for piece in whole.pieces]
    else:
        refused = ("span", "pin")
        pieces = [
            replace(piece, span=None, pin="soft" if piece.pin == "hard" else piece.pin)
            for piece in whole.pieces
        ]
    for entry in hints:
        if entry["hint"] in refused and entry["outcome"] != "rejected":
            outcome = "clipped" if entry["hint"] == "pin" else "rejected"
            entry |= {"outcome": outcome, "reason": error.cause}
    return replace(whole, pieces=pieces)
