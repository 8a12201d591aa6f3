"""What is measured of an answer: hidden tests, facts, and where the needed tokens were when it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.bench.demo_session import facts_found
from tenure.bench.longsession.sandbox import run_checks

if TYPE_CHECKING:
    from tenure.bench.longsession.task import Probe, Task
    from tenure.session import Session


class State(NamedTuple):
    """Where the needed tokens are.

    Args:
        residency: their resident share, a mean over layers.
        rotary_gap: mean distance from the next token to those that are resident; None where none is.
        kv_bytes: of the session.
        proposed: spans that planners found for the turn.
    """

    residency: float
    rotary_gap: float | None
    kv_bytes: int
    proposed: tuple[str, ...] = ()


def measure(session: Session, sizes: Mapping[str, int]) -> State:
    """Look needed spans up in the ledger; a span that the session never read counts as lost.

    Args:
        session: before the first token of the answer.
        sizes: tokens of each span that the answer needs.
    """
    ledger = session.memory.ledger
    slots, distance = 0, 0.0
    for name in sizes:
        if name in ledger.spans:
            inside = ledger.inside(ledger.spans.get(name))
            found = ledger.position[:, : ledger.rows][inside]
            slots += found.numel()
            distance += float((ledger.next_position - found).sum())
    needed = sum(sizes.values()) * ledger.groups
    turn = session.plan.turn
    return State(
        residency=min(1.0, slots / needed),
        rotary_gap=distance / slots if slots else None,
        kv_bytes=session.memory.rows.nbytes,
        proposed=() if turn is None else turn.spans,
    )


@dataclass(frozen=True)
class Answer:
    """A scored answer.

    Args:
        probe: its name.
        checks: for each hidden test whether it passed.
        facts: names of the facts that the answer holds.
        wanted: names of the facts that a right answer holds.
        residency: see :class:`State`.
        rotary_gap: see :class:`State`.
        needed: spans that a right answer reads.
        proposed: see :class:`State`.
        text: the answer.
        tokens: its length.
        reason: why it ended.
    """

    probe: str
    checks: tuple[bool, ...]
    facts: tuple[str, ...]
    wanted: tuple[str, ...]
    residency: float
    rotary_gap: float | None
    needed: tuple[str, ...]
    proposed: tuple[str, ...]
    text: str
    tokens: int
    reason: str

    @classmethod
    def score(cls, probe: Probe, task: Task, text: str, state: State, tokens: int, reason: str) -> Answer:
        """Run the hidden tests and look for the facts."""
        found = facts_found(text, task.wanted(probe.facts))
        return cls(
            probe=probe.name,
            checks=tuple(run_checks(text, probe.checks)),
            facts=tuple(name for name, hit in zip(probe.facts, found, strict=True) if hit),
            wanted=probe.facts,
            residency=round(state.residency, 4),
            rotary_gap=None if state.rotary_gap is None else round(state.rotary_gap, 1),
            needed=probe.reads,
            proposed=state.proposed,
            text=text,
            tokens=tokens,
            reason=reason,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
