"""The spans of a session: contiguous ranges of logical token indices with an id, a region and marks."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tenure.errors import MessageError, UnknownSpanError
from tenure.regions import AnyRegion

Pin = Literal["hard", "soft"]


@dataclass
class Span:
    """One message, or a run of raw ids.

    Args:
        id: unique in the session.
        start: first logical index.
        stop: behind the last one.
        region: its role for memory.
        role: chat role, or None for raw ids.
        pin: ``hard`` is never evicted, ``soft`` is evicted last.
        evicted: slots lost, by reason, summed over the layers of the ledger; those that came back are not counted.
        restored: times that it came back from a tier.
        message: False for what the template writes on its own account: a preamble, a closing that stands apart.
        parts: where its region changes: offset and the region from there on, ascending.
    """

    id: str
    start: int
    stop: int
    region: AnyRegion
    role: str | None = None
    pin: Pin | None = None
    evicted: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    message: bool = True
    parts: list[tuple[int, AnyRegion]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.stop - self.start


class SpanTable:
    """Spans in logical order, without gaps between them."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._starts = array("q")
        self._by_id: dict[str, int] = {}
        self._pinned: list[Span] = []

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __getitem__(self, index: int) -> Span:
        return self._spans[index]

    def __contains__(self, span_id: object) -> bool:
        return span_id in self._by_id

    @property
    def starts(self) -> array[int]:
        """First logical index of each span, ascending."""
        return self._starts

    @property
    def pinned(self) -> Sequence[Span]:
        """Spans with a pin of either kind, in order."""
        return self._pinned

    def pin(self, span: Span, pin: Pin | None) -> None:
        """Give a span a pin, or take its own away; it may still wait for the table."""
        held = self._by_id.get(span.id)
        if held is not None and self._spans[held] is span and (span.pin is None) != (pin is None):
            if pin is None:
                self._pinned = [other for other in self._pinned if other is not span]
            else:
                insort(self._pinned, span, key=lambda one: one.start)
        span.pin = pin

    def get(self, span_id: str) -> Span:
        """The span of an id.

        Raises:
            UnknownSpanError: no such span; the message lists the last known ones.
        """
        try:
            return self._spans[self._by_id[span_id]]
        except KeyError:
            known = ", ".join(span.id for span in self._spans[-8:]) or "none yet"
            raise UnknownSpanError(
                f"no span {span_id!r} in this session", option="span", way_out=f"Latest spans: {known}"
            ) from None

    def add(self, span: Span) -> Span:
        """Append a span; it starts where the last one stops."""
        check_span_id(span.id, self)
        self._by_id[span.id] = len(self._spans)
        self._spans.append(span)
        self._starts.append(span.start)
        if span.pin is not None:
            self._pinned.append(span)
        return span

    def rename(self, span: Span, span_id: str) -> None:
        """Give a span of the table another id."""
        if span_id != span.id:
            check_span_id(span_id, self)
            self._by_id[span_id] = self._by_id.pop(span.id)
            span.id = span_id

    def index_at(self, logical: int) -> int:
        """Number of the span that holds a logical index."""
        return bisect_right(self._starts, logical) - 1

    def truncate(self, length: int) -> None:
        """Cut to the first ``length`` logical indices."""
        while self._spans and self._spans[-1].start >= length:
            gone = self._spans.pop()
            self._starts.pop()
            del self._by_id[gone.id]
            if gone.pin is not None:
                self._pinned.pop()
        if self._spans:
            last = self._spans[-1]
            last.stop = min(last.stop, length)
            last.parts = [part for part in last.parts if part[0] < len(last)]

    def clone(self) -> SpanTable:
        """An independent copy."""
        copy = SpanTable()
        copy._spans = [
            replace(span, evicted=Counter(span.evicted), parts=list(span.parts)) for span in self._spans
        ]
        copy._starts = array("q", self._starts)
        copy._by_id = dict(self._by_id)
        copy._pinned = [span for span in copy._spans if span.pin is not None]
        return copy


def check_span_id(span_id: str, taken: Container[str]) -> None:
    """Raise MessageError if an id is taken, or cannot be one."""
    if not span_id or "\0" in span_id:
        raise MessageError("a span id is a non-empty text without NUL", option="span")
    if span_id in taken:
        raise MessageError(
            f"{span_id!r} is the id of an earlier span", option="span", way_out="Give a new id"
        )
