"""Noise in the plan that arms are told: definitions whose edges are all spoilt in the same way.

Several probes read the same definition, and any edge that is left keeps it in the cache. So it is definitions that are
drawn, and all edges of one that is spoilt are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tenure.planners.noise import GONE, KINDS, Kind

if TYPE_CHECKING:
    from tenure.bench.longsession.task import Task
    from tenure.plan import Plan

VERSION = 2
"""Of what noise does. Runs without one spoilt single edges, most of which another reader made up for."""

_GOLDEN = (math.sqrt(5) - 1) / 2

_SPARE = 256
"""Slots that wrong spans leave to sinks and the newest tokens."""


def noisy(task: Task, kind: str, rate: float, budget: int) -> Plan:
    """The session's plan with a share of its definitions spoilt.

    - ``dropped``: no step reads the definition.
    - ``stale``: only the plan's first step reads it, which is over long before the probes.
    - ``contradictory``: its readers are said to read a span of filler, too, and a step that does not need it to read
      it. The right edges are there, so nothing is lost but room.
    - ``wrong``: its readers are said to read a span of filler instead.

    What is spoilt at a low rate is spoilt at a higher one, in the same way.

    Args:
        task: the session.
        kind: one of these, or ``all``, which draws one for each definition.
        rate: share of the definitions, over the seeds.
        budget: slots of the arms' sessions. Spans of filler are chosen so that no step reads more than it holds;
            where no filler is that short, a span that does not exist stands in its place.
    """
    plan = task.plan()
    spans = read(plan)
    spoilt = {span: _kind(kind, task.seed, span) for span in drawn(spans, rate, task.seed)}
    return _spoil(plan, spoilt, _rivals(task, spans, budget))


def read(plan: Plan) -> tuple[str, ...]:
    """The spans that a plan names, in its order."""
    return tuple(dict.fromkeys(span for step in plan.steps for span in step.spans))


def drawn(spans: Sequence[str], rate: float, seed: int) -> list[str]:
    """Which spans are spoilt.

    A session has three, so no whole number of them is a tenth. Multiples of the golden ratio modulo 1 lie evenly,
    however many there are: over seeds that count up, a share of them as large as the rate falls below it, and each span
    has its turn.
    """
    first = seed * len(spans)
    return [span for place, span in enumerate(spans, first) if (0.5 + place * _GOLDEN) % 1 < rate]


def damage(right: Plan, told: Plan) -> dict[str, list[str]]:
    """What became of a plan, for results.

    Args:
        right: the plan as it should be.
        told: the plan that was given.

    Returns:
        ``spans`` that the right plan names; those of them that are ``spoilt``: their readers are others; and those that
        are ``lost``: none of the steps that need them reads them any more.
    """
    spans = read(right)
    needing = {span: {step.id for step in right.readers(span)} for span in spans}
    reading = {span: {step.id for step in told.readers(span)} for span in spans}
    return {
        "spans": list(spans),
        "spoilt": [span for span in spans if reading[span] != needing[span]],
        "lost": [span for span in spans if not reading[span] & needing[span]],
    }


def _kind(kind: str, seed: int, span: str) -> Kind:
    wanted = [one for one in KINDS if kind in ("all", one)]
    return random.Random(f"plan noise {seed} {span}").choice(wanted)


def _rivals(task: Task, spans: Sequence[str], budget: int) -> dict[str, str]:
    """A span of filler for each definition: the shortest ones, as far as they fit the budget beside all definitions."""
    room = budget - _SPARE - sum(task.sizes[span] for span in spans)
    found = {span: f"{span}{GONE}" for span in spans}
    for span, filler in zip(spans, sorted(task.fillers, key=lambda name: task.sizes[name]), strict=False):
        room -= task.sizes[filler]
        if room >= 0:
            found[span] = filler
    return found


def _spoil(plan: Plan, spoilt: Mapping[str, Kind], rivals: Mapping[str, str]) -> Plan:
    told = plan.copy()
    first = plan.steps[0].id
    added: dict[str, list[str]] = {}
    for span, kind in spoilt.items():
        if kind == "stale":
            added.setdefault(first, []).append(span)
        elif kind == "contradictory":
            strangers = [step.id for step in plan.steps if step.spans and span not in step.spans]
            added.setdefault(strangers[0] if strangers else first, []).append(span)
    for step in plan.steps:
        reads: list[str] = []
        for span in step.spans:
            how = spoilt.get(span)
            if how in (None, "contradictory"):
                reads.append(span)
            if how in ("wrong", "contradictory"):
                reads.append(rivals[span])
        told.set_reads(step.id, [*reads, *added.get(step.id, ())])
    return told
