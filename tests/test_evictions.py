"""The log of evictions against the losses that the ledger counts, and its bounds."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tenure import evictions
from tenure.evictions import PAGE, EvictionLog
from tenure.sessionstate import describe, rebuild
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.policies.test_policies import TABLE, slots, view_of
from tests.test_restore import Shelf


def session_of(engines, policy="memdecay", **options):
    options = {"budget": 48, "chunk": 32, "slack": 8, "sinks": 2, "policy": policy} | options
    return engines("qwen2", layers=2).session(**options)


@pytest.mark.parametrize("seed", range(20))
def test_pages_against_one_slot_after_another(seed) -> None:
    draw = random.Random(seed)
    groups, size, span, region, tokens = draw.choice([1, 3]), draw.randint(1, 150), 0, 0, []
    for token in range(size):
        span += draw.random() < 0.1
        region = draw.choice([0, 5, 7]) if draw.random() < 0.2 else region
        plain = {"size": 1, "reader": -1, "current": False, "pin": 0, "energy": 0.0}
        tokens.append({**plain, "logical": token, "span": span, "region": region, "born": draw.randint(0, 6)})
    rows = draw.randint(1, size)
    table = [
        [
            {**tokens[token], "score": draw.randint(0, 3) / 4}
            for token in sorted(draw.sample(range(size), rows))
        ]
        for _ in range(groups)
    ]
    kept = draw.randint(0, rows)
    stays = [sorted(draw.sample(range(rows), kept)) for _ in range(groups)]
    view, kind = view_of(table, budget=rows), torch.tensor([0, 1, 2, 3, 4, 8, 6, 0, 8])
    view = replace(view, table=replace(view.table, kind=kind))
    log = EvictionLog()
    log.record(view, torch.tensor(stays, dtype=torch.int64).view(groups, kept), view.score, {0: "plan"})
    lost, left = {}, [0.0] * 9
    for held, mine in zip(table, stays, strict=True):
        for row, slot in enumerate(held):
            if row in mine:
                left[int(kind[slot["region"]])] += 1 / groups
            else:
                page = (slot["span"], slot["region"], slot["logical"] // PAGE)
                lost.setdefault(page, []).append(slot)
    want = []
    for (number, code, _), page in sorted(lost.items()):
        gone = {slot["logical"]: TABLE[code][2] - slot["born"] for slot in page}
        score, age = sum(slot["score"] for slot in page) / len(page), sum(gone.values()) / len(gone)
        want.append([number, code, min(gone), len(gone), len(page), pytest.approx(score), pytest.approx(age)])
    told = log.to_json()
    names = ("number", "region", "start", "tokens", "slots", "score", "age")
    found = [list(page) for batch in told["batches"] for page in zip(*map(batch.get, names), strict=True)]
    assert found == want
    assert [batch["at"] for batch in told["batches"]] == [view.length] * bool(lost)
    assert told["samples"] == [[view.length, pytest.approx(left)]]


@pytest.mark.parametrize("granularity", ["session", "layer"])
@pytest.mark.parametrize("policy", ["memdecay", "h2o", "auto"])
def test_pages_add_up_to_the_losses(engines, policy, granularity) -> None:
    session = session_of(engines, policy, granularity=granularity)
    regions = ["system", "user", "scratchpad", "user", "plan"]
    for number, region in enumerate(regions):
        session.append_ids(random_ids(37, seed=number), span=f"s{number}", region=region)
        session.force(random_ids(12, seed=number))
    ledger = session.memory.ledger
    lost = Counter()
    for page in session.evictions():
        slots = page.tokens * page.layers * ledger.groups
        lost[page.span, page.reason] += round(slots)
        span = ledger.spans.get(page.span)
        assert span.start <= page.start < span.stop
        assert 1 <= page.tokens <= PAGE
        assert page.region == span.region
        assert 0 < page.layers <= 1.0
        assert 0 <= page.age <= session.memory.aging.times[page.clock]
    want = {(s.id, why): count for s in ledger.spans for why, count in s.evicted.items()}
    assert dict(lost) == want
    at, slots = session.memory.evictions.timeline(session.memory)[-1]
    assert at <= len(session)
    assert sum(slots.values()) == pytest.approx(48)


def note(log, length, rows=8, kept=2, spans=1):
    """An eviction at a length of the session: of so many rows, of as many messages, the first ones stay."""
    table = slots(rows, span=[row % spans for row in range(rows)])
    view = replace(view_of([sorted(table, key=lambda slot: slot["span"])], budget=kept), length=length)
    log.record(view, torch.arange(kept)[None], view.score, "budget")


def test_going_back_forgets_later_pages_and_points() -> None:
    log = EvictionLog()
    for length in (10, 20, 30):
        note(log, length, spans=length // 10)
    twin, told = log.fork(), log.to_json()
    log.truncate(20)
    assert log.to_json()["batches"] == told["batches"][:2]
    assert log.to_json()["samples"] == told["samples"][:2]
    assert log._pages == sum(len(batch["number"]) for batch in told["batches"][:2])
    assert twin.to_json() == told
    note(log, 25)
    assert [batch["at"] for batch in log.to_json()["batches"]] == [10, 20, 25]
    log.truncate(0)
    assert (log.to_json()["batches"], log.to_json()["samples"], log._pages) == ([], [], 0)


def test_whole_evictions_go_and_points_thin_out_evenly(monkeypatch) -> None:
    monkeypatch.setattr(evictions, "PAGES", 4)
    monkeypatch.setattr(evictions, "SAMPLES", 8)
    log = EvictionLog()
    for number, spans in enumerate((1, 3, 1, 8)):
        note(log, number, spans=spans)
    assert [batch["at"] for batch in log.to_json()["batches"]] == [3], "the newest stays, however large it is"
    note(log, 4)
    note(log, 5, spans=3)
    assert [batch["at"] for batch in log.to_json()["batches"]] == [4, 5]
    for number in range(6, 8):
        note(log, number)
    assert [at for at, _ in log.to_json()["samples"]] == list(range(8))
    for number in range(8, 200):
        note(log, number)
        told = log.to_json()
        points, every = [at for at, _ in told["samples"]], told["every"]
        assert 4 <= len(points) <= 8
        assert all(every <= two - one < 2 * every for one, two in itertools.pairwise(points)), points
        assert number - points[-1] < 2 * every


def test_the_log_is_bounded(engines, monkeypatch) -> None:
    monkeypatch.setattr(evictions, "PAGES", 20)
    monkeypatch.setattr(evictions, "SAMPLES", 8)
    session = session_of(engines, chunk=16)
    for number in range(60):
        session.append_ids(random_ids(16, seed=number))
    log = session.memory.evictions
    assert len(session.evictions()) <= 20
    points = log.timeline(session.memory)
    assert 4 <= len(points) <= 8
    assert points[0][0] < 400
    assert points[-1][0] > 700, "thinned over the whole session, not cut"
    check_ledger(session)


@pytest.mark.parametrize("policy", ["memdecay", "h2o"])
def test_a_saved_session_takes_its_log_along(engines, tmp_path, policy) -> None:
    session = session_of(engines, policy)
    for number in range(9):
        session.append_ids(random_ids(32, seed=number), region=["user", "scratchpad"][number % 2])
    session.save(tmp_path / "session")
    again = session.engine.restore(tmp_path / "session")
    assert len(session.evictions()) > 5
    for act in (
        lambda one: None,
        lambda one: one.append_ids(random_ids(64, seed=20)),
        lambda one: one.keep_first(150),
    ):
        act(session)
        act(again)
        assert again.evictions() == session.evictions()
        points = [one.memory.evictions.timeline(one.memory) for one in (session, again)]
        assert points[0] == points[1]
    log, twin = session.memory.evictions, again.memory.evictions
    assert (twin._pages, twin._every, twin._skipped) == (log._pages, log._every, log._skipped)


def test_a_file_without_a_log_begins_a_new_one(engines) -> None:
    session = session_of(engines)
    session.append_ids(random_ids(96), span="a")
    assert session.evictions()
    state, tensors = describe(session)
    del state["evictions"]
    again = rebuild(session.engine, state, tensors)
    assert again.evictions() == []
    again.append_ids(random_ids(32, seed=1), span="b")
    assert again.evictions()


def test_a_rollback_forgets_what_came_later(engines) -> None:
    session = session_of(engines)
    for number in range(6):
        session.append_ids(random_ids(32, seed=number))
    twin = session.fork()
    before = len(session.evictions())
    session.keep_first(130)
    assert all(page.at <= 130 for page in session.evictions())
    assert 0 < len(session.evictions()) < before
    assert len(twin.evictions()) == before
    session.append_ids(random_ids(64, seed=9))
    assert {page.span for page in session.evictions()} <= {span.id for span in session.memory.ledger.spans}


def test_the_timeline_shows_a_span_that_came_back(engines):
    session = engines("qwen2").session(budget=64, chunk=32, policy="h2o", archive=Shelf())
    for seed, (span, region, count) in enumerate((("a", "tools", 40), ("b", "user", 60), ("c", "user", 40))):
        session.append_ids(random_ids(count, seed + 1), span=span, region=region)
    assert session.fetch(["a"]) == ["a"]
    _, slots = session.memory.evictions.timeline(session.memory)[-1]
    ledger = session.memory.ledger
    assert slots["tools"] == 40
    assert sum(slots.values()) == ledger.rows
