"""Reads that planners guess for a client's steps: they never cost the client his own."""

from __future__ import annotations

import pytest

from tenure import Plan, Step
from tenure.errors import BudgetError
from tenure.guessed import Guessed
from tenure.plan import MessageNumber, Quote
from tenure.planners import Proposal
from tenure.planners.base import Edge
from tests.chats import assistant, chat_session, user
from tests.oracles import check_ledger
from tests.planners.chats import OPTIONS, filler


def spoken(engines, **options):
    """Two spans of which either fits a step, and both do not."""
    plan = Plan([Step("look"), Step("fix")])
    session = chat_session(
        engines, **{**OPTIONS, "budget": 256, "planner": "online", "plan": plan, **options}
    )
    for number in range(2):
        session.append([user(filler(number, (24, 48)[number]), span=f"big{number}"), assistant("ok")])
    session.append([user("a b c", span="small"), assistant("ok")])
    sizes = {span.id: len(span) for span in session.memory.ledger.spans}
    room = session.memory.policy.room(256, 4)
    assert sizes["small"] + sizes["big0"] <= 128, "half of the budget, for planners"
    assert sizes["small"] + sizes["big1"] <= room - 12 < sizes["big0"] + sizes["big1"], sizes
    return session


def guess(session, *spans, step="fix", name="llm", looked=True):
    edges = [Edge(span, step, "because", 1 / (1 + n)) for n, span in enumerate(spans)]
    session.planning._enter(session, name, Proposal(edges, looked=looked))


@pytest.mark.parametrize("policy", ["foresight", "auto"])
def test_a_guess_gives_way_to_what_the_client_reads(engines, policy):
    session = spoken(engines, policy=policy, policy_options={"min_recent": 64})
    guess(session, "small", "big0")
    assert session.plan["fix"].reads == ("small", "big0")
    session.append(user("go", step="fix", reads=["big1"]))
    assert session.plan["fix"].reads == ("small", "big1"), "the surer guess fits"
    assert session.explain("big1").resident == 1.0
    check_ledger(session)


def test_what_the_client_names_itself_is_no_guess(engines):
    for name in (lambda plan: plan.add_reads("fix", ["big0"]), lambda plan: plan.set_reads("fix", ["big0"])):
        session = spoken(engines)
        guess(session, "big0")
        name(session.plan)
        with pytest.raises(BudgetError, match="step 'fix' reads"):
            session.append(user("go", step="fix", reads=["big1"]))
        assert session.plan["fix"].reads == ("big0",)


def test_a_guess_by_quote_gives_way_wherever_it_settles(engines):
    session = spoken(engines)
    guess(session, Quote(filler(0, 24)), looked=False, name="explicit")
    session.append(user("go", step="fix", reads=["big1"]))
    assert session.plan["fix"].reads == ("big1",)
    session.plan.set_reads("fix", [])
    guess(session, Quote("to come"), looked=False, name="explicit")
    session.append([user("to come " + filler(0, 20), span="new"), user("go", step="fix", reads=["big1"])])
    assert session.plan["fix"].reads == ("big1",)


def test_what_a_planner_says_takes_the_place_of_what_it_said(engines):
    session = spoken(engines)
    session.plan.add_reads("fix", ["big1"])
    guess(session, "small")
    guess(session, "big1", name="online")
    guess(session, "small", name="explicit", step="look", looked=False)
    guess(session)
    assert session.plan["fix"].reads == ("big1",), "named by the client, and by another planner after it"
    assert session.plan["look"].reads == ("small",), "what the agent has written stays"


@pytest.mark.parametrize("how", ["fork", "save"])
def test_guesses_of_forks_and_saved_sessions(engines, how, tmp_path):
    session = spoken(engines)
    guess(session, "small", "big0")
    if how == "save":
        session.save(tmp_path / "one")
        session = session.engine.restore(tmp_path / "one")
    else:
        session = session.fork()
    session.append(user("go", step="fix", reads=["big1"]))
    assert session.plan["fix"].reads == ("small", "big1")


def test_guesses_follow_references():
    plan = Plan([Step("fix", ("x",))])
    plan.add_reads("fix", [Quote("one"), MessageNumber(3), Quote("x y")], guess="llm")
    plan.add_reads("fix", [MessageNumber(3)])
    where = {Quote("one"): ["s1"], MessageNumber(3): ["s3"], Quote("x y"): ["x"]}
    plan.resolve(lambda reference: where[reference])
    assert plan["fix"].reads == ("x", "s1", "s3")
    assert plan.guessed.of("fix") == ("s1",), "x and message 3 were named"
    plan.reopen({"x", "s3"})
    assert plan["fix"].reads == ("x", Quote("one"), "s3")
    assert plan.guessed.of("fix") == (Quote("one"),)
    assert Guessed.from_json(plan.guessed.to_json()).to_json() == plan.guessed.to_json()
    twin = plan.copy()
    twin.withdraw([("fix", Quote("one")), ("fix", "x")])
    assert twin["fix"].reads == ("x", "s3")
    assert plan["fix"].reads == ("x", Quote("one"), "s3")
    plan.add_reads("fix", ["s1"], guess="llm")
    plan.add_reads("fix", [Quote("one")])
    plan.resolve(lambda reference: where[reference])
    assert plan["fix"].reads == ("x", "s1", "s3")
    assert plan.guessed.of("fix") == (), "the client's quote is the guessed span"
    plan.remove("fix")
    assert plan.guessed.to_json() == []


@pytest.mark.parametrize("order", [("client", "planner"), ("planner", "client")])
def test_what_the_client_names_in_other_words_is_no_guess(order):
    """Two references settle on one span, and one of them is the client's."""
    plan = Plan([Step("fix")])
    for who in order:
        if who == "client":
            plan.add_reads("fix", [Quote("one")])
        else:
            plan.add_reads("fix", [MessageNumber(1)], guess="llm")
    plan.resolve(lambda reference: ["s1"])
    assert plan["fix"].reads == ("s1",)
    assert plan.guessed.of("fix") == ()
    plan.withdraw([("fix", "s1")])
    assert plan["fix"].reads == ("s1",)


def test_guesses_belong_to_their_step_and_to_who_made_them_first():
    plan = Plan([Step("look"), Step("fix")])
    plan.add_reads("look", ["s1"], guess="online")
    plan.add_reads("fix", [Quote("one")], guess="llm")
    plan.add_reads("fix", [MessageNumber(1)], guess="online")
    plan.resolve(lambda reference: ["s1"])
    assert plan.guessed.of("look") == plan.guessed.of("fix") == ("s1",)
    assert plan.guessed.by("llm") == [("fix", "s1")]
    plan.set_reads("look", ["s1"])
    assert plan.guessed.of("look") == ()
    assert plan.guessed.of("fix") == ("s1",)
