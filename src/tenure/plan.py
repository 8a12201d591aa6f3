"""The plan: the steps of an agent's work and the spans that each step reads.

A plan is a hint about the future. It may be stale, incomplete or wrong: a span that it names and the session
does not know simply has no effect. Only `Plan.validate` is strict, for callers that want to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tenure.errors import PlanError
from tenure.guessed import Guessed
from tenure.plan_json import UNSET, PlanData, read_plan, whole
from tenure.settled import Settled, Unsettled
from tenure.steps import MessageNumber, Quote, Read, Reference, Step, nearest, parse_reads

__all__ = ["MessageNumber", "Plan", "Quote", "Read", "Reference", "Step", "Unsettled"]


class Plan:
    """Ordered steps, the one under way, and those that are done.

    Distances are counted in steps from the current one, which is the first step until `begin` is called. Beside
    the steps stand two kinds of reads that planners find out: those of the turn under way, which count like the
    current step's, and expected ones, which come after every step.

    A reader that was passed over counts as needed now until the caller confirms what became of it: `finish` when
    it is done, `confirm` when it is still to come. Without either it expires.

    Args:
        steps: in order.
        expire_after: steps after which a reader that was passed over counts no longer; 0 at once, None never.

    Raises:
        PlanError: two steps share an id.
    """

    def __init__(self, steps: Iterable[Step] = (), *, expire_after: int | None = None) -> None:
        self.expire_after = None if expire_after is None else whole(expire_after, "expire_after")
        self._steps: list[Step] = []
        self._index: dict[str, int] = {}
        self._readers: dict[str, list[str]] = {}
        self._unsettled: dict[str, None] = {}
        self._settled = Settled()
        self.guessed = Guessed()
        """Which reads of the steps are planners' guesses."""
        self._finished: set[str] = set()
        self._current = 0
        self._clock = 0
        self._passed: dict[str, int] = {}
        self._turn: Step | None = None
        self._expected: tuple[str, ...] = ()
        self._superseded: dict[str, str] = {}
        self._once: set[str] = set()
        self._next: dict[str, tuple[int, Step | None]] | None = None
        self._deltas: Mapping[str, int] = MappingProxyType({})
        for step in steps:
            self.add(step)

    # -- reading ---------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order."""
        return tuple(self._steps)

    @property
    def current(self) -> Step | None:
        """The step under way; None for an empty plan and after the last step has finished."""
        return self._steps[self._current] if self._current < len(self._steps) else None

    @property
    def current_reads(self) -> tuple[str, ...]:
        """Spans that the step under way reads itself, without what planners found for its turn."""
        step = self.current
        return () if step is None or step.id in self._finished else step.spans

    @property
    def finished(self) -> frozenset[str]:
        """The ids of the finished steps."""
        return frozenset(self._finished)

    @property
    def coming(self) -> tuple[Step, ...]:
        """The unfinished steps from the current one on."""
        return tuple(step for step in self._steps[self._current :] if step.id not in self._finished)

    @property
    def overdue(self) -> tuple[Step, ...]:
        """Steps that were passed over without finishing and have not expired, in order."""
        late = [self._index[step_id] for step_id in self._passed if not self._expired(step_id)]
        return tuple(self._steps[place] for place in sorted(late))

    @property
    def turn(self) -> Step | None:
        """What planners found for the turn under way, as a step of its own."""
        return self._turn

    @property
    def expected(self) -> tuple[str, ...]:
        """Spans that planners expect to be read by some later turn."""
        return self._expected

    @property
    def superseded(self) -> Mapping[str, str]:
        """Spans that a newer one has taken the place of, and that newer one."""
        return MappingProxyType(self._superseded)

    @property
    def pending(self) -> tuple[tuple[str, Reference], ...]:
        """Reads by message number or by quote whose span is not known yet, with their step."""
        return tuple((step.id, read) for step in self._open() for read in step.pending)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step_id: object) -> bool:
        return step_id in self._index

    def __getitem__(self, step_id: str) -> Step:
        return self._steps[self._place(step_id)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        current = self.current.id if self.current else None
        return f"Plan({len(self._steps)} steps, current={current!r}, finished={len(self._finished)})"

    def next_reader(self, span_id: str) -> Step | None:
        """The next unfinished step that reads a span, from the current one on; else an overdue one."""
        found = self._nearest().get(span_id)
        return None if found is None else found[1]

    def delta(self, span_id: str) -> int | None:
        """Steps from the current one to the next unfinished reader of a span.

        0 means that the current step or the turn under way reads it, or that a reader of it is overdue. None when
        no reader remains.
        """
        return self.planned().get(span_id)

    def readers(self, span_id: str) -> tuple[Step, ...]:
        """Every step that reads a span, finished ones too, in order; a turn under way comes first."""
        turn = (self._turn,) if self._turn is not None and span_id in self._turn.reads else ()
        places = sorted(self._index[step_id] for step_id in self._readers.get(span_id, ()))
        return turn + tuple(self._steps[place] for place in places)

    def planned(self) -> Mapping[str, int]:
        """Every span with a remaining reader, and its `delta`. Computed once a change of the plan."""
        self._nearest()
        return self._deltas

    def loss_reason(self, span_id: str) -> str | None:
        """Why a span's slots may go: ``plan`` (nearer readers filled the budget), ``superseded``, ``expired``
        (its readers are done), or None where the plan has nothing to say."""
        if span_id in self.planned():
            return "plan"
        if span_id in self._superseded:
            return "superseded"
        return "expired" if span_id in self._readers or span_id in self._once else None

    # -- moving forward --------------------------------------------------------------------------

    def begin(self, step_id: str) -> Step:
        """Make a step the current one; going back reopens a finished step.

        Raises `PlanError` for an unknown step, with the plan unchanged.
        """
        place = self._place(step_id)
        self._finished.discard(step_id)
        self._move(place)
        return self._steps[place]

    def finish(self, step_id: str) -> None:
        """Mark a step as done: from now on it counts no longer as a reader.

        When it is the current step, the next unfinished step becomes the current one. Finishing twice is
        harmless. Raises `PlanError` for an unknown step.
        """
        place = self._place(step_id)
        self._finished.add(step_id)
        self._passed.pop(step_id, None)
        self._move(self._unfinished(place) if place == self._current else self._current)

    def confirm(self, step_id: str) -> None:
        """Say that an overdue step is still to come: it has `expire_after` steps again.

        Steps that are not overdue need no confirmation. Raises `PlanError` for an unknown step.
        """
        self._place(step_id)
        if step_id in self._passed:
            self._passed[step_id] = self._clock
            self._next = None

    # -- changing --------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Append a step. Raises `PlanError` when its id is taken."""
        if step.id in self._index:
            raise PlanError(f"step {step.id!r} is in the plan already", way_out="Give each step its own id")
        self._index[step.id] = len(self._steps)
        self._steps.append(step)
        self._enter(step)

    def remove(self, step_id: str) -> None:
        """Take a step out. The step behind it takes its place. Raises `PlanError` for an unknown step."""
        place = self._place(step_id)
        self._leave(self._steps.pop(place))
        self._settled.prune(Step(step_id))
        self.guessed.claim(step_id)
        self._finished.discard(step_id)
        self._passed.pop(step_id, None)
        self._index = {step.id: number for number, step in enumerate(self._steps)}
        if place < self._current:
            self._current -= 1
        self._move(self._unfinished(self._current) if place == self._current else self._current)

    def set_reads(self, step_id: str, reads: Iterable[Read]) -> None:
        """Give a step other reads. Raises `PlanError` for an unknown step or a read that cannot be one."""
        self._put(step_id, reads)
        self.guessed.claim(step_id)

    def add_reads(self, step_id: str, reads: Iterable[Read], *, guess: str | None = None) -> None:
        """Add to the reads of a step; a reference that is settled stays so. Raises `PlanError` like `set_reads`.

        What a planner of the name `guess` adds is a guess until somebody else names it; see `withdraw`.
        """
        held = self[step_id].reads
        now = [self._settled.span(step_id, read) or read for read in parse_reads(reads, "reads")]
        self._put(step_id, [*held, *now])
        if guess is None:
            self.guessed.claim(step_id, now)
        else:
            self.guessed.note(step_id, [read for read in now if read not in held], guess)

    def withdraw(self, guesses: Iterable[tuple[str, Read]]) -> None:
        """Take guesses back, given by step id and read; what is none stays."""
        for step_id, read in guesses:
            if self.guessed.claim(step_id, [read]):
                self._put(step_id, [one for one in self[step_id].reads if one != read])

    def add_turn_reads(self, spans: Iterable[str], *, name: str = "turn") -> None:
        """Let the turn under way read spans; they count like the current step's until `end_turn`."""
        held = self._turn or Step(name)
        self._turn = replace(held, reads=(*held.reads, *spans))
        self._once.update(self._turn.spans)
        self._next = None

    def end_turn(self) -> None:
        """The turn under way is over, and so are its reads."""
        self._turn = self._next = None

    def expect(self, spans: Iterable[str]) -> None:
        """Say which spans some later turn is expected to read, in place of those said before."""
        self._expected = tuple(dict.fromkeys(spans))
        self._once.update(self._expected)
        self._next = None

    def supersede(self, old: str, new: str) -> None:
        """Let a newer span take the place of an older one, which then goes first, unless a step still reads it."""
        if old == new or new in self._superseded:
            raise PlanError(f"{old!r} cannot be superseded by {new!r}", option="superseded")
        self._superseded[old] = new
        self._next = None

    def forget_spans(self, spans: Collection[str]) -> None:
        """Drop what planners have said of spans that the session has no more; the steps stay as they are."""
        self._superseded = {
            old: new for old, new in self._superseded.items() if old not in spans and new not in spans
        }
        self._expected = tuple(span for span in self._expected if span not in spans)
        if self._turn is not None:
            self._turn = replace(self._turn, reads=tuple(s for s in self._turn.spans if s not in spans))
        self._next = None

    def resolve(self, find: Callable[[Reference], Sequence[str]]) -> list[Unsettled]:
        """Put span ids in the place of message numbers and quotes.

        Args:
            find: gives the ids of the spans that a reference fits, in order. Exactly one settles it, until `reopen`;
                from then on the first does.

        Returns:
            What could not be settled; those reads stay as they are and have no effect.
        """
        left: list[Unsettled] = []
        for step in self._open():
            reads, unsettled, became = self._settled.settle(step, find)
            left += unsettled
            if became:
                self._put(step.id, reads)
                self.guessed.follow(step, became)
        return left

    def reopen(self, kept: Collection[str]) -> None:
        """Take references back that were settled on spans which are not among ``kept``: they may settle on others."""
        for step_id, lost in self._settled.reopen(kept).items():
            step = self[step_id]
            self._put(step_id, (one for read in step.reads for one in lost.get(read, [read])))
            self.guessed.follow(step, lost)

    def validate(
        self,
        known_spans: Collection[Read] = (),
        pending_ok: bool = False,
        *,
        begin: Sequence[str] = (),
    ) -> None:
        """Check every name against the session.

        Args:
            known_spans: ids of the spans that the session has.
            pending_ok: let a step that is not finished read spans that do not exist yet.
            begin: step ids that the caller means to begin.

        Raises:
            PlanError: lists every unknown span with its steps, every read that is not settled, and every unknown
                step.
        """
        checked = (step for step in self._steps if not pending_ok or step.id in self._finished)
        problems = [words for step in checked if (words := step.unknown(known_spans))]
        problems.extend(f"unknown step {step_id!r}" for step_id in begin if step_id not in self._index)
        if problems:
            raise PlanError(
                "; ".join(problems), option="plan", way_out="Define the spans first or drop the reads"
            )

    def copy(self) -> Plan:
        """An independent plan in the same state, for a fork."""
        twin = Plan.__new__(Plan)
        for name, value in vars(self).items():
            own = isinstance(value, (list, dict, set, Settled, Guessed)) and name != "_next"
            setattr(twin, name, value.copy() if own else value)
        twin._readers = {span: list(steps) for span, steps in self._readers.items()}
        return twin

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; see `data/plan.schema.json`."""
        data: dict[str, Any] = {
            "steps": [step.to_json() for step in self._steps],
            "current": self.current.id if self.current else None,
            "finished": [step.id for step in self._steps if step.id in self._finished],
        }
        more = {
            "overdue": {step_id: self._clock - then for step_id, then in sorted(self._passed.items())},
            "expire_after": self.expire_after,
            "turn": None if self._turn is None else self._turn.to_json(),
            "expected": list(self._expected),
            "superseded": dict(self._superseded),
            "settled": self._settled.to_json(),
        }
        return data | {name: value for name, value in more.items() if value not in (None, {}, [])}

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> Plan:
        """Read a plan from JSON text or from plain data.

        Raises:
            PlanError: names the place at fault, such as `steps[2].reads[0]`.
        """
        return cls._of(read_plan(data))

    # -- inside ----------------------------------------------------------------------------------

    @classmethod
    def _of(cls, data: PlanData) -> Plan:
        plan = cls(data.steps, expire_after=data.expire_after)
        plan._finished.update(data.finished)
        if data.current is UNSET:
            plan._current = plan._unfinished(0)
        else:
            plan._current = len(plan._steps) if data.current is None else plan._index[str(data.current)]
        passed = [step.id for step in plan._steps[: plan._current] if step.id not in plan._finished]
        plan._passed = {step_id: -data.overdue.get(step_id, 0) for step_id in passed}
        plan._turn = data.turn
        plan._expected = tuple(data.expected)
        plan._superseded = dict(data.superseded)
        plan._settled = Settled(data.settled)
        return plan

    def _nearest(self) -> Mapping[str, tuple[int, Step | None]]:
        """Delta and next reader of every planned span."""
        if self._next is not None:
            return self._next
        found = nearest(self._turn, self._steps[self._current :], self._finished, self.overdue)
        behind = max(1, len(self._steps) - self._current)
        for span in self._expected:
            if span not in self._superseded:
                found.setdefault(span, (behind, None))
        self._next = found
        self._deltas = MappingProxyType({span: distance for span, (distance, _) in found.items()})
        return found

    def _open(self) -> list[Step]:
        """Steps with reads that are not settled, in order."""
        return [self._steps[place] for place in sorted(self._index[step_id] for step_id in self._unsettled)]

    def _move(self, place: int) -> None:
        """Make a place the current one, and keep count of the steps that it passes over."""
        if place != self._current:
            self._clock += 1
        for step in self._steps[self._current : place]:
            if step.id not in self._finished:
                self._passed[step.id] = self._clock
        if place < self._current:
            for step in self._steps[place : self._current]:
                self._passed.pop(step.id, None)
        self._current = place
        self._next = None

    def _unfinished(self, place: int) -> int:
        while place < len(self._steps) and self._steps[place].id in self._finished:
            place += 1
        return place

    def _expired(self, step_id: str) -> bool:
        return self.expire_after is not None and self._clock - self._passed[step_id] >= self.expire_after

    def _put(self, step_id: str, reads: Iterable[Read]) -> None:
        place = self._place(step_id)
        step = replace(self._steps[place], reads=parse_reads(reads, "reads"))
        self._leave(self._steps[place])
        self._settled.prune(step)
        self._steps[place] = step
        self._enter(step)

    def _enter(self, step: Step) -> None:
        for span in step.spans:
            self._readers.setdefault(span, []).append(step.id)
        if step.pending:
            self._unsettled[step.id] = None
        self._next = None

    def _leave(self, step: Step) -> None:
        for span in step.spans:
            self._readers[span].remove(step.id)
            if not self._readers[span]:
                del self._readers[span]
        self._unsettled.pop(step.id, None)
        self._next = None

    def _place(self, step_id: str) -> int:
        try:
            return self._index[step_id]
        except (KeyError, TypeError):
            known = ", ".join(repr(step.id) for step in self._steps[:20]) or "none"
            raise PlanError(
                f"unknown step {step_id!r}", option="step", way_out=f"Steps of the plan: {known}"
            ) from None
