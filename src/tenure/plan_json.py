"""The plan's JSON form; ``data/plan.schema.json`` describes it for other programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure.errors import PlanError
from tenure.steps import Reference, Step, parse_read, parse_reads

PLAN_TEXT = re.compile(r"<plan>\s*(.*?)\s*</plan>", re.IGNORECASE | re.DOTALL)
"""A plan in the text of a message."""

UNSET = object()
"""``current`` was not given."""

_FIELDS = {
    "steps",
    "current",
    "finished",
    "overdue",
    "expire_after",
    "turn",
    "expected",
    "superseded",
    "settled",
}


@dataclass
class PlanData:
    """A plan as it was read, every name checked. Fields as in the schema; ``UNSET`` where ``current`` is missing."""

    steps: list[Step]
    current: object = UNSET
    finished: list[str] = field(default_factory=list)
    overdue: dict[str, int] = field(default_factory=dict)
    expire_after: int | None = None
    turn: Step | None = None
    expected: list[str] = field(default_factory=list)
    superseded: dict[str, str] = field(default_factory=dict)
    settled: dict[tuple[str, Reference], str | None] = field(default_factory=dict)


def read_plan(data: str | bytes | Mapping[str, Any], known: Iterable[str] = ()) -> PlanData:
    """Read a plan from JSON text or from plain data.

    Args:
        data: the plan.
        known: ids of further steps that its fields may name.

    Raises:
        PlanError: names the place at fault, such as ``steps[2].reads[0]``.
    """
    if isinstance(data, (str, bytes)):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"not JSON: {error}", option="plan") from None
    root = _object(data, "plan", _FIELDS, {"steps"})
    steps: list[Step] = []
    own: set[str] = set()
    for number, item in enumerate(_list(root["steps"], "steps")):
        step = _step(item, f"steps[{number}]")
        if step.id in own:
            raise PlanError(f"step {step.id!r} appears twice", option=f"steps[{number}].id")
        own.add(step.id)
        steps.append(step)
    plan, ids = PlanData(steps), own.union(known)
    for number, item in enumerate(_list(root.get("finished", []), "finished")):
        plan.finished.append(_known(item, ids, f"finished[{number}]"))
    if "current" in root:
        current = root["current"]
        plan.current = None if current is None else _known(current, ids, "current")
    for name, ago in _object(root.get("overdue", {}), "overdue").items():
        plan.overdue[_known(name, ids, "overdue")] = whole(ago, f"overdue.{name}")
    if root.get("expire_after") is not None:
        plan.expire_after = whole(root["expire_after"], "expire_after")
    if root.get("turn") is not None:
        plan.turn = _step(root["turn"], "turn")
    for number, item in enumerate(_list(root.get("expected", []), "expected")):
        plan.expected.append(_text(item, f"expected[{number}]"))
    for old, new in _object(root.get("superseded", {}), "superseded").items():
        plan.superseded[_text(old, "superseded")] = _text(new, f"superseded.{old}")
    for number, item in enumerate(_list(root.get("settled", []), "settled")):
        place, names = f"settled[{number}]", {"step", "read", "span"}
        one = _object(item, place, names, names)
        read = parse_read(one["read"], f"{place}.read")
        if isinstance(read, str):
            raise PlanError(f"expected an object, got {read!r}", option=f"{place}.read")
        span = None if one["span"] is None else _text(one["span"], f"{place}.span")
        plan.settled[_known(one["step"], ids, f"{place}.step"), read] = span
    return plan


def whole(value: object, place: str) -> int:
    """A whole number from 0. Raises PlanError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"expected a whole number from 0, got {value!r}", option=place)
    return value


def _step(value: object, place: str) -> Step:
    fields = _object(value, place, {"id", "reads"}, {"id"})
    reads = parse_reads(_list(fields.get("reads", []), f"{place}.reads"), f"{place}.reads")
    return Step(_text(fields["id"], f"{place}.id"), reads)


def _object(
    value: object, place: str, allowed: set[str] | None = None, required: Sequence[str] | set[str] = ()
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"expected an object, got {type(value).__name__}", option=place)
    unknown = sorted(set(map(str, value)) - allowed) if allowed is not None else []
    if unknown:
        raise PlanError(
            f"unknown fields: {', '.join(unknown)}", option=place, way_out=f"Known: {sorted(allowed or ())}"
        )
    missing = sorted(set(required) - set(value))
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


def _known(value: object, ids: set[str], place: str) -> str:
    step_id = _text(value, place)
    if step_id not in ids:
        raise PlanError(f"unknown step {step_id!r}", option=place)
    return step_id
