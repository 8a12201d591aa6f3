"""What tests hold a session against: O1 (fresh run), O3 (ledger), O5 (script), and its whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.conftest import stock_logits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tenure import Session


def check_ledger(session: Session) -> None:
    """O3, written out slot by slot: nothing here comes from the ledger's own check."""
    memory, ledger = session.memory, session.memory.ledger
    rows, length = ledger.rows, len(session)
    assert rows == memory.rows.rows == length - ledger.evictions
    assert ledger.length == length == len(memory.ids)
    limit = session.config.position_limit
    for logical, position in zip(ledger.logical.tolist(), ledger.position.tolist(), strict=True):
        held, places = logical[:rows], position[:rows]
        assert held == sorted(set(held)), "logical indices ascend"
        assert all(0 <= token < length for token in held)
        assert places == sorted(set(places)), "positions ascend"
        assert all(0 <= place < ledger.next_position for place in places)
        assert limit is None or all(place < limit for place in places)
        assert set(range(min(session.config.sinks, length))) <= set(held), "sinks stay"
    if session.config.positions == "compact" and ledger.groups == 1:
        assert ledger.next_position == rows + memory.frozen.slots, "position = row, less what is compressed"
    if session.config.positions == "logical":
        assert ledger.next_position == length
        assert torch.equal(ledger.position[:, :rows], ledger.logical[:, :rows])
    edge = 0
    for span in ledger.spans:
        assert span.start == edge, "spans cover the tokens"
        assert span.stop > span.start
        edge = span.stop
        slots = len(span) * ledger.groups
        here = sum(
            span.start <= token < span.stop for held in ledger.logical[:, :rows].tolist() for token in held
        )
        assert sum(span.evicted.values()) == slots - here, f"losses of {span.id}: {span.evicted}"
        assert all(count > 0 for count in span.evicted.values())
        if span.pin == "hard":
            assert here == slots, "hard pins stay"
    assert edge == length
    for segment in memory.frozen.segments:
        entries = segment.entries
        assert bool((entries.position < ledger.next_position).all()), "entries stand before the next token"
        first, last = ledger.span_index(entries.start.long()), ledger.span_index(entries.stop.long() - 1)
        assert torch.equal(first, last), "an entry stands for tokens of one message"
    if memory.config.budget is not None and memory.policy.evicts:
        fixed = session.config.sinks + sum(len(span) for span in ledger.spans if span.pin == "hard")
        assert memory.row_budget > min(fixed, memory.config.budget - 1), (
            "compressed tokens leave room for rows"
        )
        if memory._chunk_left == memory.config.chunk:
            assert rows <= memory.row_budget + memory.config.slack, "between chunks the budget holds"
    for tensor in (memory.rows.raw, memory.rows.values, memory.rows.rotated):
        if tensor is not None:
            assert tensor[:, :, :rows].isfinite().all(), "no freed slot is resident"
    assert ledger.score[:, :rows].isfinite().all()
    session.check_integrity()


def state_of(session: Session) -> dict[str, Any]:
    """Everything a session is made of, by value: two equal results mean a byte-identical session."""
    memory, ledger = session.memory, session.memory.ledger
    rows = ledger.rows

    def content(tensor: torch.Tensor | None) -> bytes | None:
        return None if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()

    arrays = {name: content(array[:, :rows]) for name, array in ledger.arrays.items()}
    for name in ("raw", "values", "rotated"):
        tensor = getattr(memory.rows, name)
        arrays[name] = None if tensor is None else content(tensor[:, :, :rows])
    counters = ("rows", "length", "next_position", "renumbers", "evictions", "evicted_ever", "groups")
    return {
        **arrays,
        **{name: getattr(ledger, name) for name in counters},
        "ids": memory.ids.tobytes(),
        "spans": [
            (
                s.id,
                s.start,
                s.stop,
                s.region,
                s.role,
                s.pin,
                dict(s.evicted),
                s.restored,
                s.message,
                list(s.parts),
            )
            for s in ledger.spans
        ],
        "backlog": [(span.id, span.pin, list(ids), region) for span, ids, region in memory.backlog],
        "compressed": [
            (*block, content(one.entries.position))
            for block, one in zip(memory.frozen.blocks, memory.frozen.segments, strict=True)
        ],
        "clocks": memory.aging.to_json(),
        "moments": [(one.length, dict(one.times)) for one in memory.past.moments],
        "logits": content(session.logits),
        "plan": session.plan.to_json(),
        "transcript": None if session._transcript is None else session._transcript.snapshot(),
        "states": list(session._states),
        "turn": session._turn,
        "step": session._step,
    }


def fresh_logits(model: Any, session: Session) -> torch.Tensor:
    """O1: what the stock model says behind the session's last token, without any cache."""
    return stock_logits(model, session.memory.ids.tolist())[-1]


class Script:
    """O5: a sampler that gives out a fixed list of ids and keeps the logits that it was asked with."""

    choice = None
    finished = False

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = list(ids)
        self.logits: list[torch.Tensor] = []

    def install(self, monkeypatch: Any) -> Script:
        """Take the place of the sampler of every turn that starts from now on."""
        monkeypatch.setattr("tenure.turn.Sampler", lambda options, stop_ids: self)
        return self

    def __call__(self, logits: torch.Tensor) -> int:
        self.logits.append(logits.clone())
        return self.ids[len(self.logits) - 1]
