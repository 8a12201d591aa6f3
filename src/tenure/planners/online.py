"""Online: learns from what was read. Names that come again, spans that were asked for before, readings that are old."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from tenure.errors import ConfigError
from tenure.planners.base import LATER, NOW, Context, Document, Edge, Planner, Proposal, within
from tenure.planners.things import thing_shown, things_asked
from tenure.planners.words import identifiers
from tenure.regions import Region

_SHOWING = (Region.TOOL_OUTPUT, Region.RETRIEVED)


@dataclass
class _Known:
    """What is remembered of a span."""

    names: frozenset[str]
    things: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    assistant: bool = False
    showing: bool = False
    reads: list[tuple[str, int]] = field(default_factory=list)
    """Earlier spans that it read, and the turn."""


@dataclass
class Online(Planner):
    """Three rules, all ours:

    - A turn reads the spans with which it shares rare names (identifiers, codes): for each name the span that had it
      first and the one that had it last. The score sums ``ln(N / df)`` over the shared names.
    - A span that was read in ``habit`` turns or more is expected to be read again. Its score sums
      ``fade ** (turns ago)``.
    - A tool's output or a document that shows the same thing as an older one (the same call, the same file)
      supersedes it.

    Args:
        allowance: tokens of what a turn reads; None takes a quarter of the budget. As much again is expected later.
        most: spans a turn.
        rare: share of the spans that may have a name for it to count; three may in any case.
        habit: turns.
        fade: how fast old reads count less.
        supersede: whether newer readings of a thing supersede older ones.
    """

    allowance: int | None = None
    most: int = 8
    rare: float = 0.1
    habit: int = 2
    fade: float = 0.9
    supersede: bool = True
    name: ClassVar[str] = "online"
    needs_archive: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    _spans: dict[str, _Known] = field(default_factory=dict, init=False, repr=False)
    _names: dict[str, dict[str, None]] = field(default_factory=dict, init=False, repr=False)
    _turns: dict[str, list[int]] = field(default_factory=dict, init=False, repr=False)
    _shown: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for option, low, high in (("rare", 0.0, 1.0), ("fade", 0.0, 1.0)):
            if not low <= getattr(self, option) <= high:
                raise ConfigError(
                    f"{getattr(self, option)} is no share",
                    option=f"planner online, {option}",
                    way_out="Give 0 to 1",
                )
        for option in ("allowance", "most", "habit"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{value!r} is too small",
                    option=f"planner online, {option}",
                    way_out="Give a whole number from 1",
                )

    def propose(self, context: Context) -> Proposal:
        """See the class."""
        for span in context.gone:
            self._forget(span)
        superseded: dict[str, str] = {}
        for document in context.come:
            superseded |= self._learn(document, context.turn)
        if context.budget is None:
            return Proposal(superseded=superseded)
        allowance = self.allowance or context.budget // 4
        now = self._now(context, allowance, superseded)
        later = self._later(context, allowance, superseded)
        return Proposal([*now, *later], superseded=superseded, expected=True)

    def fork(self) -> Self:
        """See the base."""
        copy = replace(self)
        copy._spans = {span: replace(one, reads=list(one.reads)) for span, one in self._spans.items()}
        copy._names = {name: dict(spans) for name, spans in self._names.items()}
        copy._turns = {span: list(turns) for span, turns in self._turns.items()}
        copy._shown = {thing: list(spans) for thing, spans in self._shown.items()}
        return copy

    # -- learning --------------------------------------------------------------------------------

    def _learn(self, document: Document, turn: int) -> dict[str, str]:
        """Take a span in; gives the older readings that it supersedes."""
        names = frozenset(identifiers(document.text))
        assistant = document.span.role == "assistant"
        known = _Known(
            names,
            asks=tuple(things_asked(document.text)) if assistant else (),
            assistant=assistant,
            showing=document.span.region in _SHOWING,
        )
        superseded = {}
        if self.supersede and known.showing:
            known.things = tuple(self._things(document))
            for thing in known.things:
                older = self._shown.setdefault(thing, [])
                if older:
                    superseded[older[-1]] = document.id
                older.append(document.id)
        for span, _ in self._sharing(names):
            known.reads.append((span, turn))
            self._turns.setdefault(span, []).append(turn)
        for name in names:
            self._names.setdefault(name, {})[document.id] = None
        self._spans[document.id] = known
        return superseded

    def _things(self, document: Document) -> list[str]:
        """What an output shows: what was asked for at its place behind the assistant's message, else its title."""
        for place, known in enumerate(reversed(self._spans.values())):
            if known.assistant and place < len(known.asks):
                return [known.asks[place]]
            if not known.showing:
                break
        shown = thing_shown(document.text)
        return [] if shown is None else [shown]

    def _forget(self, span: str) -> None:
        known = self._spans.pop(span, None)
        if known is None:
            return
        for name in known.names:
            self._names[name].pop(span, None)
            if not self._names[name]:
                del self._names[name]
        for thing in known.things:
            self._shown[thing].remove(span)
        for read, turn in known.reads:
            if turn in self._turns.get(read, ()):
                self._turns[read].remove(turn)
        self._turns.pop(span, None)

    # -- proposing -------------------------------------------------------------------------------

    def _sharing(self, names: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Spans that had one of the names first or last, with those names, in order of the session."""
        limit = max(3, int(self.rare * len(self._spans)))
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            spans = self._names.get(name)
            if spans and len(spans) <= limit:
                for span in dict.fromkeys((next(iter(spans)), next(reversed(spans)))):
                    found.setdefault(span, []).append(name)
        return sorted(found.items(), key=lambda item: item[0])

    def _now(self, context: Context, allowance: int, superseded: dict[str, str]) -> list[Edge]:
        names = {name for document in context.new for name in identifiers(document.text)}
        fresh = {document.id for document in context.new}
        count = len(self._spans)
        scores, whys = {}, {}
        for span, shared in self._sharing(names):
            if span in fresh or span in superseded or span in context.plan.superseded:
                continue
            shared.sort(key=lambda name: len(self._names[name]))
            scores[span] = sum(math.log((1 + count) / len(self._names[name])) for name in shared)
            whys[span] = f"shares {', '.join(shared[:5])}"
        return self._edges(NOW, scores, whys, context, allowance)

    def _later(self, context: Context, allowance: int, superseded: dict[str, str]) -> list[Edge]:
        scores, whys = {}, {}
        for span, turns in self._turns.items():
            times = sorted(set(turns))
            if len(times) < self.habit or span in superseded or span in context.plan.superseded:
                continue
            scores[span] = sum(self.fade ** (context.turn - turn) for turn in times)
            whys[span] = f"read in {len(times)} turns, last in turn {times[-1]}"
        return self._edges(LATER, scores, whys, context, allowance)

    def _edges(
        self, step: str, scores: dict[str, float], whys: dict[str, str], context: Context, allowance: int
    ) -> list[Edge]:
        table = context.memory.ledger.spans
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        taken = within(ranked, lambda span: len(table.get(span)), allowance, most=self.most, least=0.0)
        return [Edge(span, step, whys[span], score) for span, score in taken]
