"""How much of a session a request can use, and bringing the session to the request's conversation."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tenure.errors import BudgetError, MessageError, TenureError

if TYPE_CHECKING:
    from tenure.conversation import Conversation
    from tenure.serve.held import Held
    from tenure.serve.jobs import Job
    from tenure.session import Session


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
