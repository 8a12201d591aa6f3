"""What a session says of itself: counters, and for a span where it is and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SessionStats:
    """Counters of a session.

    Args:
        tokens: tokens computed so far.
        resident: slots a (layer, kv head) in the cache.
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
    """

    tokens: int
    resident: int
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
        resident_by_layer: the same a layer; one value where all layers keep the same tokens.
        positions: smallest and largest rotary position of its residents.
        rotary_gap: mean distance from the next token to its residents.
        pin: ``hard``, ``soft`` or None.
        readers: unfinished steps that read it, nearest first.
        evicted: slots lost by reason, summed over layers.
        text: its text.
    """

    id: str
    region: str
    role: str | None
    start: int
    tokens: int
    resident: float
    resident_by_layer: tuple[float, ...]
    positions: tuple[int, int] | None
    rotary_gap: float | None
    pin: str | None
    readers: tuple[str, ...]
    evicted: dict[str, int]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
