"""What a session needs to go back in its history: the transcript's state at each place it may be cut at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tenure.transcript import Piece, State

if TYPE_CHECKING:
    from tenure.session import Session
    from tenure.toolcalls import ToolCall


def places_of(pieces: Iterable[Piece], start: int, before: State, after: State) -> list[tuple[int, State]]:
    """Where a rollback finds the transcript as it was: behind each new message, and at the end.

    Args:
        pieces: rendered from ``before``, leading to ``after``.
        start: tokens of the session before them.
        before: state of the transcript.
        after: the same.
    """
    pieces = list(pieces)
    entries, node = [], after.last
    for _ in range(sum(piece.kind in ("message", "prompt") for piece in pieces)):
        if node is not None:
            entries.append(node.entry)
            node = node.parent
    state = replace(before, turn=False, read=None, carry="")
    places: list[tuple[int, State]] = []
    for piece in pieces:
        start += len(piece.ids)
        if piece.kind == "message":
            entry = entries.pop()
            if places and entry.role == "tool" and state.last is not None and state.last.entry.role == "tool":
                places.pop()  # templates join tool results: between them nothing is closed
            state = state.append(entry)
        if piece.kind in ("message", "closing"):
            places.append((start, state))
    if places and places[-1][0] == start:
        places.pop()
    return [*places, (start, after)]


def record_calls(session: Session, calls: Sequence[ToolCall]) -> None:
    """Close the turn that has just ended as one that calls tools: templates want to see the calls before results."""
    transcript = session._transcript
    if transcript is None or not transcript.turn_open or transcript.call_form is None:
        return
    memory, transcript = session.memory, transcript.fork()
    pieces = transcript.close(tool_calls=[call.to_openai() for call in calls])
    session._enqueue(pieces, transcript, [])
    session._states.append((len(memory.ids) + memory.waiting, transcript.snapshot()))


def beyond(pieces: list[Piece], count: int) -> tuple[list[Piece], int]:
    """The pieces that reach beyond the first ``count`` ids, and how many of the ids lie inside the first of them."""
    for number, piece in enumerate(pieces):
        if count < len(piece.ids) or not count:
            return pieces[number:], count
        count -= len(piece.ids)
    return [], 0
