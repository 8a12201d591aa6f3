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


@pytest.mark.parametrize("limit", [None, 21])
@pytest.mark.parametrize("policy", ["h2o", "memdecay"])
def test_one_token_of_a_prompt_is_read_although_the_turn_is_open(engines, policy, limit):
    """65 tokens leave a chunk with one, and so do 21 at a time: none of them is an answer's."""
    states = []
    for answers in (False, True):
        session = chat_session(engines, policy=policy, budget=256, chunk=64)
        session.queue_ids(random_ids(65))
        turn = session.start_turn(max_tokens=12) if answers else None
        while session.engine.step([session], limits=None if limit is None else {session: limit}):
            if turn is not None and turn.done:
                break
        if turn is not None:
            turn.close()
            assert len(turn.ids) == 12
            session.keep_first(65)
        states.append(state(session))
    assert states[0] == states[1]
    assert states[0][0]["steps"] == 65 / 64


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


@pytest.mark.parametrize("policy", ["h2o", "memdecay"])
def test_a_question_in_the_place_of_another(engines, policy):
    """Right behind an answer its end tells more than the end of the next question, and right before that one this."""
    session = begun(engines, policy, granularity="session")
    session.force(random_ids(10))
    (_, stored, slots), count = state(session), len(session)
    session.append_ids(random_ids(300, seed=3)[:12], region="user")
    end = state(session)[2]
    near, late = session.fork(), session.fork()
    late.append_ids(random_ids(4, seed=4), region="user")
    session.keep_first(count + 1)
    for name in ("score", "energy"):
        assert state(session)[2][name][0][:count] == slots[name][0]
    for one in (near, late):
        one.keep_first(count + 11)
        for name in ("score", "energy"):
            assert state(one)[2][name][0] == end[name][0][:-1]
    assert state(session)[1] == stored


def test_another_token_in_the_place_of_the_last(engines):
    """What was remembered right behind a token holds for that token only."""
    session = begun(engines, "h2o")
    other = (session.memory.ids[69] + 1) % 300
    session.keep_first(69)
    twin = session.fork()
    twin.memory.past._ahead = None
    for one in (session, twin):
        one.append_ids([other])
    assert state(session) == state(twin)


def test_clocks_of_a_last_token_that_is_computed_again(engines):
    """Behind answers clocks do not go in proportion, yet the same token brings them back."""
    session = begun(engines, "memdecay")
    session.force(random_ids(20))
    session.append_ids(random_ids(9, seed=5), region="user")
    session.keep_first(60)  # nothing that is remembered is left
    session.append_ids(random_ids(20, seed=6), region="user")
    want, last = state(session), session.memory.ids[-1]
    for again in (lambda: session.append_ids([last], region="user"), lambda: session.force([last])):
        session.keep_first(79)
        again()
        assert state(session)[0] == want[0]
        assert [one.length for one in session.memory.past.moments] == [80]
    session.append_ids(random_ids(5, seed=7))
    assert [one.length for one in session.memory.past.moments] == [80, 85], "80 once"


@pytest.mark.parametrize("how", ["fork", "save"])
@pytest.mark.parametrize("policy", ["h2o", "memdecay"])
def test_the_end_of_an_answer_is_remembered_by_what_goes_on_from_it(engines, policy, how, tmp_path):
    session = begun(engines, policy)
    session.force(random_ids(9))
    want, count = state(session), len(session)
    if how == "save":
        session.save(tmp_path / "one")
        session = session.engine.restore(tmp_path / "one")
    else:
        session = session.fork()
    session.append_ids(random_ids(6, seed=2), region="user")
    session.keep_first(count)
    assert state(session) == want


def test_what_is_remembered_is_bounded(engines):
    session = begun(engines, "memdecay")
    for seed in range(6):
        session.append_ids(random_ids(140, seed=seed))  # three chunks
        session.force(random_ids(5, seed=seed))
    moments = session.memory.past.moments
    assert [one.length for one in moments] == [len(session) - 145, len(session) - 5]
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
