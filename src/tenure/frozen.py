"""The compressed part of a session's cache: its frozen segments, and where they stand among the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.cache.ragged import RaggedSegment

if TYPE_CHECKING:
    from tenure.ledger import Ledger


@dataclass(frozen=True)
class Frozen:
    """Compressed segments, in the order in which they were made. Never changes; forks share it."""

    segments: tuple[RaggedSegment, ...] = ()

    @property
    def entries(self) -> int:
        """Entries of all layers and heads."""
        return sum(len(one.entries) for one in self.segments)

    @property
    def slots(self) -> int:
        """Slots of the budget that they take: entries a (layer, kv head), rounded up for each segment."""
        return sum(one.slots for one in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(one.nbytes for one in self.segments)

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """First logical index, the one behind the last, and rotary positions that a renumbering gives each."""
        return tuple((one.start, one.stop, one.slots) for one in self.segments)

    @property
    def behind(self) -> int:
        """The first rotary position behind all entries."""
        return max(
            (int(one.entries.position.max()) + 1 for one in self.segments if len(one.entries)), default=0
        )

    def add(self, segment: RaggedSegment) -> Frozen:
        """With one more."""
        return Frozen((*self.segments, segment))

    def within(self, slots: int) -> Frozen:
        """Itself where that takes at most ``slots``, else one segment of the entries of most worth."""
        if self.slots <= slots:
            return self
        whole = RaggedSegment.joined(self.segments)
        left = whole.best(slots * whole.entries.lengths.numel())
        return Frozen() if left is None else Frozen((left,))

    def before(self, length: int) -> Frozen:
        """What stands for tokens before logical index ``length`` alone."""
        return self._each(lambda one: one.before(length))

    def without(self, start: int, stop: int) -> Frozen:
        """What stands for no token of ``start .. stop``."""
        return self._each(lambda one: one.without(start, stop))

    def _each(self, change: Callable[[RaggedSegment], RaggedSegment | None]) -> Frozen:
        changed = (change(one) for one in self.segments)
        return Frozen(tuple(one for one in changed if one is not None))

    def inside(self, start: int, stop: int) -> float:
        """Entries a (layer, kv head), a mean over all of them, that begin in ``start .. stop``."""
        return sum(one.inside(start, stop).double().mean().item() for one in self.segments)

    def placed(self, ledger: Ledger) -> Frozen:
        """At the positions that the ledger's last renumbering leaves between its rows."""
        return Frozen(tuple(one.placed(_places(one, ledger)) for one in self.segments))


def _places(segment: RaggedSegment, ledger: Ledger) -> Tensor:
    """Position of each entry: the rows before its middle token, and the places of what is compressed before it.

    A head with fewer entries leaves holes instead of standing farther from the query than the others (our choice for
    ragged heads that share their positions with rows).
    """
    entries = segment.entries
    middle = (entries.start.long() + entries.stop.long() - 1) // 2
    group = entries.owner // entries.lengths.shape[1] % ledger.groups
    place = torch.empty_like(middle)
    for number, logical in enumerate(ledger.logical[:, : ledger.rows]):
        mine = group == number
        place[mine] = torch.searchsorted(logical.contiguous(), middle[mine])
    return place + ledger.offset(middle)
