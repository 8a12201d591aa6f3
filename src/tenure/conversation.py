"""Bringing a session to a whole conversation that a client sends every time.

The conversation is rendered as for a new session, which needs no session and may be done on any thread; the session
then keeps the longest common prefix of token ids, takes the rest back and queues what is new. It is a
part of :class:`Session` in a module of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tenure.encode import common_prefix
from tenure.history import beyond, places_of
from tenure.interrupt import uninterrupted
from tenure.messages import Message
from tenure.pieces import Piece, marked
from tenure.references import reopen
from tenure.skeleton import State
from tenure.spans import Span, check_span_id

if TYPE_CHECKING:
    from tenure.session import MessageLike, Session
    from tenure.transcript import Transcript


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, rendered.

    Args:
        pieces: of all ids, in order.
        ids: the pieces' ids joined.
        transcript: behind the last message, or with the assistant's turn open.
        reply: whether the generation prompt is the last piece.
    """

    pieces: list[Piece]
    ids: list[int]
    transcript: Transcript
    reply: bool


def render(transcript: Transcript, messages: Iterable[MessageLike], *, reply: bool = True) -> Conversation:
    """Render a whole conversation with a transcript's template, tools and options; it stays as it is.

    Raises:
        MessageError: a message is malformed, or the template refuses it.
    """
    parsed = [Message.parse(message, index, transcript.regions) for index, message in enumerate(messages)]
    twin = transcript.fork()
    twin.restore(State())
    pieces = twin.open(parsed, add_generation_prompt=reply)
    taken: set[str] = set()
    for piece in pieces:
        if piece.span is not None:
            check_span_id(piece.span, taken)
            taken.add(piece.span)
    return Conversation(pieces, [token for piece in pieces for token in piece.ids], twin, reply)


@torch.inference_mode()
def adopt(session: Session, whole: Conversation) -> int:
    """Make a session's history equal a conversation; what is new waits for the next steps of the engine.

    Returns:
        Tokens that were reused.
    """
    memory = session.memory
    pieces = marked(whole.pieces, memory.aging.table)
    cached = common_prefix(memory.ids, whole.ids)
    if whole.reply and cached == len(whole.ids):
        cached -= 1  # the last token is computed again for its logits
    rest, inside = beyond(pieces, cached)
    if rest and rest[-1].kind == "prompt" and not any(piece.kind == "message" for piece in rest):
        # Nothing new was said: the last message is answered once more, so its step is under way again.
        last = next(piece for piece in reversed(pieces) if piece.kind == "message")
        rest[-1] = replace(rest[-1], step=last.step, reads=last.reads)
    spans = memory.ledger.spans
    if any(piece.kind == "message" for piece in rest) and memory.late is not None:
        # What is refused anyway compresses nothing; of the span that is cut the id may be free by then.
        edge = spans[spans.index_at(cached - 1)].start if inside else cached
        session._check_names(rest[1:] if inside else rest, edge)
        session._begin(cached)
    cut = spans[spans.index_at(cached - 1)] if inside else None
    if cut is not None:
        piece, same = rest[0], cut.start == cached - inside and rest[0].kind != "closing"
        if not same or (piece.pin == "hard" and cut.evicted):
            # What the session has of this piece stays with the spans that it belongs to.
            taken = piece.span in spans and spans.get(str(piece.span)).start < cached
            rest[0] = replace(piece.after(inside), span=None if taken else piece.span)
            cut = None
    session._check(rest, upto=cached if cut is None else cut.start)
    with uninterrupted():
        if cached < len(memory.ids):
            session.logits = None
        memory.keep_first(cached)
        reopen(session.plan, memory, cached)
        session._states = [(0, State())]
        if cut is not None:
            _relabel(session, cut, rest[0], {piece.span for piece in rest})
            rest[0] = replace(rest[0].after(inside), kind="closing")
        places = places_of(pieces, 0, State(), whole.transcript.snapshot())
        fresh = session._enqueue(rest, whole.transcript, places)
    if session.planning is not None:
        session.planning.queued(session, fresh, reply=whole.reply)
    return cached


def _relabel(session: Session, span: Span, piece: Piece, reserved: Container[str | None]) -> None:
    """Give a span the marks of the piece that goes on with it, and a new id if another piece wants its own."""
    same = piece.span is None and piece.role == span.role and span.id not in reserved
    if piece.span != span.id and not same:
        new = session._new_span(piece.span, piece.region, piece.role, None, reserved)
        session.memory.ledger.spans.rename(span, new.id)
    span.region, span.role = piece.region, piece.role
    session.memory.ledger.spans.pin(span, piece.pin)
    kept = ((start, region) for start, _, region in piece.parts if start < len(span))
    ends = ((stop, piece.region) for _, stop, _ in piece.parts if stop < len(span))
    span.parts = sorted([*kept, *ends], key=lambda part: part[0])
    session.memory.aging.label(session.memory.ledger, span)
