"""The plan: the steps of an agent's work and the spans that each step reads.

A plan is a hint about the future. It may be stale, incomplete or wrong: a span that it names and the session
does not know simply has no effect. Only `Plan.validate` is strict, for callers that want to be told.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenure.errors import PlanError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the work: its id and the ids of the spans it will read."""

    id: str
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise PlanError(f"a step's id must be a non-empty string, not {self.id!r}")
        reads: object = self.reads
        if not isinstance(reads, (list, tuple)) or not all(isinstance(span, str) and span for span in reads):
            raise PlanError(f"the reads of step {self.id!r} must be a list of span ids, not {reads!r}")
        object.__setattr__(self, "reads", tuple(dict.fromkeys(reads)))


class Plan:
    """Ordered steps, the one under way, and those that are done.

    The steps themselves never change; `begin`, `finish` and `add` move the plan forward. Distances are
    counted in steps from the current one, which is the first step until `begin` is called.
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        """Raises `PlanError` when two steps share an id."""
        self._steps: list[Step] = []
        self._index: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        self._finished: set[str] = set()
        self._current = 0
        for step in steps:
            self.add(step)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order."""
        return tuple(self._steps)

    @property
    def current(self) -> Step | None:
        """The step under way; None for an empty plan and after the last step has finished."""
        return self._steps[self._current] if self._current < len(self._steps) else None

    @property
    def finished(self) -> frozenset[str]:
        """The ids of the finished steps."""
        return frozenset(self._finished)

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

    def add(self, step: Step) -> None:
        """Append a step. Raises `PlanError` when its id is taken."""
        if step.id in self._index:
            raise PlanError(f"step {step.id!r} is in the plan already", way_out="Give each step its own id")
        place = len(self._steps)
        self._steps.append(step)
        self._index[step.id] = place
        for span in step.reads:
            self._readers.setdefault(span, []).append(place)

    def begin(self, step_id: str) -> Step:
        """Make a step the current one; going back reopens a finished step.

        Raises `PlanError` for an unknown step, with the plan unchanged.
        """
        self._current = self._place(step_id)
        self._finished.discard(step_id)
        return self._steps[self._current]

    def finish(self, step_id: str) -> None:
        """Mark a step as done: from now on it counts no longer as a reader.

        When it is the current step, the next unfinished step becomes the current one. Finishing twice is
        harmless. Raises `PlanError` for an unknown step.
        """
        place = self._place(step_id)
        self._finished.add(step_id)
        if place == self._current:
            while self._current < len(self._steps) and self._steps[self._current].id in self._finished:
                self._current += 1

    def next_reader(self, span_id: str) -> Step | None:
        """The next unfinished step that reads a span, from the current one on; else the last overdue one."""
        place = self._next_place(span_id)
        return None if place is None else self._steps[place]

    def delta(self, span_id: str) -> int | None:
        """Steps from the current one to the next unfinished reader of a span.

        0 means that the current step reads it. A reader that was passed over and has not finished counts as
        0: it is overdue, and nothing says that it will not come. None when no reader remains.
        """
        place = self._next_place(span_id)
        return None if place is None else max(0, place - self._current)

    def readers(self, span_id: str) -> tuple[Step, ...]:
        """Every step that reads a span, finished ones too, in order."""
        return tuple(self._steps[place] for place in self._readers.get(span_id, ()))

    def planned(self) -> dict[str, int]:
        """Every span with a remaining reader, and its `delta`."""
        distances = ((span, self.delta(span)) for span in self._readers)
        return {span: distance for span, distance in distances if distance is not None}

    def validate(
        self,
        known_spans: Collection[str] = (),
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
            PlanError: lists every unknown span with its steps, and every unknown step.
        """
        problems = []
        for step in self._steps:
            if pending_ok and step.id not in self._finished:
                continue
            unknown = [span for span in step.reads if span not in known_spans]
            if unknown:
                problems.append(f"step {step.id!r} reads unknown spans: {', '.join(map(repr, unknown))}")
        problems.extend(f"unknown step {step_id!r}" for step_id in begin if step_id not in self._index)
        if problems:
            raise PlanError(
                "; ".join(problems), option="plan", way_out="Define the spans first or drop the reads"
            )

    def copy(self) -> Plan:
        """An independent plan in the same state, for a fork."""
        twin = Plan()
        twin._steps = list(self._steps)
        twin._index = dict(self._index)
        twin._readers = {span: list(places) for span, places in self._readers.items()}
        twin._finished = set(self._finished)
        twin._current = self._current
        return twin

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; see `data/plan.schema.json`."""
        return {
            "steps": [{"id": step.id, "reads": list(step.reads)} for step in self._steps],
            "current": self.current.id if self.current else None,
            "finished": [step.id for step in self._steps if step.id in self._finished],
        }

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> Plan:
        """Read a plan from JSON text or from plain data.

        Raises:
            PlanError: names the place at fault, such as `steps[2].reads[0]`.
        """
        if isinstance(data, (str, bytes)):
            try:
                data = json.loads(data)
            except ValueError as error:
                raise PlanError(f"not JSON: {error}", option="plan") from None
        root = _object(data, "plan", {"steps", "current", "finished"}, {"steps"})
        plan = cls()
        for number, item in enumerate(_list(root["steps"], "steps")):
            place = f"steps[{number}]"
            fields = _object(item, place, {"id", "reads"}, {"id"})
            reads = _list(fields.get("reads", []), f"{place}.reads")
            step = Step(
                _text(fields["id"], f"{place}.id"),
                tuple(_text(span, f"{place}.reads[{k}]") for k, span in enumerate(reads)),
            )
            if step.id in plan:
                raise PlanError(f"step {step.id!r} appears twice", option=f"{place}.id")
            plan.add(step)
        for number, item in enumerate(_list(root.get("finished", []), "finished")):
            plan._finished.add(plan._known(item, f"finished[{number}]"))
        if "current" not in root:
            plan._skip_finished()
        elif root["current"] is None:
            plan._current = len(plan._steps)
        else:
            plan._current = plan._place(plan._known(root["current"], "current"))
        return plan

    def _place(self, step_id: str) -> int:
        try:
            return self._index[step_id]
        except (KeyError, TypeError):
            known = ", ".join(repr(step.id) for step in self._steps[:20]) or "none"
            raise PlanError(
                f"unknown step {step_id!r}", option="step", way_out=f"Steps of the plan: {known}"
            ) from None

    def _known(self, value: object, place: str) -> str:
        step_id = _text(value, place)
        if step_id not in self._index:
            raise PlanError(f"unknown step {step_id!r}", option=place)
        return step_id

    def _next_place(self, span_id: str) -> int | None:
        overdue = None
        for place in self._readers.get(span_id, ()):
            if self._steps[place].id in self._finished:
                continue
            if place >= self._current:
                return place
            overdue = place
        return overdue

    def _skip_finished(self) -> None:
        while self._current < len(self._steps) and self._steps[self._current].id in self._finished:
            self._current += 1


def _object(value: object, place: str, allowed: set[str], required: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"expected an object, got {type(value).__name__}", option=place)
    unknown = sorted(set(map(str, value)) - allowed)
    if unknown:
        raise PlanError(
            f"unknown fields: {', '.join(unknown)}", option=place, way_out=f"Known: {sorted(allowed)}"
        )
    missing = sorted(required - set(value))
    if missing:
        raise PlanError(f"missing fields: {', '.join(missing)}", option=place)
    return value


def _list(value: object, place: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"expected a list, got {type(value).__name__}", option=place)
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise PlanError(f"expected a non-empty string, got {value!r}", option=place)
    return value
