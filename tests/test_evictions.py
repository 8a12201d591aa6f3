"""The log of evictions against the losses that the ledger counts, and its bounds."""

from __future__ import annotations

from collections import Counter

import pytest

from tenure import evictions
from tenure.evictions import PAGE
from tenure.sessionstate import describe, rebuild
from tests.conftest import random_ids
from tests.oracles import check_ledger


def session_of(engines, policy="memdecay", **options):
    options = {"budget": 48, "chunk": 32, "slack": 8, "sinks": 2, "policy": policy} | options
    return engines("qwen2", layers=2).session(**options)


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
