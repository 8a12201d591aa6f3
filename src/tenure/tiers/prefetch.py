"""Reading ahead: what the next step of the plan reads comes into host memory while the turn before still decodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenure.memory import Memory

HORIZON = 1
"""Steps ahead: the current one and the next."""


def prefetch(memory: Memory, span_ids: Iterable[str]) -> None:
    """Have the archive read these spans, as far as the cache does not hold them whole. Returns at once.

    Args:
        memory: of the session.
        span_ids: in order of importance; unknown ones are passed over.
    """
    archive, ledger = memory.archive, memory.ledger
    if archive is None:
        return
    known = (ledger.spans.get(span) for span in span_ids if span in ledger.spans)
    missing = [span.id for span in known if ledger.resident(span) < 1.0]
    if missing:
        archive.prefetch(missing)


def prefetch_next(memory: Memory) -> None:
    """The same for what the plan's current and next step read, the nearest first."""
    if memory.archive is not None:
        near = [(delta, span) for span, delta in memory.plan.planned().items() if delta <= HORIZON]
        prefetch(memory, [span for _, span in sorted(near)])
