"""A session's clocks and the regions of its slots: what lets a policy tell how old a slot is, and by whose measure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenure.ledger import Ledger
from tenure.region_table import CLOCKS, STEP_TOKENS, Clock, RegionTable
from tenure.spans import Span


@dataclass(frozen=True)
class RegionVectors:
    """The region table as vectors over region numbers, fp32 (times fp64), and how late it is for each region.

    Args:
        base: priorities.
        rate: 1 / half-life, 0 for what never fades.
        cap: most energy.
        now: the present by the region's clock.
        decay: what is left of an energy that was stored after the last forward that was looked at.
        pin: 0 none, 1 soft, 2 hard.
        kind: number of the region itself, where a row holds the overrides of a message.
    """

    base: Tensor
    rate: Tensor
    cap: Tensor
    now: Tensor
    decay: Tensor
    pin: Tensor
    kind: Tensor


class Aging:
    """Clocks of one session, and its region table.

    Args:
        table: of the session; messages with overrides add rows to it.
        device: of the vectors.
    """

    def __init__(self, table: RegionTable, device: torch.device) -> None:
        self.table = table
        self.times = dict.fromkeys(CLOCKS, 0.0)
        self._device = device
        self._stored: Tensor | None = None
        self._fixed: tuple[int, tuple[Tensor, ...]] | None = None

    def fork(self) -> Aging:
        """An independent copy."""
        copy = Aging(self.table.clone(), self._device)
        copy.times, copy._stored, copy._fixed = dict(self.times), self._stored, self._fixed
        return copy

    def to_json(self) -> dict[str, Any]:
        """Plain values, complete with :meth:`fill`."""
        stored = None if self._stored is None else self._stored.tolist()
        return {"times": dict(self.times), "regions": self.table.names, "stored": stored}

    def fill(self, state: Mapping[str, Any]) -> None:
        """Go on where another session of the same config was."""
        for name in state["regions"]:
            self.table.code(name)
        self.times = {clock: float(state["times"][clock]) for clock in CLOCKS}
        stored = state["stored"]
        self._stored = (
            None if stored is None else torch.tensor(stored, dtype=torch.float64, device=self._device)
        )

    @property
    def stored(self) -> Tensor | None:
        """When energies were stored, by region number; None before the first time."""
        return self._stored

    def rewind(self, times: Mapping[Clock, float], stored: Tensor | None, ledger: Ledger) -> None:
        """Put the clocks back: no energy was stored, and no slot born, later than that.

        Args:
            times: by clock.
            stored: see the property.
            ledger: with the slots.
        """
        self.times, self._stored = dict(times), None
        now = self.vectors().now
        if stored is not None:
            self._stored = torch.minimum(stored.to(now.device), now[: len(stored)])
        born, region = ledger.born[:, : ledger.rows], ledger.region[:, : ledger.rows]
        torch.minimum(born, now[region], out=born)

    def advance(self, count: int, turns: int, *, decoding: bool) -> float:
        """Let ``count`` tokens pass; returns the steps that they are."""
        steps = 1.0 if decoding else count / STEP_TOKENS
        self.times["tokens"] += count
        self.times["steps"] += steps
        self.times["turns"] += turns
        return steps

    def label(self, ledger: Ledger, span: Span, *, since: int = 0) -> None:
        """Write region and birth of a span's resident slots from logical index ``since`` on."""
        rows = slice(0, ledger.rows)
        logical = ledger.logical[:, rows]
        edges = [(0, span.region), *span.parts]
        for number, (offset, region) in enumerate(edges):
            stop = edges[number + 1][0] if number + 1 < len(edges) else len(span)
            if span.start + stop <= since:
                continue
            code = self.table.code(region)
            inside = (logical >= max(since, span.start + offset)) & (logical < span.start + stop)
            ledger.region[:, rows].masked_fill_(inside, code)
            ledger.born[:, rows].masked_fill_(inside, self._time(code))

    def enter(self, ledger: Ledger, count: int) -> None:
        """Write region and birth of the newest ``count`` slots, which lie behind all others."""
        first = ledger.length - count
        shift = ledger.rows - ledger.length
        for number in range(max(0, ledger.spans.index_at(first)), len(ledger.spans)):
            span = ledger.spans[number]
            edges = [(0, span.region), *span.parts, (len(span), span.region)]
            for (start, region), (stop, _) in itertools.pairwise(edges):
                start, stop = max(span.start + start, first), span.start + stop
                if start < stop:
                    code = self.table.code(region)
                    ledger.region[:, start + shift : stop + shift] = code
                    ledger.born[:, start + shift : stop + shift] = self._time(code)

    def _time(self, code: int) -> float:
        return self.times[self.table.specs[code].clock]

    def vectors(self) -> RegionVectors:
        """The table as it is now."""
        specs = self.table.specs
        if self._fixed is None or self._fixed[0] != len(specs):
            columns = (
                [spec.base for spec in specs],
                [1.0 / spec.half_life for spec in specs],
                [spec.cap for spec in specs],
            )
            pins = [{None: 0, "soft": 1, "hard": 2}[spec.pin] for spec in specs]
            fixed = [torch.tensor(column, dtype=torch.float32, device=self._device) for column in columns]
            marks = [torch.tensor(column, device=self._device) for column in (pins, self.table.kinds)]
            self._fixed = (len(specs), (*fixed, *marks))
        base, rate, cap, pin, kind = self._fixed[1]
        now = torch.tensor(
            [self.times[spec.clock] for spec in specs], dtype=torch.float64, device=self._device
        )
        since = torch.zeros_like(now)
        if self._stored is not None:
            since[: len(self._stored)] = now[: len(self._stored)] - self._stored
        decay = torch.exp2(-since.clamp(min=0).float() * rate)
        return RegionVectors(base, rate, cap, now, decay, pin, kind)

    def fade(self) -> RegionVectors:
        """The table as it is now; energies are from now on stored as of now."""
        vectors = self.vectors()
        self._stored = vectors.now
        return vectors

    def pins(self, pins: Tensor, region: Tensor) -> Tensor:
        """Pins of slots, where a soft pin of their region adds to those of their span.

        Hard pins of regions hold for whole messages and are marks of their spans already.
        """
        if all(spec.pin is None for spec in self.table.specs):
            return pins
        return torch.maximum(pins, self.vectors().pin[region].clamp(max=1))
