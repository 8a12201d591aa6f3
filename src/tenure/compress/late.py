"""Late compression: what is older than the last turn is compressed when the next one begins, off by default.

One turn late, because what a turn asks of its past is not known before: the queries of the turn that followed are
evidence (the delayed proxies of the literature on online compaction). Pins and what the plan reads stay exact.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tenure.compress import make_compressor
from tenure.compress.probes import Probes, Recorder, join
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.cache.attend import Watch
    from tenure.memory import Memory
    from tenure.session import Session

_LOG = logging.getLogger("tenure.compress")

_KEPT = 64
"""Queries of a turn that are kept."""

_LEAST = 32
"""Tokens from which a stretch is worth the trouble."""


class Late:
    """What one session compresses by itself.

    Args:
        method: name of a compressor.
        ratio: tokens for each entry.
    """

    def __init__(self, method: str, ratio: float) -> None:
        make_compressor(method)
        self.method = method
        self.ratio = ratio
        self._turn = 0
        """First token of the last turn."""
        self._done = 0
        """Tokens before it were compressed, or had their chance."""
        self._seen: list[tuple[int, Recorder]] = []
        self._told = False

    def watch(self, start: int, count: int) -> Watch | None:
        """Keep queries of a forward of several tokens; answers, token by token, are not watched."""
        if count < 2:
            return None
        recorder = Recorder(max(0, count - _KEPT))
        self._seen.append((start + max(0, count - _KEPT), recorder))
        return recorder

    def begin(self, session: Session) -> None:
        """A turn begins: compress what the last one has looked back at."""
        memory = session.memory
        now = len(memory.ids) + memory.waiting
        turn = min(self._turn, now)
        start = min(self._done, turn)
        if turn - start >= _LEAST:
            session.engine.drain([session])
            delayed = self._probes(memory, turn)
            try:
                session.compress(
                    (start, turn), ratio=self.ratio, method=self.method, recent=0, delayed=delayed
                )
            except ConfigError as error:  # layers lost different tokens of it, or the chunk is short
                _LOG.log(logging.INFO if self._told else logging.WARNING, "left to eviction: %s", error)
                self._told = True
            self._done = turn
            self._make_room(memory)
        self._turn, self._seen = now, []

    def _probes(self, memory: Memory, turn: int) -> Probes | None:
        """Queries of the turn, where their tokens still stand."""
        parts = [
            probes
            for start, recorder in self._seen
            if start >= turn and (probes := self._placed(memory, start, recorder)) is not None
        ]
        return join(parts).every(_KEPT) if parts else None

    def _placed(self, memory: Memory, start: int, recorder: Recorder) -> Probes | None:
        raw = recorder.probes(torch.empty(0)) if recorder.count else None
        if raw is None or start + recorder.count > len(memory.ids):
            return None
        # New tokens always take the positions behind each other, and a renumbering moves them together.
        ledger = memory.ledger
        first = ledger.next_position - (ledger.length - start)
        if first < 0:
            return None
        place: Tensor = torch.arange(first, first + recorder.count, device=raw.raw.device)
        return replace(raw, position=place)

    def _make_room(self, memory: Memory) -> None:
        """Compressed tokens take at most half of a budget; the oldest segments go first."""
        frozen = memory.frozen
        while memory.config.budget is not None and frozen.slots > memory.config.budget // 2:
            frozen = replace(frozen, segments=frozen.segments[1:])
        if frozen is not memory.frozen:
            memory.freeze(frozen)

    def fork(self) -> Late:
        """For a fork of the session."""
        copy = Late(self.method, self.ratio)
        copy._turn, copy._done, copy._seen = self._turn, self._done, list(self._seen)
        copy._told = self._told
        return copy
