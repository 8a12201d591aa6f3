"""The spans of a session as planners follow them: what is new since the last boundary, and what was taken back."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tenure.planners.base import Document
from tenure.planners.words import bare

if TYPE_CHECKING:
    from tenure.session import Session
    from tenure.spans import Span


class Corpus:
    """Remembers which tokens planners have seen.

    Sessions are taken back and go on differently, with span ids that come again. What counts is therefore the token
    ids: everything from the first token that differs is new.
    """

    def __init__(self) -> None:
        self._ids = array("I")
        self._seen: list[tuple[str, int, int]] = []

    def update(self, session: Session) -> tuple[list[str], list[Document]]:
        """Follow a session.

        Returns:
            Ids of the documents that are gone, and those that have come, in order. A span that has grown goes and
            comes again.
        """
        memory = session.memory
        same = _common(self._ids, memory.ids)
        table = memory.ledger.spans
        kept = len(self._seen)
        while kept:
            span_id, start, stop = self._seen[kept - 1]
            if stop <= same and kept <= len(table):
                span = table[kept - 1]
                if (span.id, span.start, span.stop) == (span_id, start, stop):
                    break
            kept -= 1
        gone = [span_id for span_id, _, _ in self._seen[kept:]]
        fresh = [table[number] for number in range(kept, len(table))]
        come = [document(session, span, memory.ids[span.start : span.stop]) for span in fresh]
        del self._seen[kept:]
        self._seen += [(one.span.id, one.span.start, one.span.stop) for one in come]
        del self._ids[same:]
        self._ids.extend(memory.ids[same:])
        return gone, come

    @property
    def seen(self) -> list[tuple[str, int, int]]:
        """Id, start and stop of each span as planners have seen it."""
        return list(self._seen)

    def same(self, ids: array[int]) -> int:
        """How many of these token ids planners have seen, up to the first that differs."""
        return _common(self._ids, ids)

    def resume(self, ids: array[int], seen: list[tuple[str, int, int]]) -> None:
        """Go on from what a saved session had seen of these token ids and of some that were taken back."""
        self._seen = seen
        self._ids = ids

    def fork(self) -> Corpus:
        """An independent copy."""
        copy = Corpus()
        copy._ids, copy._seen = array("I", self._ids), list(self._seen)
        return copy


def document(session: Session, span: Span, ids: array[int]) -> Document:
    """A span as planners see it: a copy that does not grow with it, its text without markers and role."""
    tokenizer = session.engine.tokenizer
    text = "" if tokenizer is None else bare(str(tokenizer.decode(list(ids), skip_special_tokens=True)))
    return Document(replace(span), text, ids)


def _common(one: array[int], other: array[int]) -> int:
    """Length of the common start of two lists of ids."""
    count = min(len(one), len(other))
    if not count:
        return 0
    differ = np.frombuffer(one, np.uint32)[:count] != np.frombuffer(other, np.uint32)[:count]
    first = int(differ.argmax())
    return first if differ[first] else count
