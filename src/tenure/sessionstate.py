"""A session as plain data: one JSON object and named tensors, complete enough to go on from.

Keys are stored raw and the rotated copy is derived anew; only rows of it that a rebuild would not give to the bit
are stored as they are, so that the session goes on with the very numbers that it had. Samplers are no part of it:
each turn draws with its own seed. An open turn cannot be described, so a session is taken between turns.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.cache.ragged import RaggedSegment
from tenure.config import SessionConfig
from tenure.frozen import Frozen
from tenure.guessed import Guessed
from tenure.plan import Plan
from tenure.planners.saved import planning_json, resume_planning
from tenure.regions import read_region
from tenure.skeleton import Entry, Node, State
from tenure.spans import Span
from tenure.tiers.portable import archive_json, fill_archive
from tenure.transcript import Transcript

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.ledger import Ledger
    from tenure.memory import Memory
    from tenure.session import Session

_SIZES = ("groups", "capacity")
"""Whole numbers of a ledger that are no counters."""


def describe(session: Session) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A session's state.

    Returns:
        Plain values, and tensors on the CPU: ``ids`` ``[n]``, ``keys`` and ``values`` ``[layers, kv_heads, rows, D]``,
        ``slot.NAME`` ``[groups, rows]`` for each per-slot array of the ledger,
        ``frozen.NUMBER.NAME`` for each compressed segment, ``late.NAME`` queries kept for the next one,
        ``past.NUMBER.NAME`` what slots had at the moments that are remembered,
        ``odd`` and ``odd.rotated`` (see :meth:`RowSegment.odd_rows`), ``logits`` ``[vocabulary]`` if known.
    """
    memory, ledger = session.memory, session.memory.ledger
    rows = ledger.rows
    nodes = _Nodes()
    state = {
        "config": asdict(session.config),
        "plan": session.plan.to_json(),
        "once": sorted(session.plan._once),
        "guessed": session.plan.guessed.to_json(),
        "planning": planning_json(session),
        "step": session._step,
        "unnamed": session._unnamed,
        "groups": ledger.groups,
        "capacity": ledger.capacity,
        "counters": {
            name: value
            for name, value in vars(ledger).items()
            if isinstance(value, int) and name not in _SIZES
        },
        "chunk_left": memory._chunk_left,
        "spans": [_span_json(span) for span in ledger.spans],
        "backlog": _backlog_json(memory),
        "transcript": _transcript_json(session._transcript, nodes),
        "aging": memory.aging.to_json(),
        "evictions": memory.evictions.to_json(),
        "states": [[length, nodes.state_json(one)] for length, one in session._states],
    }
    state["nodes"] = nodes.to_json()
    tensors = {
        "ids": torch.tensor(memory.ids, dtype=torch.int64).to(torch.int32),
        "keys": memory.rows.raw[:, :, :rows],
        "values": memory.rows.values[:, :, :rows],
    }
    tensors |= {f"slot.{name}": one[:, :rows] for name, one in ledger.arrays.items()}
    for number, segment in enumerate(memory.frozen.segments):
        tensors |= {f"frozen.{number}.{name}": one for name, one in segment.state().items()}
    if memory.late is not None:
        state["late"], kept = memory.late.state()
        tensors |= {f"late.{name}": one for name, one in kept.items()}
    state["past"], kept = memory.past.state()
    state["decoding"] = memory.past.decoding
    state["written"] = memory.past.written
    tensors |= {f"past.{name}": one for name, one in kept.items()}
    odd = memory.rows.odd_rows()
    if odd is not None:
        tensors |= {"odd": odd[0], "odd.rotated": odd[1]}
    if session.logits is not None:
        tensors["logits"] = session.logits
    state["archive"] = archive_json(memory, tensors)
    return state, {name: one.cpu().contiguous() for name, one in tensors.items()}


def rebuild(engine: Engine, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Session:
    """A session in the state that :func:`describe` gave.

    Raises:
        ConfigError: its options cannot work here, its slab does not fit the memory for example.
        KeyError, TypeError, ValueError, RuntimeError: the data is not what ``describe`` gives.
    """
    config = SessionConfig(**state["config"])
    told = state["transcript"] or {"tools": [], "template_options": {}}
    session = engine.session(
        config,
        plan=Plan.from_json(state["plan"]),
        tools=told["tools"],
        template_options=told["template_options"],
    )
    memory, ledger = session.memory, session.memory.ledger
    if ledger.groups != state["groups"]:
        raise ValueError(f"{state['groups']} groups of slots, the policy has {ledger.groups} here")
    memory.ids = array("I", tensors["ids"].numpy().tobytes())
    _fill_frozen(memory, tensors)
    memory.resize(state["capacity"])
    for span in state["spans"]:
        ledger.spans.add(_span(span))
    memory.aging.fill(state["aging"])
    _fill_slots(ledger, state["counters"], tensors)
    odd = (tensors["odd"], tensors["odd.rotated"]) if "odd" in tensors else None
    memory.rows.fill(tensors["keys"], tensors["values"], odd)
    _fill_late(memory, state.get("late"), tensors)
    memory.past.fill(state.get("past", []), _of("past.", memory, tensors))
    memory.past.decoding = state.get("decoding", False)
    for name in state.get("written", ()):
        memory.past.wrote(name)
    _fill_backlog(memory, state["backlog"])
    memory._chunk_left = state["chunk_left"]
    if "evictions" in state:  # files of earlier versions have no log of them
        memory.evictions.fill(state["evictions"])
    fill_archive(memory, state["archive"], tensors)
    session.logits = tensors["logits"].to(engine.layout.device) if "logits" in tensors else None
    session.plan._once.update(state["once"])
    session.plan.guessed = Guessed.from_json(state.get("guessed", ()))
    resume_planning(session, state["planning"])
    session._step, session._unnamed = state["step"], state["unnamed"]
    nodes = _read_nodes(state["nodes"])
    session._states = [(length, _state(one, nodes)) for length, one in state["states"]]
    if session._transcript is not None and "state" in told:
        session._transcript.restore(_state(told["state"], nodes))
    session.check_integrity()
    return session


def _span_json(span: Span) -> dict[str, Any]:
    return {field.name: getattr(span, field.name) for field in fields(span)}


def _span(data: Mapping[str, Any]) -> Span:
    parts = [(offset, read_region(region)) for offset, region in data["parts"]]
    region = read_region(data["region"])
    return Span(**{**data, "region": region, "evicted": Counter(data["evicted"]), "parts": parts})


def _fill_slots(ledger: Ledger, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    for name, value in counters.items():
        setattr(ledger, name, value)
    for name, one in ledger.arrays.items():
        one[:, : ledger.rows] = tensors[f"slot.{name}"]


def _fill_frozen(memory: Memory, tensors: Mapping[str, Tensor]) -> None:
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("frozen.")}
    device = memory.device
    segments = []
    for number in sorted(numbers):
        start = f"frozen.{number}."
        state = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
        segments.append(
            RaggedSegment.load(state, device.layout, memory.angles, device.kernels, copy=device.copy)
        )
    memory.freeze(Frozen(tuple(segments)))


def _fill_late(memory: Memory, values: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    if memory.late is not None and values is not None:
        memory.late.fill(values, _of("late.", memory, tensors))


def _of(start: str, memory: Memory, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of the name, on the memory's device."""
    device = memory.device.layout.device
    return {
        name.removeprefix(start): one.to(device) for name, one in tensors.items() if name.startswith(start)
    }


def _backlog_json(memory: Memory) -> list[dict[str, Any]]:
    """Tokens that wait, by span; a span of the table by its id alone, one that is yet to come as a whole."""
    known: set[str] = {span.id for span in memory.ledger.spans}
    found = []
    for span, ids, region in memory.backlog:
        named = span.id if span.id in known else _span_json(span)
        found.append({"ids": list(ids), "span": named, "region": region})
        known.add(span.id)
    return found


def _fill_backlog(memory: Memory, items: Iterable[Mapping[str, Any]]) -> None:
    spans = {span.id: span for span in memory.ledger.spans}
    for item in items:
        named = item["span"]
        span = spans[named] if isinstance(named, str) else _span(named)
        spans[span.id] = span
        memory.queue(item["ids"], span, read_region(item["region"]))


class _Nodes:
    """The history's skeleton, each node once however many states share it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._nodes: list[Node] = []

    def place(self, node: Node | None) -> int | None:
        """Number of a node; its parents come before it."""
        new = []
        while node is not None and id(node) not in self._places:
            new.append(node)
            node = node.parent
        for one in reversed(new):
            self._places[id(one)] = len(self._nodes)
            self._nodes.append(one)
        first = new[0] if new else node
        return None if first is None else self._places[id(first)]

    def state_json(self, state: State) -> dict[str, Any]:
        """A state that refers to nodes by number."""
        return {
            "last": self.place(state.last),
            "rules": [entry._asdict() for entry in state.rules],
            "started": state.started,
            "turn": state.turn,
            "read": state.read,
            "carry": state.carry,
        }

    def to_json(self) -> list[list[Any]]:
        """Parent and entry of each node."""
        return [[self.place(node.parent), node.entry._asdict()] for node in self._nodes]


def _read_nodes(items: Iterable[Sequence[Any]]) -> list[Node]:
    nodes: list[Node] = []
    for parent, entry in items:
        nodes.append(Node(None if parent is None else nodes[parent], _entry(entry)))
    return nodes


def _entry(data: Mapping[str, Any]) -> Entry:
    return Entry(**{**data, "calls": tuple((call, name) for call, name in data["calls"])})


def _state(data: Mapping[str, Any], nodes: Sequence[Node]) -> State:
    last = data["last"]
    return State(
        **{
            **data,
            "last": None if last is None else nodes[last],
            "rules": tuple(map(_entry, data["rules"])),
        }
    )


def _transcript_json(transcript: Transcript | None, nodes: _Nodes) -> dict[str, Any] | None:
    if transcript is None:
        return None
    return {
        "state": nodes.state_json(transcript.snapshot()),
        "tools": transcript.tools,
        "template_options": transcript.template_options,
    }
