"""The ledger: which token each slot holds, where it stands in rotary position, and how it scored.

Three arrays that must never be mixed up: the logical index decides causality, the rotary position the angle, the
row only where the slot lies in memory. The ledger is the one place that is asked where a token is and why.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tenure.errors import IntegrityError
from tenure.spans import Span, SpanTable

SLOT_ARRAYS = ("logical", "position", "score", "region", "born", "energy", "value")
"""Names of the per-slot arrays of a ledger. A further one is a name here and a line in ``__init__``."""


class Ledger:
    """Per-slot facts of a session's ``RowSegment``.

    Args:
        groups: 1 where all layers keep the same tokens, else the number of layers.
        capacity: slots of the slab.
        device: where the arrays live.
    """

    def __init__(self, groups: int, capacity: int, device: torch.device) -> None:
        self.groups = groups
        self.capacity = capacity
        self.rows = 0
        self.length = 0
        """Tokens whose KV was computed: the next logical index."""
        self.next_position = 0
        self.renumbers = 0
        self.evictions = 0
        """Tokens of the session that have no row now."""
        self.evicted_ever = 0
        """Rows evicted since the start; a rollback does not lower it."""
        self.spans = SpanTable()
        self.blocks: tuple[tuple[int, int, int], ...] = ()
        """Compressed stretches of the session, which take positions but no rows: first logical index, the one behind
        the last, and how many positions."""
        self.logical = torch.zeros(groups, capacity, dtype=torch.int64, device=device)
        self.position = torch.zeros(groups, capacity, dtype=torch.int64, device=device)
        self.score = torch.zeros(groups, capacity, dtype=torch.float32, device=device)
        self.region = torch.zeros(groups, capacity, dtype=torch.int64, device=device)
        """Number of the slot's region in the session's table."""
        self.born = torch.zeros(groups, capacity, dtype=torch.float64, device=device)
        """When the slot was new, by the clock of its region."""
        self.energy = torch.zeros(groups, capacity, dtype=torch.float32, device=device)
        """Decaying attention, as the policy has stored it."""
        self.value = torch.zeros(groups, capacity, dtype=torch.float32, device=device)
        """Norm of the slot's value, where the policy asks for it."""

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The per-slot arrays by name, each ``[groups, capacity]``: what moves together when rows move."""
        return {name: getattr(self, name) for name in SLOT_ARRAYS}

    def stage(self, count: int) -> None:
        """Write the facts of ``count`` coming tokens behind the resident ones; they count once committed."""
        rows = slice(self.rows, self.rows + count)
        steps = torch.arange(count, device=self.logical.device)
        for array in self.arrays.values():
            array[:, rows] = 0
        self.logical[:, rows] = self.length + steps
        self.position[:, rows] = self.next_position + steps

    def commit(self, count: int) -> None:
        """Count ``count`` staged tokens as resident."""
        self.rows += count
        self.length += count
        self.next_position += count

    @property
    def gaps(self) -> bool:
        """Whether renumbering would change any position."""
        return self.next_position != self.rows + sum(width for _, _, width in self.blocks)

    def offset(self, logical: Tensor) -> Tensor:
        """Positions that compressed stretches take before logical indices of any shape."""
        before = torch.zeros_like(logical)
        for start, stop, width in self.blocks:
            before += ((logical - start) * width).div(stop - start, rounding_mode="floor").clamp(0, width)
        return before

    def renumber(self) -> None:
        """Give residents the positions ``0, 1, 2, ...`` in logical order; new tokens go on behind them.

        Rows are equal in number in all layers, so a recent token has the same distance to the query in each.
        Compressed stretches keep room between the rows.
        """
        places = torch.arange(self.rows, device=self.position.device)
        self.position[:, : self.rows] = places + self.offset(self.logical[:, : self.rows])
        self.next_position = self.rows + sum(width for _, _, width in self.blocks)
        self.renumbers += 1

    def keep(self, index: Tensor, reason: dict[int, str] | str) -> None:
        """Keep the rows ``index`` ``[groups, kept]``, ascending; count what went against its spans.

        Args:
            index: row numbers that stay.
            reason: of the loss; a dict gives it by span number, with ``budget`` for the rest.
        """
        lost = torch.ones(self.groups, self.rows, dtype=torch.bool, device=index.device)
        lost.scatter_(1, index, False)
        self._count(self.logical[:, : self.rows][lost], reason)
        kept = index.shape[1]
        self._gather(index)
        self.evictions += self.rows - kept
        self.evicted_ever += self.rows - kept
        self.rows = kept

    def _gather(self, index: Tensor) -> None:
        for array in self.arrays.values():
            array[:, : index.shape[1]] = array.gather(1, index)

    def splice(self, span: Span, index: Tensor, score: Tensor) -> Tensor:
        """Put a span back whole: keep the rows ``index`` and add all of the span's, in logical order.

        Where every layer still has room in rotary position between the span's neighbours, it returns there; otherwise
        all residents are renumbered.

        Args:
            span: of the table; none of its rows may be in ``index``.
            index: row numbers that stay ``[groups, kept]``, ascending; what else goes is lost for want of room.
            score: of the span's slots ``[groups, len(span)]``.

        Returns:
            ``[groups, kept + len(span)]``: for each row its place in the kept rows followed by the span's.
        """
        own, count, kept = self.inside(span), len(span), index.shape[1]
        lost = ~own
        lost.scatter_(1, index, False)
        self._count(self.logical[:, : self.rows][lost], "room")
        self._gather(index)
        total = kept + count
        new = slice(kept, total)
        for array in self.arrays.values():
            array[:, new] = 0
        self.logical[:, new] = torch.arange(span.start, span.stop, device=index.device)
        self.score[:, new] = score
        gap = self._gap(span, kept)
        if gap is not None:
            self.position[:, new] = gap[:, None] + torch.arange(count, device=index.device)
        order = self.logical[:, :total].argsort(1)
        self._gather(order)
        self.evictions += self.rows - total
        self.rows = total
        span.restored += 1
        self._forget_losses(span)
        if gap is None:
            self.renumber()
        return order

    def _gap(self, span: Span, kept: int) -> Tensor | None:
        """First position of a span that fits between its neighbours in every group, ``[groups]``; None without.

        Where it stood, if nothing was renumbered since; else right before the row behind it.
        """
        logical, position = self.logical[:, :kept], self.position[:, :kept]
        if not kept or (self.blocks and self.next_position != self.length):
            return None  # what is compressed may stand in the gap
        behind = position.masked_fill(logical < span.stop, self.next_position).amin(1) - len(span)
        before = position.masked_fill(logical >= span.start, -1).amax(1)
        for first in (torch.full_like(behind, span.start - (self.length - self.next_position)), behind):
            if bool(((before < first) & (first <= behind)).all()):
                return first
        return None

    def _count(self, logical: Tensor, reason: dict[int, str] | str) -> None:
        if not len(self.spans) or not logical.numel():
            return
        counts = torch.bincount(self.span_index(logical), minlength=len(self.spans))
        for number in counts.nonzero().flatten().tolist():
            why = reason if isinstance(reason, str) else reason.get(number, "budget")
            self.spans[number].evicted[why] += int(counts[number])

    def span_index(self, logical: Tensor) -> Tensor:
        """Span number of logical indices of any shape."""
        starts = torch.from_numpy(np.array(self.spans.starts)).to(logical.device)
        return torch.searchsorted(starts, logical.contiguous(), right=True) - 1

    def span_sizes(self) -> Tensor:
        """Tokens of each span so far, evicted ones too, ``[spans]`` on the CPU; one 0 where there is no span."""
        if not len(self.spans):
            return torch.zeros(1, dtype=torch.int64)
        edges = np.append(np.array(self.spans.starts), self.spans[-1].stop)
        return torch.from_numpy(np.diff(edges))

    def resident(self, span: Span) -> float:
        """Share of a span's tokens that are in the cache, a mean over the groups; 1.0 for an empty span."""
        if not len(span):
            return 1.0
        return self.inside(span).sum().item() / (len(span) * self.groups)

    def inside(self, span: Span) -> Tensor:
        """Which rows hold tokens of a span, ``[groups, rows]`` bool."""
        logical = self.logical[:, : self.rows]
        return (logical >= span.start) & (logical < span.stop)

    def rotary_gap(self, span: Span) -> float | None:
        """Mean distance in rotary position from the next token to the span's residents; None if none is left."""
        inside = self.inside(span)
        if not inside.any():
            return None
        return self.next_position - self.position[:, : self.rows][inside].double().mean().item()

    def truncate(self, length: int, sinks: int = 0) -> Tensor:
        """Take back all tokens from logical index ``length`` on.

        Layers may have lost different tokens, so they may be left with different numbers of rows; all are cut to
        the smallest by dropping their lowest scores, and the loss is counted as ``rollback``. Sinks and hard pins
        stay: every layer has all of them.

        Returns:
            Row numbers that stay, ``[groups, kept]``, for the cache to follow.
        """
        logical = self.logical[:, : self.rows]
        stays = logical < length
        kept = int(stays.sum(1).min())
        if self.groups == 1 or bool((stays.sum(1) == kept).all()):
            index = (
                torch.arange(self.rows, device=logical.device).expand_as(stays)[stays].view(self.groups, kept)
            )
        else:
            hard = torch.zeros(max(1, len(self.spans)), dtype=torch.bool, device=logical.device)
            for span in self.spans.pinned:
                hard[self.spans.index_at(span.start)] = span.pin == "hard"
            safe = (logical < sinks) | hard[self.span_index(logical).clamp_(min=0)]
            rank = (
                self.score[:, : self.rows].masked_fill(safe, float("inf")).masked_fill(~stays, float("-inf"))
            )
            order = rank.sort(dim=1, descending=True, stable=True).indices[:, :kept]
            index = order.sort(1).values
            over = stays.scatter(1, index, False)
            self._count(logical[over], "rollback")
        self._gather(index)
        # Positions of what stays are kept. The next token goes where the first one taken back stood, or right behind
        # the largest where a renumbering has come between.
        behind = int(self.position[:, :kept].max()) + 1 if kept else 0
        self.next_position = max(behind, self.next_position - (self.length - length))
        self.rows, self.length, self.evictions = kept, length, length - kept
        self.spans.truncate(length)
        if len(self.spans):
            self._forget_losses(self.spans[len(self.spans) - 1])
        return index

    def _forget_losses(self, span: Span) -> None:
        """Count no more losses of a span that was cut than it has tokens missing."""
        missing = len(span) * self.groups - int(self.inside(span).sum())
        for reason, count in span.evicted.most_common():
            gone = min(count, span.evicted.total() - missing)
            span.evicted[reason] -= gone
        span.evicted = +span.evicted

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots."""
        extra = capacity - self.capacity
        for name, array in self.arrays.items():
            setattr(self, name, torch.nn.functional.pad(array, (0, extra)))
        self.capacity = capacity

    def clone(self) -> Ledger:
        """An independent copy."""
        copy = Ledger.__new__(Ledger)
        copy.__dict__.update(self.__dict__)
        copy.spans = self.spans.clone()
        for name, array in self.arrays.items():
            setattr(copy, name, array.clone())
        return copy

    def check_integrity(self, rows: int, ids: int, limit: int | None) -> None:
        """Raise IntegrityError if the ledger contradicts itself, the cache or the token list.

        Args:
            rows: rows of the cache.
            ids: tokens in the session's list.
            limit: bound of the positions, if there is one.
        """
        logical, position = self.logical[:, : self.rows], self.position[:, : self.rows]
        checks = {
            f"ledger has {self.rows} rows, cache {rows}": self.rows == rows,
            f"ledger has {self.length} tokens, session {ids}": self.length == ids,
            f"rows {self.rows} != tokens {self.length} - evicted {self.evictions}": self.rows
            == self.length - self.evictions,
            "logical indices do not ascend": bool((logical.diff(dim=1) > 0).all()),
            "positions do not ascend": bool((position.diff(dim=1) > 0).all()),
            "a row is ahead of the session": self.rows == 0 or int(logical[:, -1].max()) < self.length,
            "a position is ahead of the next": self.rows == 0
            or int(position[:, -1].max()) < self.next_position,
            f"next position {self.next_position} passes the limit {limit}": limit is None
            or self.next_position <= limit,
            "spans do not cover the tokens": self._spans_cover(),
        }
        broken = [text for text, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError("; ".join(broken))

    def _spans_cover(self) -> bool:
        edge = 0
        for span in self.spans:
            if span.start != edge or span.stop < span.start:
                return False
            edge = span.stop
        return edge == self.length
