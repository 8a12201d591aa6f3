"""What a planner is: at a turn boundary it proposes which spans the turn, or a later step, will read.

A planner looks at a read-only :class:`Context` and changes nothing. What it proposes is a hint like the rest of the
plan: :mod:`tenure.planners.turns` enters it into the plan and has evicted spans fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tenure.errors import TenureError
from tenure.steps import Read, Step

if TYPE_CHECKING:
    from array import array

    from tenure.engine import Engine
    from tenure.memory import Memory
    from tenure.plan import Plan
    from tenure.session import Session
    from tenure.spans import Span

NOW = "\0now"
"""Step of an edge that is meant for the turn under way; no step of a plan can have such an id."""

LATER = "\0later"
"""Step of an edge that is meant for some later turn, like ``NOW``."""


class PlannerError(TenureError):
    """A planner could not propose anything. The session goes on without it."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A step will read a span.

    Args:
        span: id of the span, or a reference to it.
        step: id of a step of the plan, ``NOW`` or ``LATER``.
        why: in words.
        score: the higher, the surer; comparable within one planner only.
        planner: who proposed it.
    """

    span: Read
    step: str
    why: str
    score: float = 1.0
    planner: str = ""

    @property
    def when(self) -> str:
        """The step in words: its id, ``now`` or ``later``."""
        return self.step.removeprefix("\0")

    def to_json(self) -> dict[str, Any]:
        """Plain values, the step as in :attr:`when`."""
        return asdict(self) | {"span": str(self.span), "step": self.when}


@dataclass(frozen=True)
class Proposal:
    """What a planner says at a turn boundary.

    Args:
        edges: in any order.
        steps: of the plan, in order: unknown ones are added, overdue ones confirmed. Their reads are edges.
        superseded: older spans and the newer ones that take their place.
        finished: steps that are done.
        current: the step that is under way from now on, unless a message has begun another; None says nothing of it.
        problems: what went wrong on the way, in words.
        looked: False where the planner did not look at the turn: what it said of it before still holds.
        expected: whether the edges to ``LATER`` replace all those that were expected before.
    """

    edges: Sequence[Edge] = ()
    steps: Sequence[Step] = ()
    superseded: Mapping[str, str] = field(default_factory=dict)
    finished: Sequence[str] = ()
    current: str | None = None
    problems: Sequence[str] = ()
    looked: bool = True
    expected: bool = False


@dataclass(frozen=True)
class Document:
    """A complete span, as planners index it; its text comes without markers and role."""

    span: Span
    text: str
    ids: array[int]

    @property
    def id(self) -> str:
        """The span's."""
        return self.span.id


@dataclass(frozen=True)
class Context:
    """What a planner sees. Nothing in it may be changed.

    Args:
        session: for planners that ask the session's model; a fork of it, never itself.
        gone: ids of documents that are no longer part of the session (it was taken back).
        come: documents that are new since the planner was last asked, in order; the last one may be open still.
        new: the turn's own messages, which were not computed yet or only just.
        reply: whether an answer is requested.
        turn: number of the turn, from 1.
    """

    session: Session
    gone: Sequence[str]
    come: Sequence[Document]
    new: Sequence[Document]
    reply: bool
    turn: int

    @property
    def plan(self) -> Plan:
        """The plan so far."""
        return self.session.plan

    @property
    def memory(self) -> Memory:
        """Tokens, ledger and archive."""
        return self.session.memory

    @property
    def engine(self) -> Engine:
        """The model."""
        return self.session.engine

    @property
    def budget(self) -> int | None:
        """Slots that may stay."""
        return self.session.config.budget

    @cached_property
    def residents(self) -> Mapping[str, float]:
        """Resident share of every computed span."""
        ledger = self.memory.ledger
        if not len(ledger.spans):
            return {}
        numbers = ledger.span_index(ledger.logical[:, : ledger.rows]).flatten()
        counts = numbers.bincount(minlength=len(ledger.spans)).tolist()
        return {
            span.id: count / (len(span) * ledger.groups) if len(span) else 1.0
            for span, count in zip(ledger.spans, counts, strict=True)
        }


@dataclass
class Planner(ABC):
    """Base of all planners: options as fields, and what was learnt of one session."""

    name: ClassVar[str]
    needs_archive: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    """Whether it remembers the documents that come, and would learn the same if they came again."""

    @property
    def needs_keys(self) -> bool:
        """Whether some of the archived keys must be kept at hand."""
        return False

    @abstractmethod
    def propose(self, context: Context) -> Proposal:
        """Edges, new steps and superseded spans, at a turn boundary.

        Called at each boundary in order, so that ``context.gone`` and ``context.come`` add up to the session.

        Raises:
            PlannerError: nothing can be proposed this time.
        """

    def state(self) -> Any:
        """Plain values that a saved session keeps beside what is learnt again from its documents; None for nothing."""
        return None

    def resume(self, state: Any) -> None:  # noqa: B027  # most have none
        """Go on from what :meth:`state` gave."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent planner that has learnt the same, for a fork of the session."""


def within(
    ranked: Sequence[tuple[str, float]],
    tokens: Callable[[str], int],
    allowance: int,
    *,
    most: int,
    least: float,
) -> list[tuple[str, float]]:
    """The best whole spans that fit an allowance: best first, one that does not fit is passed over.

    Args:
        ranked: span ids and scores, best first.
        tokens: length of a span.
        allowance: tokens in all.
        most: spans at most.
        least: share of the best score below which nothing is taken.
    """
    taken: list[tuple[str, float]] = []
    for span, score in ranked:
        if len(taken) == most or score <= 0 or score < least * ranked[0][1]:
            break
        size = tokens(span)
        if size <= allowance:
            allowance -= size
            taken.append((span, score))
    return taken
