"""What a session's memory looks like from outside, as plain data: the contract between the server and its page.

Shares are percents, whole numbers from 0 to 100. Token counts of a cache whose layers keep different tokens are means
over the layers. Spans are listed as blocks over logical time; where there are more of them than anyone can look at,
neighbours are merged, so that the answer stays small however long the session is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure.tiers.archive import span_archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tenure.ledger import Ledger
    from tenure.memory import Memory
    from tenure.plan import Plan
    from tenure.session import Session
    from tenure.spans import Span

MOST_BLOCKS = 400
_MOST_READERS = 8
_MOST_STEPS = 200


def session_summary(session: Session) -> dict[str, Any]:
    """The few numbers of a list of sessions; costs nothing that grows with the session."""
    memory = session.memory
    return {
        "tokens": len(memory.ids),
        "waiting": memory.waiting,
        "resident": memory.ledger.rows,
        "budget": memory.config.budget,
        "evicted": memory.ledger.evicted_ever,
        "spans": len(memory.ledger.spans),
        "kv_bytes": memory.nbytes,
    }


def memory_view(
    session: Session, *, start: int = 0, stop: int | None = None, most: int = MOST_BLOCKS
) -> dict[str, Any]:
    """The whole picture of a session, with blocks for a window of logical time.

    To be called where no forward of the session is running. The cost is one pass over the ledger and the spans.

    Args:
        session: to look at; a closed one can still be read.
        start: first logical index of the window.
        stop: behind its last one; None is the end of the session. The window is clipped to the session.
        most: spans in the window that get a block each; of more, neighbours are merged to about that many blocks, at
            most twice as many.

    Returns:
        See ``docs/server.md``, "Memory".
    """
    memory, ledger, plan = session.memory, session.memory.ledger, session.plan
    config = memory.config
    length = ledger.length
    start = max(0, min(start, length))
    stop = length if stop is None else max(start, min(stop, length))
    facts = _Facts.of(ledger)
    archive = span_archive(memory.archive)
    layout = memory.device.layout
    places = {} if archive is None else archive.places()
    spans = list(ledger.spans)
    return {
        **session_summary(session),
        "capacity": None if config.capacity is None else memory.rows.capacity,
        "policy": config.policy,
        "positions": config.positions,
        "next_position": ledger.next_position,
        "limit": config.position_limit,
        "renumbers": ledger.renumbers,
        "sinks": config.sinks,
        "layers": layout.layers,
        "groups": ledger.groups,
        "full_kv_bytes": length * layout.token_bytes,
        "compressed": round(memory.frozen.entries / (layout.layers * layout.kv_heads), 1),
        "pinned": {pin: sum(len(one) for one in spans if one.pin == pin) for pin in ("hard", "soft")},
        "evictions": _lost(spans, ledger.groups),
        "regions": _regions(spans, facts, ledger.groups),
        "plan": _plan(plan),
        "planned": _planned(ledger, plan, facts),
        "tiers": _tiers(spans, places),
        "traffic": None if archive is None else archive.counters.to_json(),
        "window": [start, stop],
        "blocks": [
            _block(run, first, facts, memory, plan, places)
            for first, run in _runs(ledger, plan, start, stop, most)
        ],
    }


@dataclass(frozen=True)
class _Facts:
    """Per-span sums over the resident rows.

    Args:
        count: resident tokens, ``[groups, spans]``.
        low, high: smallest and largest rotary position of the residents, ``[spans]``.
        position: sum of the residents' positions, ``[spans]`` fp64.
    """

    count: Tensor
    low: Tensor
    high: Tensor
    position: Tensor

    @classmethod
    def of(cls, ledger: Ledger) -> _Facts:
        number = len(ledger.spans)
        if not number:
            empty = torch.zeros(0, dtype=torch.int64)
            return cls(torch.zeros(ledger.groups, 0, dtype=torch.int64), empty, empty, empty.double())
        logical = ledger.logical[:, : ledger.rows]
        owner = ledger.span_index(logical).cpu()
        position = ledger.position[:, : ledger.rows].cpu()
        offset = torch.arange(ledger.groups)[:, None] * number
        count = torch.bincount((owner + offset).flatten(), minlength=ledger.groups * number)
        flat, places = owner.flatten(), position.flatten()
        edge = torch.zeros(number, dtype=torch.int64)
        return cls(
            count.view(ledger.groups, number),
            edge.scatter_reduce(0, flat, places, "amin", include_self=False),
            edge.scatter_reduce(0, flat, places, "amax", include_self=False),
            torch.bincount(flat, weights=places.double(), minlength=number),
        )


def _runs(
    ledger: Ledger, plan: Plan, start: int, stop: int, most: int
) -> Iterator[tuple[int, Sequence[Span]]]:
    """Runs of neighbouring spans that make one block each, with the number of their first span."""
    table = ledger.spans
    if start >= stop:
        return
    first, last = table.index_at(start), table.index_at(stop - 1)
    spans = [table[number] for number in range(first, last + 1)]
    width = 0
    marked: set[str] = set()
    if len(spans) > most:
        width = 2 * (stop - start) // max(1, most)
        marked = {one.id for one in spans if one.pin is not None or plan.delta(one.id) is not None}
        if len(marked) > most // 2:
            marked = set()  # too many to stand alone
    run: list[Span] = []
    tokens = 0
    for number, span in enumerate(spans, first):
        if run and (tokens + len(span) > width or span.id in marked or run[-1].id in marked):
            yield number - len(run), run
            run, tokens = [], 0
        run.append(span)
        tokens += len(span)
    yield last + 1 - len(run), run


def _block(
    run: Sequence[Span], first: int, facts: _Facts, memory: Memory, plan: Plan, places: Mapping[str, str]
) -> dict[str, Any]:
    ledger = memory.ledger
    part = slice(first, first + len(run))
    count = facts.count[:, part].sum(1)
    held = int(count.sum())
    tokens = run[-1].stop - run[0].start
    there = facts.count[:, part].sum(0) > 0
    block: dict[str, Any] = {
        "start": run[0].start,
        "stop": run[-1].stop,
        "spans": len(run),
        "resident": percent(held, tokens * ledger.groups),
        "positions": None,
        "gap": round(ledger.next_position - float(facts.position[part].sum()) / held) if held else None,
        "evicted": _lost(run, ledger.groups),
    }
    if held:
        block["positions"] = [int(facts.low[part][there].min()), int(facts.high[part][there].max())]
    if ledger.groups > 1:
        block["by_layer"] = [percent(one, tokens) for one in count.tolist()]
    if memory.frozen.segments:
        block["compressed"] = round(memory.frozen.inside(run[0].start, run[-1].stop), 1)
    if places:
        block["retrievable"] = percent(sum(len(one) for one in run if one.id in places), tokens)
        block["restored"] = sum(one.restored for one in run)
    if len(run) == 1:
        if run[0].id in places:
            block["tier"] = places[run[0].id]
        readers = [step.id for step in plan.readers(run[0].id) if step.id not in plan.finished]
        return {
            **block,
            "id": run[0].id,
            "region": str(run[0].region),
            "role": run[0].role,
            "pin": run[0].pin,
            "next": plan.delta(run[0].id),
            "readers": readers[:_MOST_READERS],
            "more_readers": max(0, len(readers) - _MOST_READERS),
        }
    regions: Counter[str] = Counter()
    for span in run:
        regions[str(span.region)] += len(span)
    distances = [delta for one in run if (delta := plan.delta(one.id)) is not None]
    return {
        **block,
        "region": regions.most_common(1)[0][0],
        "regions": dict(regions.most_common()),
        "first": run[0].id,
        "last": run[-1].id,
        "pins": sum(one.pin is not None for one in run),
        "next": min(distances, default=None),
    }


def _regions(spans: Sequence[Span], facts: _Facts, groups: int) -> dict[str, dict[str, float]]:
    held = (facts.count.sum(0).double() / groups).tolist()
    found: dict[str, dict[str, float]] = {}
    for span, resident in zip(spans, held, strict=True):
        row = found.setdefault(str(span.region), {"spans": 0, "tokens": 0, "resident": 0.0})
        row["spans"] += 1
        row["tokens"] += len(span)
        row["resident"] += resident
    for row in found.values():
        row["resident"] = round(row["resident"], 1)
    return found


def _tiers(spans: Sequence[Span], places: Mapping[str, str]) -> list[dict[str, Any]]:
    """What of the session each tier holds, in the order of first use."""
    found: dict[str, dict[str, Any]] = {}
    for span in spans:
        if (name := places.get(span.id)) is not None:
            row = found.setdefault(name, {"name": name, "spans": 0, "tokens": 0})
            row["spans"] += 1
            row["tokens"] += len(span)
    return list(found.values())


def _plan(plan: Plan) -> dict[str, Any]:
    """The steps around the current one, at most ``_MOST_STEPS``."""
    current = plan.current
    place = next((number for number, step in enumerate(plan.steps) if step is current), len(plan))
    first = max(0, min(place - _MOST_STEPS // 4, len(plan) - _MOST_STEPS))
    return {
        "current": current.id if current else None,
        "total": len(plan),
        "finished": len(plan.finished),
        "first": first,
        "steps": [
            {
                "id": step.id,
                "reads": list(step.reads[:_MOST_READERS]),
                "more_reads": max(0, len(step.reads) - _MOST_READERS),
                "state": "current" if step is current else "done" if step.id in plan.finished else "coming",
            }
            for step in plan.steps[first : first + _MOST_STEPS]
        ],
    }


def _planned(ledger: Ledger, plan: Plan, facts: _Facts) -> dict[str, Any]:
    """How much of what coming steps read is resident, over tokens."""
    wanted = [
        ledger.spans.index_at(ledger.spans.get(name).start) for name in plan.planned() if name in ledger.spans
    ]
    tokens = sum(len(ledger.spans[number]) for number in wanted)
    held = int(facts.count[:, wanted].sum()) if wanted else 0
    return {
        "spans": len(wanted),
        "tokens": tokens,
        "resident": percent(held, tokens * ledger.groups) if tokens else None,
    }


def _lost(spans: Iterable[Span], groups: int) -> dict[str, float]:
    """Evicted slots by reason, as tokens a layer."""
    counts: Counter[str] = Counter()
    for span in spans:
        counts.update(span.evicted)
    return {reason: round(count / groups, 1) for reason, count in counts.most_common() if count}


def percent(part: float, whole: float) -> int:
    """A share as 0..100; only nothing is 0 and only everything is 100, so that a rest is never rounded away."""
    if part <= 0 or whole <= 0:
        return 0
    return 100 if part >= whole else max(1, min(99, round(100 * part / whole)))
