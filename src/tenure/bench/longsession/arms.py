"""The arms: each is a setting of the same code. To add one, add a line to ``ARMS``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tenure.config import SessionConfig
from tenure.errors import ConfigError

Kind = Literal["session", "control", "text"]
Told = Literal["nothing", "steps", "plan", "text"]

HOST = 4 << 30
"""Bytes of host memory for the evicted spans of arms that can fetch them again; used only as spans come."""


@dataclass(frozen=True)
class Arm:
    """A setting.

    Args:
        name: on the command line and in results.
        about: one line for tables.
        options: fields of ``SessionConfig`` besides budget, chunk and limit.
        told: the whole ``plan``; the plan as ``text`` in a message, for planners that read it there; its ``steps``
            without what they read; or ``nothing``, no steps at all.
        kind: ``session`` reads everything; ``control`` keeps everything of a session that is cut to the control's
            length; ``text`` reads only the newest text that fits the budget, when it is asked.
        host: bytes of host memory for evicted spans; 0 loses them.
        named: whether spans have the task's names. False numbers them, where a model reads their ids, since
            ``def-fees`` beside ``survey-12-1`` would tell what to keep.
        version: of the setting; results of an older one count as missing.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    told: Told = "nothing"
    kind: Kind = "session"
    host: int = 0
    named: bool = True
    version: int = 1

    def config(self, *, budget: int, chunk: int, limit: int | None, seed: int) -> SessionConfig:
        """The checked config of its sessions."""
        if self.kind != "session":
            return SessionConfig(policy="full", budget=None, positions="logical", chunk=chunk)
        options = dict(self.options)
        if options.get("policy") == "random":
            options["policy_options"] = {"seed": seed}
        bound = limit if options.get("positions") == "bounded" else None
        return SessionConfig(budget=budget, chunk=chunk, limit=bound, **options)


def _session(
    name: str,
    about: str,
    policy: str,
    positions: str,
    *,
    told: Told = "nothing",
    planner: str | None = None,
) -> Arm:
    options = {"policy": policy, "positions": positions}
    return Arm(name, about, options if planner is None else options | {"planner": planner}, told)


def _pace(name: str, about: str, planner: str, told: Told, **options: Any) -> Arm:
    arm = _session(name, about, "foresight", "bounded", told=told, planner=planner)
    return replace(arm, options={**arm.options, "planner_options": options}, host=HOST)


_ALL = (
    Arm("none", "keeps everything, in a session of at most 8K tokens", kind="control"),
    Arm("truncation", "the newest text that fits the budget", kind="text"),
    _session("random", "keeps slots at random", "random", "logical"),
    _session("recency", "keeps sinks and the newest slots", "recency", "logical"),
    _session("streaming", "recency with cache-relative positions", "recency", "compact"),
    _session("snapkv", "keeps what the newest queries look at", "snapkv", "logical"),
    _session("h2o", "attention scores decide", "h2o", "logical"),
    _session("memdecay", "regions and decaying scores decide", "memdecay", "logical"),
    _session("foresight", "the plan decides", "foresight", "logical", told="plan"),
    _session("bounded", "attention scores decide, positions stay bounded", "h2o", "bounded"),
    _session("pace", "the plan decides, positions stay bounded", "foresight", "bounded", told="plan"),
    _session("auto", "pins, then the plan, then regions and attention", "auto", "bounded", told="plan"),
    Arm(
        "compressed",
        "no plan: old turns are compressed, positions stay bounded",
        {"policy": "auto", "positions": "bounded", "compress": "gracekv", "compress_ratio": 8.0},
    ),
    # Reads plans and fetches nothing, so it has no archive.
    replace(_pace("pace-explicit", "the agent writes its plan into a message", "explicit", "text"), host=0),
    _pace("pace-online", "no plan: names that came before say what a turn reads", "online", "nothing"),
    _pace("pace-retrieval", "no plan: retrieval finds what a turn reads", "retrieval", "nothing"),
    _pace("pace-keys", "the same by the products of keys and queries", "retrieval", "nothing", scorer="keys"),
    # Asked with every message, since by the time of the probes the definitions are not among the latest spans.
    replace(
        _pace("pace-llm", "the model itself says what coming steps read", "llm", "steps", on="message"),
        named=False,
        version=2,
    ),
    _pace("pace-backed", "the plan, and retrieval for what it lacks", "retrieval", "plan"),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}
"""Every arm by name, in the order of tables."""

ABLATION = "none,h2o,foresight,bounded,pace"
"""The 2x2 and its control."""


def chosen(names: str) -> list[Arm]:
    """Arms by names that are separated by commas, in the order of the table.

    Raises:
        ConfigError: an unknown name, or none at all.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise ConfigError(
            f"{unknown[0]!r} is not known" if unknown else "no arm is named",
            option="arms",
            way_out="Known: " + ", ".join(ARMS),
        )
    return [arm for name, arm in ARMS.items() if name in wanted]
