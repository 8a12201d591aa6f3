"""What a session says of itself: counters, and for a span where it is and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.memory import Memory
    from tenure.planners.base import Edge

REASONS = {
    "budget": "no step reads it, and other slots scored higher",
    "plan": "a step will read it, but what is read sooner filled the budget",
    "expired": "every step that read it was done",
    "compressed": "fewer entries stand for it; the column compressed counts them",
    "superseded": "a newer reading of the same thing took its place",
    "spilled": "a step will read it, and it comes back for that from a tier",
    "room": "a span that came back from a tier needed its place",
    "rollback": "taking back tokens cut all layers to one length",
}
"""What the reasons of an eviction mean."""


@dataclass(frozen=True)
class SessionStats:
    """Counters of a session.

    Args:
        tokens: tokens computed so far.
        resident: tokens a (layer, kv head) in the cache, each with its own slot.
        compressed: further slots, which stand for compressed tokens; entries of all heads over their number.
        budget: slots that may stay; None without a budget.
        evicted: rows evicted since the start.
        renumbers: times that positions were renumbered.
        next_position: rotary position of the next token.
        limit: bound of the positions, if there is one.
        kv_bytes: bytes allocated for the cache, measured.
        full_kv_bytes: bytes of keys and values that an unbounded cache would hold.
        spans: messages so far.
        planned_residency: mean resident share of the spans that a coming step reads; None without any.
        rotary_gap: mean distance from the next token to the residents of these spans; None without any.
        planner: what the planners have proposed so far, as counts; None without planners.
    """

    tokens: int
    resident: int
    compressed: float
    budget: int | None
    evicted: int
    renumbers: int
    next_position: int
    limit: int | None
    kv_bytes: int
    full_kv_bytes: int
    spans: int
    planned_residency: float | None
    rotary_gap: float | None
    planner: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class SpanReport:
    """Where a span is and why.

    Args:
        id: of the span.
        region: its role for memory.
        role: chat role.
        start: first logical index.
        tokens: length.
        resident: share of its slots in the cache, a mean over layers.
        compressed: slots a (layer, kv head) that stand for tokens of it which have none of their own.
        resident_by_layer: the same a layer; one value where all layers keep the same tokens.
        positions: smallest and largest rotary position of its residents.
        rotary_gap: mean distance from the next token to its residents.
        pin: ``hard``, ``soft`` or None.
        readers: steps that will read it, those that are overdue among them, nearest first.
        evicted: slots lost by reason, summed over layers.
        text: its text.
        edges: what planners have said of it, newest first.
    """

    id: str
    region: str
    role: str | None
    start: int
    tokens: int
    resident: float
    compressed: float
    resident_by_layer: tuple[float, ...]
    positions: tuple[int, int] | None
    rotary_gap: float | None
    pin: str | None
    readers: tuple[str, ...]
    evicted: dict[str, int]
    text: str
    edges: tuple[Edge, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"edges": [edge.to_json() for edge in self.edges]}


def session_stats(memory: Memory, token_bytes: int) -> SessionStats:
    """Count a session.

    Args:
        memory: its tokens, ledger and cache.
        token_bytes: bytes of one token's keys and values in an unbounded cache.
    """
    ledger = memory.ledger
    planned = [ledger.spans.get(name) for name in memory.plan.planned() if name in ledger.spans]
    gaps = [gap for span in planned if (gap := ledger.rotary_gap(span)) is not None]
    return SessionStats(
        tokens=len(memory.ids),
        resident=ledger.rows,
        compressed=memory.frozen.entries / (memory.device.layout.layers * memory.device.layout.kv_heads),
        budget=memory.config.budget,
        evicted=ledger.evicted_ever,
        renumbers=ledger.renumbers,
        next_position=ledger.next_position,
        limit=memory.config.position_limit,
        kv_bytes=memory.nbytes,
        full_kv_bytes=len(memory.ids) * token_bytes,
        spans=len(ledger.spans),
        planned_residency=sum(map(ledger.resident, planned)) / len(planned) if planned else None,
        rotary_gap=sum(gaps) / len(gaps) if gaps else None,
    )


def span_report(memory: Memory, span_id: str, text: Callable[[int, int], str]) -> SpanReport:
    """Look a span up.

    Args:
        memory: of the session.
        span_id: which span.
        text: decodes the tokens from one logical index to another.

    Raises:
        UnknownSpanError: no such span.
    """
    ledger, plan = memory.ledger, memory.plan
    span = ledger.spans.get(span_id)
    inside = ledger.inside(span)
    positions = ledger.position[:, : ledger.rows][inside]
    readers = plan.readers(span.id)
    coming = (*(() if plan.turn is None else (plan.turn,)), *plan.overdue, *plan.coming)
    return SpanReport(
        id=span.id,
        region=str(span.region),
        role=span.role,
        start=span.start,
        tokens=len(span),
        resident=ledger.resident(span),
        compressed=memory.frozen.inside(span.start, span.stop),
        resident_by_layer=tuple((inside.sum(1).double() / max(1, len(span))).tolist()),
        positions=(int(positions.min()), int(positions.max())) if positions.numel() else None,
        rotary_gap=ledger.rotary_gap(span),
        pin=span.pin,
        readers=tuple(step.id for step in coming if step in readers),
        evicted=dict(span.evicted),
        text=text(span.start, span.stop),
    )
