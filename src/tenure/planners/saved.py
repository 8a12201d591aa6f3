"""What planners have learnt, in a saved session: when each span came, so that they learn the same once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tenure.errors import TenureError
from tenure.planners.base import NOW, Context, Edge
from tenure.planners.corpus import document

if TYPE_CHECKING:
    from tenure.session import Session


def planning_json(session: Session) -> dict[str, Any] | None:
    """The state of a session's planners as plain values."""
    planning = session.planning
    if planning is None:
        return None
    return {
        "turn": planning.turn,
        "asked": planning.asked,
        "over": planning.over,
        "latest": sorted(planning.latest),
        "counts": dict(planning.counts),
        "now": {name: [edge.to_json() for edge in edges] for name, edges in planning.now.items()},
        "seen": [[*seen, planning.came.get(seen[0], 1)] for seen in planning.corpus.seen],
        "same": planning.corpus.same(session.memory.ids),
        "edges": [edge.to_json() for edge in planning.edges],
        "problems": list(planning.problems),
        "states": {
            planner.name: state for planner in planning.planners if (state := planner.state()) is not None
        },
    }


def resume_planning(session: Session, data: Mapping[str, Any] | None) -> None:
    """Bring a restored session's planners to where they were. The session has its tokens and spans already."""
    planning = session.planning
    if planning is None or data is None:
        return
    planning.turn, planning.asked, planning.over = data["turn"], data["asked"], data["over"]
    planning.latest = set(data["latest"])
    planning.counts = Counter(data["counts"])
    planning.edges.extend(Edge(**edge) for edge in data.get("edges", ()))
    planning.problems.extend(data.get("problems", ()))
    planning.now = {
        name: [Edge(**edge | {"step": NOW}) for edge in edges] for name, edges in data["now"].items()
    }
    seen, table, ids = data["seen"], session.memory.ledger.spans, session.memory.ids
    same = data.get("same", seen[-1][2] if seen else 0)
    planning.corpus.resume(ids[:same], [(span, start, stop) for span, start, stop, _ in seen])
    planning.came = {span: turn for span, _, _, turn in seen}
    # The others were taken back since, which planners hear at the next boundary.
    held = [one for one in seen if one[0] in table and table.get(one[0]).start == one[1] and one[2] <= same]
    for planner in planning.planners:
        if (state := data.get("states", {}).get(planner.name)) is not None:
            planner.resume(state)
    for turn, group in groupby(held, key=lambda one: int(one[3])):
        come = [document(session, table.get(span), ids[start:stop]) for span, start, stop, _ in group]
        context = Context(session, [], come, [], False, turn)
        for planner in planning.planners:
            if planner.learns:
                try:
                    planner.propose(context)  # what it proposes was entered into the plan long ago
                except TenureError as error:
                    planning.problems.append(f"{planner.name}: {error}")
