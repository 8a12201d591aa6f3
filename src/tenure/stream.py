"""``TokenStream``: the tokens of a session, computed or waiting, and the spans that they belong to.

Tokens wait in a backlog until a forward computes them; only then do they enter the token list, so the list never holds
a token whose KV does not exist.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenure.ledger import Ledger
from tenure.regions import AnyRegion
from tenure.spans import Span, SpanTable


@dataclass
class _Waiting:
    ids: Sequence[int]
    span: Span
    region: AnyRegion
    done: int = 0


class TokenStream:
    """The token list of a session and what waits behind it.

    Args:
        ledger: has the spans.
        chunk: tokens a forward.
    """

    def __init__(self, ledger: Ledger, chunk: int) -> None:
        self.ledger = ledger
        self.ids = array("I")
        self._chunk = chunk
        self._chunk_left = chunk
        self._backlog: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Tokens of the backlog."""
        return sum(len(item.ids) - item.done for item in self._backlog)

    @property
    def last_span(self) -> Span | None:
        """The span of the last token, computed or waiting; None in an empty session."""
        if self._backlog:
            return self._backlog[-1].span
        return self.ledger.spans[-1] if len(self.ledger.spans) else None

    @property
    def last_region(self) -> AnyRegion | None:
        """The region of the last token, computed or waiting; None in an empty session."""
        if self._backlog:
            return self._backlog[-1].region
        span = self.last_span
        return None if span is None else span.parts[-1][1] if span.parts else span.region

    @property
    def last_id(self) -> int | None:
        """The last token, computed or waiting; None in an empty session."""
        if self._backlog:
            return self._backlog[-1].ids[-1]
        return self.ids[-1] if self.ids else None

    def newest(self, start: int, count: int) -> list[int]:
        """The last ``count`` tokens, computed or waiting, of those from the place ``start`` on."""
        waiting = [token for item in self._backlog for token in item.ids[item.done :]]
        room = max(0, count - len(waiting))
        computed = self.ids[max(start, len(self.ids) - room) :] if room else ()
        return [*computed, *waiting[max(0, start - len(self.ids)) :]][-count:]

    @property
    def waiting_spans(self) -> set[str]:
        """Ids of the spans that have tokens in the backlog."""
        return {item.span.id for item in self._backlog}

    @property
    def backlog(self) -> list[tuple[Span, Sequence[int], AnyRegion]]:
        """Tokens that wait, in order, each run with its span and its region."""
        return [(item.span, item.ids[item.done :], item.region) for item in self._backlog]

    def queue(self, ids: Sequence[int], span: Span, region: AnyRegion | None = None) -> None:
        """Put tokens behind the backlog as (a further part of) a span; a part may be of another region."""
        if len(ids):
            self._backlog.append(_Waiting(ids, span, span.region if region is None else region))

    def drop_backlog(self) -> None:
        """Forget tokens that were not computed yet."""
        self._backlog.clear()
        self._chunk_left = self._chunk

    def take(self, limit: int | None = None) -> list[int]:
        """The next tokens to compute: at most what is left of a chunk, and at most ``limit``.

        They stay in the backlog until committed.
        """
        most = self._chunk_left if limit is None else min(limit, self._chunk_left)
        ids: list[int] = []
        for item in self._backlog:
            ids += item.ids[item.done : item.done + most - len(ids)]
            if len(ids) == most:
                break
        return ids

    def _enter(self, count: int) -> int:
        """Enter waiting tokens into list and spans; returns how many messages that are not the model's began."""
        length, turns = len(self.ids), 0
        while count:
            item = self._backlog[0]
            taken = min(count, len(item.ids) - item.done)
            if item.span.id not in self.ledger.spans:
                item.span.start = item.span.stop = length
                item.span.evicted.clear()  # of tokens that were taken back
                item.span.parts.clear()
                self.ledger.spans.add(item.span)
                turns += item.span.role != "assistant"
            if item.region != (item.span.parts[-1][1] if item.span.parts else item.span.region):
                item.span.parts.append((len(item.span), item.region))
            self.ids.extend(item.ids[item.done : item.done + taken])
            item.done += taken
            item.span.stop += taken
            length += taken
            count -= taken
            if item.done == len(item.ids):
                self._backlog.popleft()
        return turns

    def _fork_backlog(self, spans: SpanTable) -> deque[_Waiting]:
        """The backlog of a fork, whose spans are those of ``spans`` where it has them."""
        known = {span.id: span for span in spans}
        for item in self._backlog:
            known.setdefault(item.span.id, replace(item.span, evicted=Counter(), parts=list(item.span.parts)))
        return deque(replace(item, span=known[item.span.id]) for item in self._backlog)
