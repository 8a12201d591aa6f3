"""Planners: who says which spans the coming steps read. To add one: its file, a line here, a row in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure.errors import ConfigError
from tenure.planners.base import LATER, NOW, Context, Edge, Planner, PlannerError, Proposal
from tenure.planners.explicit import Explicit
from tenure.planners.llm import LLM
from tenure.planners.online import Online
from tenure.planners.retrieval import Retrieval
from tenure.planners.turns import Planning
from tenure.registry import make

PLANNERS: dict[str, type[Planner]] = {planner.name: planner for planner in (Explicit, LLM, Online, Retrieval)}


def make_planning(names: str, options: Mapping[str, Any] | None = None) -> Planning:
    """The planners of a session.

    Args:
        names: a key of ``PLANNERS``, or several joined by ``+``; they are asked in this order.
        options: fields of the planner; of several planners, by the planner's name.

    Raises:
        ConfigError: unknown name or field.
    """
    listed = [name.strip() for name in str(names).split("+")]
    options = dict(options or {})
    if len(listed) > 1 and (unknown := sorted(set(options) - set(listed))):
        raise ConfigError(
            f"{unknown[0]!r} is not one of the planners",
            option="planner_options",
            way_out=f"Give options by planner: {', '.join(listed)}",
        )
    return Planning(
        [
            make(PLANNERS, name, options if len(listed) == 1 else options.get(name, {}), option="planner")
            for name in listed
        ]
    )


__all__ = [
    "LATER",
    "LLM",
    "NOW",
    "PLANNERS",
    "Context",
    "Edge",
    "Explicit",
    "Online",
    "Planner",
    "PlannerError",
    "Planning",
    "Proposal",
    "Retrieval",
    "make_planning",
]
