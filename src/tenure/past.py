"""What attention and clocks had come to when the last turns began, so that tokens taken back leave no trace in them.

Scores add up and clocks run on: without this, an answer written twenty times would age the session by all of them.
Two moments are remembered, however long the session: where reading ends and an answer may begin, and where an answer
ends and reading goes on. Which choice of moments serves best is ours; what was evicted in the meantime stays evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.region_table import Clock

if TYPE_CHECKING:
    from tenure.ledger import Ledger
    from tenure.memory import Memory

MOMENTS = 2
"""Moments that are remembered, the newest."""


@dataclass(frozen=True)
class Moment:
    """What a session was at some length.

    Args:
        length: tokens then.
        times: clocks then.
        stored: of :class:`~tenure.aging.Aging`.
        slots: logical indices, births and what the policy writes, ``[groups, rows]`` each; empty where it writes nothing.
    """

    length: int
    times: Mapping[Clock, float]
    stored: Tensor | None
    slots: Mapping[str, Tensor]

    @classmethod
    def of(cls, memory: Memory, names: set[str]) -> Moment:
        """The present; ``names`` are the per-slot arrays that the policy writes."""
        ledger, aging = memory.ledger, memory.aging
        wanted = sorted(names | {"logical", "born"}) if names else []
        slots = {name: getattr(ledger, name)[:, : ledger.rows].clone() for name in wanted}
        return cls(ledger.length, dict(aging.times), aging.stored, slots)

    def write(self, ledger: Ledger) -> None:
        """Give the slots that are there still, and were then, what they had."""
        if not self.slots or not ledger.rows or not self.slots["logical"].shape[1]:
            return
        rows, then = slice(0, ledger.rows), self.slots["logical"]
        logical = ledger.logical[:, rows].contiguous()
        place = torch.searchsorted(then, logical).clamp_(max=then.shape[1] - 1)
        known = then.gather(1, place) == logical
        for name, values in self.slots.items():
            array = getattr(ledger, name)
            array[:, rows] = torch.where(known, values.gather(1, place), array[:, rows])


class Past:
    """The moments of one session."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        """In the order of the session."""
        self._ahead: tuple[Moment, int] | None = None
        """A moment one token ahead, and that token: it is taken back to be computed again, for its logits."""
        self._names: set[str] = set()
        self.decoding = False
        """Whether the last forward wrote an answer."""

    def fork(self) -> Past:
        """An independent copy; moments never change, so they are shared."""
        copy = Past()
        copy.moments, copy._ahead = list(self.moments), self._ahead
        copy._names, copy.decoding = set(self._names), self.decoding
        return copy

    def wrote(self, name: str) -> None:
        """The policy writes this per-slot array."""
        self._names.add(name)

    @property
    def written(self) -> list[str]:
        """The per-slot arrays that the policy has written so far."""
        return sorted(self._names)

    def coming(self, memory: Memory, *, decoding: bool) -> None:
        """A forward is about to be entered: where an answer ends with it, remember the present."""
        if self.decoding and not decoding:
            self._take(memory)
        self.decoding = decoding

    def come(self, memory: Memory, *, decoding: bool) -> None:
        """A forward was entered: where nothing is left to read, remember the present."""
        if self._ahead is not None:
            (moment, token), self._ahead = self._ahead, None
            if memory.ledger.length == moment.length and memory.ids[-1] == token:
                moment.write(memory.ledger)
                memory.aging.rewind(moment.times, moment.stored, memory.ledger)
                self._add(moment)
                return
        if not decoding and not memory.waiting:
            self._take(memory)

    def back(self, memory: Memory, count: int) -> None:
        """Put clocks and slots to where they were with the first ``count`` tokens, before the others go.

        At a moment that is remembered this is exact. Elsewhere slots take the nearer of the moments around, the present
        being the last one, and clocks what lies between these in proportion to the tokens; turns are counted.
        """
        ledger, aging = memory.ledger, memory.aging
        if count >= ledger.length:
            return
        start = Moment(0, dict.fromkeys(aging.times, 0.0), None, {})
        below = next((one for one in reversed(self.moments) if one.length <= count), start)
        above = next((one for one in self.moments if one.length >= count), None)
        top = Moment(ledger.length, dict(aging.times), aging.stored, {}) if above is None else above
        near = below if below.slots and count - below.length < top.length - count else top
        top.write(ledger)
        if near is below:
            below.write(ledger)
        if count == top.length:
            times = dict(top.times)
        else:
            share = (count - below.length) / (top.length - below.length)
            times = {name: then + share * (top.times[name] - then) for name, then in below.times.items()}
            gone = sum(span.role != "assistant" for span in ledger.spans if span.start >= count)
            times["turns"] = max(0.0, aging.times["turns"] - gone)
        aging.rewind(times, near.stored, ledger)
        ahead = above is not None and above.length == count + 1
        self._ahead = (above, memory.ids[count]) if above is not None and ahead else None
        self.moments = [one for one in self.moments if one.length <= count]
        self.decoding = False

    def state(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Plain values, and tensors by name; complete with :meth:`fill`."""
        told: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        listed = [(moment, None) for moment in self.moments] + ([] if self._ahead is None else [self._ahead])
        for number, (moment, token) in enumerate(listed):
            stored = None if moment.stored is None else moment.stored.tolist()
            told.append(
                {"length": moment.length, "times": dict(moment.times), "stored": stored, "token": token}
            )
            tensors |= {f"{number}.{name}": one for name, one in moment.slots.items()}
        return told, tensors

    def fill(self, told: list[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` gave; the tensors are on the session's device."""
        for number, one in enumerate(told):
            start = f"{number}."
            slots = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
            stored = None if one["stored"] is None else torch.tensor(one["stored"], dtype=torch.float64)
            device = next(iter(slots.values())).device if slots else None
            moment = Moment(
                int(one["length"]), one["times"], None if stored is None else stored.to(device), slots
            )
            self._names |= set(slots) - {"logical", "born"}
            if one["token"] is None:
                self.moments.append(moment)
            else:
                self._ahead = (moment, int(one["token"]))

    def _take(self, memory: Memory) -> None:
        self._add(Moment.of(memory, self._names))

    def _add(self, moment: Moment) -> None:
        before = [one for one in self.moments if one.length < moment.length]
        self.moments = [*before[1 - MOMENTS :], moment]
