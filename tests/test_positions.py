"""Position maps by arithmetic alone, and on sessions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.positions import Bounded, Compact, Logical, position_map
from tests.conftest import random_ids
from tests.oracles import check_ledger


@given(
    budget=st.integers(2, 40),
    chunk=st.integers(1, 30),
    slack=st.integers(1, 10),
    spare=st.integers(0, 50),
    steps=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=60),
)
def test_bounded_positions_never_reach_the_limit(budget, chunk, slack, spare, steps):
    """For every limit >= budget + chunk + slack, whatever comes, and no renumbering earlier than needed."""
    limit = budget + chunk + slack + spare
    rows = next_position = 0
    for count, decoding in steps:
        incoming = 1 if decoding else min(count, chunk)
        move = Bounded(limit).renumber(next_position, incoming, next_position != rows)
        assert move == (next_position + incoming > limit), "lazily: only when the limit would be crossed"
        if move:
            next_position = rows
        next_position += incoming
        rows += incoming
        assert next_position <= limit
        if rows > budget + (slack if decoding else 0):
            rows = budget


@given(next_position=st.integers(0, 10**9), incoming=st.integers(0, 10**6), gaps=st.booleans())
def test_logical_never_and_compact_at_every_gap(next_position, incoming, gaps):
    assert not Logical().renumber(next_position, incoming, gaps)
    assert Compact().renumber(next_position, incoming, gaps) == gaps
    assert not Bounded(5).renumber(next_position, incoming, False), "nothing would change"


def test_names():
    assert position_map("bounded", 64) == Bounded(64)
    assert isinstance(position_map("bounded", None), Logical), "nothing is evicted, so no gap arises"
    assert isinstance(position_map("compact", None), Compact)
    assert isinstance(position_map("logical", None), Logical)


@settings(max_examples=15, deadline=None)
@given(pieces=st.lists(st.integers(1, 40), min_size=3, max_size=8), spare=st.integers(0, 20))
def test_a_bounded_session_stays_below_its_limit(engines, pieces, spare):
    session = engines("llama", layers=2).session(
        policy="h2o", budget=16, chunk=12, slack=4, sinks=2, limit=32 + spare
    )
    for number, count in enumerate(pieces):
        session.append_ids(random_ids(count, seed=number))
        session.force(random_ids(count % 7, seed=number))
        assert session.stats().next_position <= 32 + spare
        check_ledger(session)


def test_bounded_renumbers_rarely_and_compact_at_every_eviction(engines):
    counts = {}
    for positions in ("bounded", "compact", "logical"):
        session = engines("llama", layers=2).session(
            policy="recency",
            positions=positions,
            budget=16,
            chunk=8,
            slack=4,
            sinks=2,
            limit=64 if positions == "bounded" else None,
        )
        for number in range(40):
            session.append_ids(random_ids(8, seed=number))
        counts[positions] = session.stats().renumbers
    # 38 evictions; between two renumberings a bounded session writes 64 - 16 positions.
    assert counts == {"logical": 0, "compact": 38, "bounded": 6}


@pytest.mark.parametrize("positions", ["bounded", "compact", "logical"])
def test_full_cache_has_no_gaps(engines, positions):
    session = engines("llama", layers=2).session(policy="full", positions=positions, chunk=16)
    session.append_ids(random_ids(60))
    session.force(random_ids(5))
    session.drop_last(20)
    session.append_ids(random_ids(10))
    stats = session.stats()
    assert (stats.next_position, stats.resident, stats.renumbers, stats.limit) == (55, 55, 0, None)
    check_ledger(session)


@pytest.mark.parametrize("seed", range(25))
def test_bounded_positions_stay_below_the_limit_whatever_is_taken_back(engines, seed):
    """Parts of chunks are computed, then taken back: what room is made for them leaves gaps."""
    draw = random.Random(seed)
    budget, chunk, slack = draw.randint(8, 40), draw.randint(3, 24), draw.randint(1, 6)
    limit = budget + chunk + slack
    engine = engines("qwen2")
    session = engine.session(
        policy=draw.choice(["h2o", "recency", "random"]), budget=budget, chunk=chunk, slack=slack, limit=limit
    )
    for turn in range(12):
        if draw.random() < 0.5:
            session.append_ids(random_ids(draw.randint(1, 30), turn))
        session.queue_ids(random_ids(draw.randint(1, 60), turn))
        engine.step([session], limits={session: draw.randint(1, chunk)})
        session.keep_first(max(0, len(session) - draw.randint(0, 5)))
        assert session.memory.ledger.next_position <= limit
        session.memory.check_integrity()
