"""Tokens taken back leave no trace in clocks and scores."""

from __future__ import annotations

import pytest
import torch

from tenure.past import MOMENTS
from tests.chats import chat_session, system, user
from tests.conftest import random_ids
from tests.planners.chats import filler

POLICIES = ["h2o", "memdecay", "auto", "snapkv", "foresight", "recency"]


def state(session):
    """Clocks and slots, to the bit."""
    ledger, aging = session.memory.ledger, session.memory.aging
    rows = slice(0, ledger.rows)
    slots = {name: getattr(ledger, name)[:, rows].tolist() for name in ("logical", "score", "energy", "born")}
    return dict(aging.times), None if aging.stored is None else aging.stored.tolist(), slots


def begun(engines, policy, **options):
    session = engines("llama").session(policy=policy, budget=96, chunk=64, slack=8, **options)
    session.append_ids(random_ids(40), region="system")
    session.append_ids(random_ids(30, seed=1), region="user")
    return session


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_taken_back_were_never_there(engines, policy):
    session = begun(engines, policy)
    want, count = state(session), len(session)
    for seed in range(12):
        session.force(random_ids(20, seed=seed))
        session.keep_first(count)
        assert state(session) == want
    fresh = begun(engines, policy)
    for one in (session, fresh):
        for seed in range(4):
            one.append_ids(random_ids(30, seed=50 + seed), region="tool_output")
    assert state(session) == state(fresh)


@pytest.mark.parametrize("policy", ["h2o", "memdecay", "auto"])
def test_answers_that_are_written_again(engines, policy):
    """A client that sends everything each time, and asks for another answer: one token is computed anew."""
    options = {"policy": policy, "budget": 256, "chunk": 64}
    chat = [system("be exact"), user(filler(1, 20))]
    session = chat_session(engines, **options)
    session.sync(chat)
    want = state(session)
    for _ in range(5):
        list(session.generate(max_tokens=12))
        session.sync(chat)
        assert state(session) == want


def test_rows_that_went_in_the_meantime_stay_gone(engines):
    session = begun(engines, "h2o", granularity="session")
    want, count = state(session)[2], len(session)
    scores = dict(zip(want["logical"][0], want["score"][0], strict=True))
    session.force(random_ids(60))
    session.keep_first(count)
    got = state(session)[2]
    assert 0 < len(got["logical"][0]) < len(want["logical"][0]), "the answer has pushed some out"
    assert got["score"][0] == [scores[logical] for logical in got["logical"][0]]


def test_between_moments_clocks_go_in_proportion(engines):
    session = begun(engines, "memdecay")
    session.force(random_ids(20))
    steps = session.memory.aging.times["steps"]
    session.keep_first(len(session) - 5)  # a stop string was found
    assert session.memory.aging.times == {"tokens": 85, "steps": pytest.approx(steps - 5), "turns": 2}
    session.keep_first(35)
    times = session.memory.aging.times
    assert times["tokens"] == 35
    assert times["steps"] == pytest.approx(35 / 64)
    assert times["turns"] == 1
    ledger = session.memory.ledger
    assert float(ledger.born[:, : ledger.rows].max()) <= times["steps"]
    session.keep_first(0)
    assert set(session.memory.aging.times.values()) == {0.0}


def test_a_question_in_the_place_of_another(engines):
    """Behind an answer the moment before the first question tells more than the one behind it."""
    session = begun(engines, "h2o", granularity="session")
    session.force(random_ids(10))
    want, count = state(session)[2]["score"][0], len(session)
    session.append_ids(random_ids(300, seed=3)[:12], region="user")
    session.keep_first(count + 1)
    assert state(session)[2]["score"][0][:count] == want


def test_what_is_remembered_is_bounded(engines):
    session = begun(engines, "memdecay")
    for seed in range(6):
        session.append_ids(random_ids(40, seed=seed))
        session.force(random_ids(5, seed=seed))
    moments = session.memory.past.moments
    assert len(moments) == MOMENTS
    assert all(one.slots["logical"].shape[1] <= 96 + 8 for one in moments)


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_and_saved_sessions_go_back_alike(engines, policy, tmp_path):
    engine = engines("llama")
    session = begun(engines, policy)
    want, count = state(session), len(session)
    session.force(random_ids(9))
    session.save(tmp_path / "one")
    fork, again = session.fork(), engine.restore(tmp_path / "one")
    for one in (fork, again, session):
        one.keep_first(count)
        assert state(one) == want
    fork.force(random_ids(5))
    assert state(session) == want


def test_a_saved_session_waits_for_the_token_that_was_taken_back(engines, tmp_path):
    session = begun(engines, "h2o")
    want = state(session)
    session.force(random_ids(9))
    session.keep_first(70)
    session.memory.retake_last()
    session.save(tmp_path / "one")
    again = session.engine.restore(tmp_path / "one")
    for one in (session, again):
        one.engine.drain([one])
        assert state(one) == want


def test_without_moments_clocks_still_go_back(engines):
    session = begun(engines, "memdecay")
    session.force(random_ids(30))
    session.memory.past.moments.clear()
    session.keep_first(70)
    assert session.memory.aging.times["tokens"] == 70
    assert session.memory.aging.times["steps"] < 31
    assert bool((session.memory.aging.stored <= session.memory.aging.vectors().now).all())
    assert torch.isfinite(session.memory.policy.priority(session.memory.view())).all()
    session.append_ids([7])
