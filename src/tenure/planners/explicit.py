"""Explicit: the agent writes its plan down, and the plan is taken from there.

A message that holds ``<plan>JSON</plan>`` adds to the session's plan, whether the client sent it or the model wrote it.
The JSON is the plan's own form (``data/plan.schema.json``), in which ``steps`` may be left out, or the bare list of its
steps. Steps that the plan has already get further reads, and those that were overdue count as confirmed. ``current``
begins a step, unless messages say by their marks which step is under way. It and ``finished`` may name steps of earlier
messages. ``superseded`` is followed; the form's other fields are the session's own and are not taken from a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import ClassVar, Self

from tenure.errors import PlanError
from tenure.plan_json import PLAN_TEXT, PlanData, read_plan
from tenure.planners.base import Context, Edge, Planner, Proposal
from tenure.steps import Step

_TAKEN = ("steps", "finished", "current", "superseded")


@dataclass
class Explicit(Planner):
    """Reads plans out of messages. Put it first (``explicit+retrieval``): what the agent says has the first claim."""

    name: ClassVar[str] = "explicit"

    _read: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)
    """Digests of the plans that were taken, by message."""

    def propose(self, context: Context) -> Proposal:
        """See the class."""
        grown = {document.id for document in context.come}
        for span in context.gone:
            if span not in grown:
                self._read.pop(span, None)
        edges: list[Edge] = []
        steps: list[Step] = []
        finished: list[str] = []
        superseded: dict[str, str] = {}
        problems: list[str] = []
        current: str | None = None
        for document in (*context.come, *context.new):
            plans = PLAN_TEXT.findall(document.text)
            # A message is seen when it is queued, when it was computed, and when it has grown. Ids of spans come
            # again after a rollback, so its plans tell what of it was read.
            read, keys = self._read.get(document.id, []), [_key(text) for text in plans]
            if plans:
                self._read[document.id] = keys
            same = takewhile(lambda pair: pair[0] == pair[1], zip(read, keys, strict=False))
            for text in plans[sum(1 for _ in same) :]:
                known = [step.id for step in (*context.plan.steps, *steps)]
                try:
                    data, ignored = _parse(text, known)
                except PlanError as error:
                    problems.append(f"the plan in {document.id!r} cannot be read: {error}")
                    continue
                if ignored:
                    problems.append(f"not taken from the plan in {document.id!r}: {', '.join(ignored)}")
                steps += [Step(step.id) for step in data.steps]
                finished += data.finished
                superseded |= data.superseded
                if isinstance(data.current, str):
                    current = data.current
                edges += [
                    Edge(span, step.id, f"given in {document.id!r}")
                    for step in data.steps
                    for span in step.reads
                ]
        return Proposal(edges, steps, superseded, finished, current, problems, looked=False)

    def state(self) -> dict[str, list[str]]:
        """See the base."""
        return dict(self._read)

    def resume(self, state: Mapping[str, list[str]]) -> None:
        """See the base."""
        self._read = dict(state)

    def fork(self) -> Self:
        """See the base."""
        copy = type(self)()
        copy._read = dict(self._read)
        return copy


def _key(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _parse(text: str, known: Iterable[str]) -> tuple[PlanData, list[str]]:
    """A plan, and which of its fields a message may not set."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}", option="plan") from None
    if isinstance(data, list):
        data = {"steps": data}
    elif isinstance(data, dict):
        data = {"steps": [], **data}
    plan = read_plan(data, known)
    return plan, [name for name in data if name not in _TAKEN]
