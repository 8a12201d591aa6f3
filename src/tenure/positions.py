"""Position maps: which rotary position a slot has.

A map never touches the cache. It says when residents must be renumbered before the next chunk is written; the
ledger then numbers them ``0, 1, 2, ...`` in logical order and new tokens go on behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PositionMap(ABC):
    """Decides when a session is renumbered."""

    name: ClassVar[str]

    @abstractmethod
    def renumber(self, next_position: int, incoming: int, gaps: bool) -> bool:
        """Whether residents get new positions before ``incoming`` tokens are written.

        Args:
            next_position: where the next token would go.
            incoming: tokens about to be written.
            gaps: whether positions of residents have gaps, so that a renumbering would change something.
        """


@dataclass(frozen=True)
class Logical(PositionMap):
    """Position = logical index: what a cache without a position map does. The rotary gap grows for ever."""

    name: ClassVar[str] = "logical"

    def renumber(self, next_position: int, incoming: int, gaps: bool) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Bounded(PositionMap):
    """PACE's bounded positions: all positions stay below ``limit``.

    Renumbering is lazy, only when the next chunk would cross the limit: short gaps are better left alone.
    ``limit >= budget + chunk + slack`` makes that always possible; the session's config checks it.
    """

    limit: int
    name: ClassVar[str] = "bounded"

    def renumber(self, next_position: int, incoming: int, gaps: bool) -> bool:
        """Only when position ``limit`` would be reached."""
        return gaps and next_position + incoming > self.limit


@dataclass(frozen=True)
class Compact(PositionMap):
    """StreamingLLM's cache-relative positions (arXiv 2309.17453): position = row, after every eviction."""

    name: ClassVar[str] = "compact"

    def renumber(self, next_position: int, incoming: int, gaps: bool) -> bool:
        """Whenever there is a gap."""
        return gaps


def position_map(name: str, limit: int | None) -> PositionMap:
    """The map of a checked session config."""
    if name == "bounded":
        # Without a budget nothing is evicted, so no gap ever arises and the limit is never needed.
        return Logical() if limit is None else Bounded(limit)
    return Compact() if name == "compact" else Logical()
