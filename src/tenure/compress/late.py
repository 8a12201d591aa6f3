"""Late compression: what is older than the last turn is compressed when the next one begins, off by default.

One turn late, because what a turn asks of its past is not known before: the queries of the turn that followed are
evidence (the delayed proxies of the literature on online compaction). Pins and what the plan reads stay exact. Under a
budget only so much is compressed that a turn as long as the last one finds room, and first what the policy would evict
first (our choice): what it holds most dear stays exact as long as it can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.compress import make_compressor
from tenure.compress.probes import Probes, Recorder, join
from tenure.errors import ConfigError
from tenure.interrupt import uninterrupted
from tenure.reads import needed

if TYPE_CHECKING:
    from tenure.cache.attend import Watch
    from tenure.memory import Memory
    from tenure.session import Session

_LOG = logging.getLogger("tenure.compress")

_KEPT = 64
"""Queries of a turn that are kept, its last ones."""

_LEAST = 32
"""Tokens from which a stretch is worth the trouble."""


class Late:
    """What one session compresses by itself.

    Args:
        method: name of a compressor.
        ratio: tokens for each entry.
    """

    def __init__(self, method: str, ratio: float) -> None:
        make_compressor(method, option="compress")
        self.method = method
        self.ratio = ratio
        self._turns = [0]
        """First tokens of the turns that have begun, ascending; those of a history that was taken back are gone."""
        self._seen: list[tuple[int, Recorder]] = []
        self._told = False

    def watch(self, count: int) -> Watch | None:
        """Keep queries of a forward of several tokens; answers, token by token, are not watched."""
        return Recorder(max(0, count - _KEPT)) if count > 1 else None

    def saw(self, watch: Watch | None, stop: int) -> None:
        """A forward was taken in whose last token is the one before ``stop``."""
        if not isinstance(watch, Recorder) or not watch.count:
            return
        self._seen.append((stop - watch.count, watch))
        while sum(recorder.count for _, recorder in self._seen[1:]) >= _KEPT:
            del self._seen[0]

    def begin(self, session: Session, now: int | None = None) -> None:
        """A turn begins: compress what the last one has looked back at. The same turn can begin again.

        Args:
            session: whose turn.
            now: its first token; None takes the next one. Tokens from there on are about to be taken back.
        """
        memory = session.memory
        if now is None:
            now = len(memory.ids) + memory.waiting
        turns = [start for start in self._turns if start <= now]
        turn = turns[-1]
        if now == turn:
            return
        if turn >= _LEAST:
            session.engine.drain([session])
            most, count = self._most(memory), self._count(memory, turn, now - turn)
            if count >= _LEAST and most != 0:
                ratio = self.ratio if most is None else max(self.ratio, count / most)
                self._compress(session, (turn, now), count, ratio)
            self._make_room(memory, most)
        self._turns, self._seen = [*turns, now], []

    def _count(self, memory: Memory, turn: int, coming: int) -> int:
        """Tokens before the last turn to compress so that one of ``coming`` tokens finds room; without a budget, all."""
        logical = memory.ledger.logical[:, : memory.ledger.rows]
        old = (logical >= memory.config.sinks) & (logical < turn)
        held = int(old.sum(1).max()) if logical.numel() else 0
        budget = memory.config.budget
        if budget is None or not memory.policy.evicts or self.ratio == 1:
            return held
        over = memory.ledger.rows + memory.frozen.slots + coming - budget
        return min(held, math.ceil(over / (1 - 1 / self.ratio)))

    def _compress(self, session: Session, turn: tuple[int, int], count: int, ratio: float) -> None:
        delayed = self._probes(session.memory, *turn)
        first = min(session.memory.config.sinks, turn[0] - 1)
        try:
            session.compress(  # sinks would be charged to every turn anew
                (first, turn[0]), ratio=ratio, method=self.method, recent=0, delayed=delayed, most=count
            )
        except ConfigError as error:  # layers lost different tokens of it, or the chunk is short
            _LOG.log(logging.INFO if self._told else logging.WARNING, "left to eviction: %s", error)
            self._told = True

    def truncate(self, count: int) -> None:
        """The session's tokens from ``count`` on were taken back."""
        self._turns = [start for start in self._turns if start <= count]
        self._seen = [(start, one) for start, one in self._seen if start + one.count <= count]

    def _probes(self, memory: Memory, first: int, stop: int) -> Probes | None:
        """Queries of a turn, where its tokens stand, or would if they were all still there."""
        parts = [
            probes
            for start, recorder in self._seen
            if start >= first
            and start + recorder.count <= stop
            and (probes := self._placed(memory, start, recorder)) is not None
        ]
        return join(parts).every(_KEPT) if parts else None

    def _placed(self, memory: Memory, start: int, recorder: Recorder) -> Probes | None:
        raw = recorder.probes(torch.empty(0)) if recorder.count else None
        if raw is None or start + recorder.count > len(memory.ids):
            return None
        # New tokens take positions behind each other, and a renumbering moves them together; where it closed the gaps
        # of some that were evicted since, they stand nearer to what is before them.
        ledger = memory.ledger
        before = ledger.logical[:, : ledger.rows] < start
        last = ledger.position[:, : ledger.rows].masked_fill(~before, -1)
        old = max(int(last.max()) + 1 if last.numel() else 0, memory.frozen.behind)
        first = max(ledger.next_position - (ledger.length - start), old)
        place: Tensor = torch.arange(first, first + recorder.count, device=raw.raw.device)
        return replace(raw, position=place)

    def _most(self, memory: Memory) -> int | None:
        """Slots that compressed tokens may take: half of what sinks, hard pins and the current step's reads leave."""
        budget = memory.config.budget
        if budget is None or not memory.policy.evicts:
            return None
        return max(0, budget - needed(memory)) // 2

    def _make_room(self, memory: Memory, most: int | None) -> None:
        """All that was ever compressed competes for the room; of every time the least worth go (our choice)."""
        frozen = memory.frozen if most is None else memory.frozen.within(most)
        if frozen is not memory.frozen:
            with uninterrupted():
                memory.freeze(frozen)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values and tensors for a saved session; :meth:`fill` takes them."""
        values = {"turns": self._turns, "seen": [start for start, _ in self._seen]}
        tensors = {}
        for number, (_, recorder) in enumerate(self._seen):
            tensors[f"{number}.raw"], tensors[f"{number}.lse"] = recorder.state()
        return values, tensors

    def fill(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        self._turns = list(values["turns"])
        self._seen = [
            (start, Recorder.of(tensors[f"{number}.raw"], tensors[f"{number}.lse"]))
            for number, start in enumerate(values["seen"])
        ]

    def fork(self) -> Late:
        """For a fork of the session."""
        copy = Late(self.method, self.ratio)
        copy._turns, copy._seen = list(self._turns), list(self._seen)
        copy._told = self._told
        return copy
