"""What was evicted lately, page by page, and how regions shared the cache over time. Bounded, however long the session.

A page is a run of 32 tokens of one message and region: what MemDecay evicts by, and a grain that can be read for any
policy. Recording is a few tensor operations an eviction; ids and names are looked up when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tenure.memory import Memory
    from tenure.policies.base import View

PAGE = 32
PAGES = 4096
"""Pages that are remembered, the newest."""
SAMPLES = 512
"""Points of the timeline; when they are full, every second one goes."""

_WHOLE, _REAL = ("number", "region", "start", "tokens"), ("slots", "score", "age")
"""Columns of a batch."""


@dataclass(frozen=True)
class EvictedPage:
    """One page that lost slots in one eviction.

    Args:
        at: tokens of the session then.
        span: id of its message.
        region: of its slots.
        start: first logical index that was lost.
        tokens: tokens that were lost.
        layers: share of the layers that lost them; 1 where all layers keep the same tokens.
        score: what the policy ranked it by, a mean over the lost slots.
        age: by the clock of its region.
        clock: that clock.
        reason: see ``docs/memdecay.md``.
    """

    at: int
    span: str
    region: str
    start: int
    tokens: int
    layers: float
    score: float
    age: float
    clock: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Batch:
    """One eviction: columns over pages."""

    at: int
    number: Tensor
    region: Tensor
    start: Tensor
    tokens: Tensor
    slots: Tensor
    score: Tensor
    age: Tensor
    reasons: Mapping[int, str] | str

    def to_json(self) -> dict[str, Any]:
        """Plain values, complete with :meth:`from_json`; reasons of the spans that lost something."""
        columns = {name: getattr(self, name).tolist() for name in (*_WHOLE, *_REAL)}
        why = self.reasons
        if not isinstance(why, str):
            why = {number: why[number] for number in sorted(set(columns["number"])) if number in why}
        return {"at": self.at, **columns, "reasons": why}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What :meth:`to_json` gave, of JSON, whose names are texts."""
        whole = {name: torch.tensor(data[name], dtype=torch.int64) for name in _WHOLE}
        real = {name: torch.tensor(data[name], dtype=torch.float64) for name in _REAL}
        why = data["reasons"]
        reasons = why if isinstance(why, str) else {int(number): reason for number, reason in why.items()}
        return cls(at=data["at"], **whole, **real, reasons=reasons)


class EvictionLog:
    """The newest evicted pages of a session, and slots by region over time."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()
        self._pages = 0
        self._samples: list[tuple[int, Tensor]] = []
        self._every = 1
        self._skipped = 0

    def fork(self) -> EvictionLog:
        """An independent copy; what is recorded never changes, so it is shared."""
        copy = EvictionLog()
        copy._batches, copy._samples = deque(self._batches), list(self._samples)
        copy._pages, copy._every, copy._skipped = self._pages, self._every, self._skipped
        return copy

    def to_json(self) -> dict[str, Any]:
        """Plain values, complete with :meth:`fill`."""
        return {
            "batches": [batch.to_json() for batch in self._batches],
            "samples": [[at, counts.tolist()] for at, counts in self._samples],
            "every": self._every,
            "skipped": self._skipped,
        }

    def fill(self, state: Mapping[str, Any]) -> None:
        """Go on where the log of a saved session was."""
        self._batches = deque(map(_Batch.from_json, state["batches"]))
        self._pages = sum(len(batch.number) for batch in self._batches)
        self._samples = [(at, torch.tensor(counts, dtype=torch.float64)) for at, counts in state["samples"]]
        self._every, self._skipped = state["every"], state["skipped"]

    def record(
        self,
        view: View,
        index: Tensor,
        score: Tensor,
        reasons: Mapping[int, str] | str,
        *,
        replaced: Tensor | None = None,
    ) -> None:
        """Note an eviction before it is carried out.

        Args:
            view: what the policy saw.
            index: rows that stay ``[groups, kept]``.
            score: what it ranked by, ``[groups, rows]``.
            reasons: of the loss; a dict gives it by span number, with ``budget`` for the rest.
            replaced: rows that go because their tokens come back in others ``[groups, rows]``; then :meth:`sample` is for
                afterwards.
        """
        lost = torch.ones_like(view.logical, dtype=torch.bool).scatter_(1, index, False)
        if replaced is None:
            self._sample(view, ~lost)
        else:
            lost &= ~replaced
        if not bool(lost.any()):
            return
        # What a token is part of is the same in all layers, so tokens are looked at once.
        logical, place, layers = torch.unique(view.logical[lost], return_inverse=True, return_counts=True)

        def once(column: Tensor) -> Tensor:
            return torch.empty(len(logical), dtype=column.dtype, device=place.device).scatter_(
                0, place, column[lost]
            )

        region, number = once(view.region), once(view.span)
        age = (view.table.now[region] - once(view.born)).float()
        total = torch.bincount(place, score[lost].double(), minlength=len(logical))
        codes, blocks = len(view.table.now), view.length // PAGE + 1
        _, page = torch.unique((number * codes + region) * blocks + logical // PAGE, return_inverse=True)
        count = int(page.max()) + 1
        tokens = torch.bincount(page, minlength=count)
        slots = torch.bincount(page, layers.double(), minlength=count)
        first = torch.full((count,), view.length, device=page.device).scatter_reduce_(
            0, page, logical, "amin"
        )

        def of_page(column: Tensor) -> Tensor:
            return torch.empty(count, dtype=column.dtype, device=page.device).scatter_(0, page, column).cpu()

        batch = _Batch(
            at=view.length,
            number=of_page(number),
            region=of_page(region),
            start=first.cpu(),
            tokens=tokens.cpu(),
            slots=slots.cpu(),
            score=(torch.bincount(page, total, minlength=count) / slots).cpu(),
            age=(torch.bincount(page, age.double(), minlength=count) / tokens).cpu(),
            reasons=reasons if isinstance(reasons, str) else dict(reasons),
        )
        self._batches.append(batch)
        self._pages += count
        while self._pages > PAGES and len(self._batches) > 1:
            self._pages -= len(self._batches.popleft().number)

    def sample(self, view: View) -> None:
        """Note what is there by kinds of regions, as every eviction does."""
        self._sample(view, torch.ones_like(view.logical, dtype=torch.bool))

    def _sample(self, view: View, stays: Tensor) -> None:
        if self._skipped + 1 < self._every:
            self._skipped += 1
            return
        self._skipped = 0
        counts = torch.bincount(view.table.kind[view.region[stays]], minlength=len(view.table.kind))
        self._samples.append((view.length, counts.double().cpu() / len(view.logical)))
        if len(self._samples) > SAMPLES:
            self._samples = self._samples[1::2]
            self._every *= 2

    def truncate(self, length: int) -> None:
        """The session goes back to its first ``length`` tokens; what was recorded later is forgotten."""
        while self._batches and self._batches[-1].at > length:
            self._pages -= len(self._batches.pop().number)
        while self._samples and self._samples[-1][0] > length:
            self._samples.pop()

    def pages(self, memory: Memory) -> list[EvictedPage]:
        """The newest evicted pages, in order."""
        table, spans = memory.aging.table, memory.ledger.spans
        found = []
        for batch in self._batches:
            for row in range(len(batch.number)):
                number, code = int(batch.number[row]), int(batch.region[row])
                reason = (
                    batch.reasons if isinstance(batch.reasons, str) else batch.reasons.get(number, "budget")
                )
                found.append(
                    EvictedPage(
                        at=batch.at,
                        span=spans[number].id,
                        region=table.names[code],
                        start=int(batch.start[row]),
                        tokens=int(batch.tokens[row]),
                        layers=float(batch.slots[row] / (batch.tokens[row] * memory.ledger.groups)),
                        score=float(batch.score[row]),
                        age=float(batch.age[row]),
                        clock=table.specs[code].clock,
                        reason=reason,
                    )
                )
        return found

    def timeline(self, memory: Memory) -> list[tuple[int, dict[str, float]]]:
        """After evictions: tokens of the session, and slots of each region that were left."""
        names = memory.aging.table.names
        return [
            (at, {names[code]: float(count) for code, count in enumerate(counts) if count})
            for at, counts in self._samples
        ]
