"""Reads by message number and by quoted text become span ids as soon as the session has the span.

A reference is settled once: the first time that exactly one span fits it. A question that repeats a quoted text
later does not make it ambiguous any more. Where the span that it is settled on is taken back, it is open again, and the
first span that fits settles it. Plans are not searched for quotes: they hold them to speak of other spans.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tenure.errors import PlanError
from tenure.plan_json import PLAN_TEXT
from tenure.regions import Region
from tenure.steps import MessageNumber, Read, Reference

if TYPE_CHECKING:
    from tenure.memory import Memory
    from tenure.plan import Plan, Unsettled
    from tenure.sessionbase import SessionBase
    from tenure.spans import Span


def settle(session: SessionBase) -> list[Unsettled]:
    """Put span ids in the place of the plan's references, the waiting messages included.

    Returns:
        The references that fit no span, or more than one.
    """
    if not session.plan.pending:
        return []
    return session.plan.resolve(finder(contents(session.memory), session.searchable))


def reopen(plan: Plan, memory: Memory, count: int) -> None:
    """Open the references again that are settled on spans which lose tokens where a session goes back.

    Those of the last span that stays whole are among them: a conversation may go on in it under another id.

    Args:
        plan: of the session, or a copy.
        memory: of the session, before or after.
        count: tokens of the session that stay.
    """
    plan.reopen({span.id for span in memory.ledger.spans if span.stop < count})


def check_plan(session: SessionBase, *, pending_ok: bool) -> None:
    """Hold a session's plan against its spans.

    Args:
        session: whose plan.
        pending_ok: let steps that are not finished read spans that do not exist yet. A quote that fits several spans
            is reported in any case.

    Raises:
        PlanError: lists every unknown span and every reference that is not settled.
    """
    plan = session.plan
    problems = [
        str(left) for left in settle(session) if left.spans or not pending_ok or left.step in plan.finished
    ]
    known: set[Read] = {span.id for span, _ in contents(session.memory)} | {read for _, read in plan.pending}
    try:
        plan.validate(known, pending_ok)
    except PlanError as error:
        problems.insert(0, error.cause)
    if problems:
        raise PlanError(
            "; ".join(problems), option="plan", way_out="Define the spans first, or name them by their ids"
        )


def contents(memory: Memory, only: Collection[str] | None = None) -> Iterator[tuple[Span, array[int]]]:
    """The spans of a session with their ids, in order, those that wait to be computed included.

    Args:
        memory: of the session.
        only: ids of the spans that are wanted beside the last one and those that wait; None for all.
    """
    waiting: dict[str, tuple[Span, array[int]]] = {}
    for span, ids, _ in memory.backlog:
        waiting.setdefault(span.id, (span, array("I")))[1].extend(ids)
    spans = memory.ledger.spans
    known: Iterable[Span] = spans
    if only is not None and len(spans):
        names = {spans[-1].id, *only, *waiting}
        known = sorted((spans.get(name) for name in names if name in spans), key=lambda span: span.start)
    for span in known:
        computed = memory.ids[span.start : span.stop]
        yield span, computed + waiting.pop(span.id)[1] if span.id in waiting else computed
    yield from waiting.values()


class Texts:
    """Texts of a session's spans, as quotes are looked for in them: decoded once for as long as the spans are there."""

    def __init__(self, held: Mapping[bytes, str] | None = None) -> None:
        self._held = dict(held or {})

    def of(
        self, spans: Iterable[tuple[Span, array[int]]], text_of: Callable[[array[int]], str]
    ) -> list[tuple[str, str]]:
        """Ids and texts of spans, in order, without plans.

        Args:
            spans: all of the session, with their token ids.
            text_of: decodes ids.
        """
        before, self._held = self._held, {}
        found = []
        for span, ids in spans:
            if span.region != Region.PLAN:
                key = ids.tobytes()
                text = before.get(key)
                if text is None:
                    text = _plain(PLAN_TEXT.sub(" ", text_of(ids)))
                self._held[key] = text
                found.append((span.id, text))
        return found

    def copy(self) -> Texts:
        """An independent one."""
        return Texts(self._held)


def finder(
    spans: Iterable[tuple[Span, array[int]]],
    searchable: Callable[[Sequence[tuple[Span, array[int]]]], Sequence[tuple[str, str]]],
) -> Callable[[Reference], list[str]]:
    """A function that gives the ids of the spans that a reference fits.

    Args:
        spans: spans and their token ids, in order.
        searchable: gives the ids and texts of spans that quotes are looked for in.
    """
    held = list(spans)
    messages = [span.id for span, _ in held if span.role is not None and span.message]
    texts: Sequence[tuple[str, str]] = ()

    def find(reference: Reference) -> list[str]:
        nonlocal texts
        if isinstance(reference, MessageNumber):
            return messages[reference.number : reference.number + 1]
        texts = texts or searchable(held)
        wanted = _plain(reference.text)
        return [span_id for span_id, text in texts if wanted in text]

    return find


def _plain(text: str) -> str:
    return " ".join(text.split())
