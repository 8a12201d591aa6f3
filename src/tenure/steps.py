"""One step of a plan, and the three ways to say which span it reads: by id, by message number, by quoted text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenure.errors import PlanError


@dataclass(frozen=True, slots=True)
class MessageNumber:
    """The span of a message, by its place in the conversation; the first message has number 0."""

    number: int

    def to_json(self) -> dict[str, Any]:
        """The form of the plan's JSON."""
        return {"message": self.number}

    def __str__(self) -> str:
        return f"message {self.number}"


@dataclass(frozen=True, slots=True)
class Quote:
    """The one span that holds a text. Runs of white space count as one blank."""

    text: str

    def to_json(self) -> dict[str, Any]:
        """The form of the plan's JSON."""
        return {"quote": self.text}

    def __str__(self) -> str:
        return f"quote {self.text!r}"


Reference = MessageNumber | Quote
"""A span whose id is not known yet; see :mod:`tenure.references`."""

Read = str | MessageNumber | Quote


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the work: its id and the spans it will read.

    Args:
        id: unique in a plan.
        reads: span ids, :class:`MessageNumber`, :class:`Quote`, or the JSON forms of these two.
    """

    id: str
    reads: tuple[Read, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise PlanError(f"a step's id must be a non-empty string, not {self.id!r}")
        if "\0" in self.id:  # planners name the turn under way and later ones so
            raise PlanError(f"a step's id is a text without NUL, not {self.id!r}")
        reads: object = self.reads
        if not isinstance(reads, (list, tuple)):
            raise PlanError(f"the reads of step {self.id!r} must be a list of span ids, not {reads!r}")
        object.__setattr__(self, "reads", parse_reads(reads, f"step {self.id!r}, reads"))

    @property
    def spans(self) -> tuple[str, ...]:
        """The reads whose span id is known."""
        return tuple(read for read in self.reads if isinstance(read, str))

    @property
    def pending(self) -> tuple[Reference, ...]:
        """The reads whose span is not known yet."""
        return tuple(read for read in self.reads if not isinstance(read, str))

    def unknown(self, known: Collection[Read]) -> str:
        """In words, the reads that are not among the known ones; empty if there are none."""
        names = [repr(one) if isinstance(one, str) else str(one) for one in self.reads if one not in known]
        return f"step {self.id!r} reads unknown spans: {', '.join(names)}" if names else ""

    def to_json(self) -> dict[str, Any]:
        """The form of the plan's JSON."""
        return {
            "id": self.id,
            "reads": [read if isinstance(read, str) else read.to_json() for read in self.reads],
        }


def nearest(
    turn: Step | None, ahead: Sequence[Step], finished: Collection[str], overdue: Sequence[Step]
) -> dict[str, tuple[int, Step | None]]:
    """The next reader of each span, and how many steps ahead it is.

    Args:
        turn: what the turn under way reads, as a step.
        ahead: steps from the current one on.
        finished: ids of those that count no longer.
        overdue: steps that count as read now where no other reader is left.
    """
    found: dict[str, tuple[int, Step | None]] = {}
    if turn is not None:
        for span in turn.spans:
            found[span] = (0, turn)
    for distance, step in enumerate(ahead):
        if step.id not in finished:
            for span in step.spans:
                if span not in found:
                    found[span] = (distance, step)
    for step in reversed(overdue):
        for span in step.spans:
            found.setdefault(span, (0, step))
    return found


def parse_reads(reads: Iterable[object], place: str) -> tuple[Read, ...]:
    """Check and convert reads; doubles are dropped.

    Raises:
        PlanError: names the place at fault.
    """
    return tuple(dict.fromkeys(parse_read(read, f"{place}[{k}]") for k, read in enumerate(reads)))


def parse_read(value: object, place: str) -> Read:
    """Check and convert one read: a span id, ``{"message": number}`` or ``{"quote": text}``.

    Raises:
        PlanError: names the place at fault.
    """
    if isinstance(value, (MessageNumber, Quote)):
        value = value.to_json()
    if not isinstance(value, Mapping):
        if not isinstance(value, str) or not value:
            raise PlanError(
                f"expected a non-empty string, got {value!r}",
                option=place,
                way_out='Give a span id, {"message": NUMBER} or {"quote": TEXT}',
            )
        return value
    if set(value) == {"message"}:
        number = value["message"]
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise PlanError(f"expected a whole number from 0, got {number!r}", option=f"{place}.message")
        return MessageNumber(number)
    if set(value) == {"quote"}:
        text = value["quote"]
        if not isinstance(text, str) or not text.strip():
            raise PlanError(f"expected a text, got {text!r}", option=f"{place}.quote")
        return Quote(text)
    raise PlanError(
        f"unknown fields: {', '.join(sorted(map(str, value))) or 'none'}",
        option=place,
        way_out='Give a span id, {"message": NUMBER} or {"quote": TEXT}',
    )
