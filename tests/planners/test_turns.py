"""Planners through everything that can happen to a session; what they know must be what the session holds."""

from __future__ import annotations

import random

import pytest

from tenure import Plan, Step
from tenure.planners import Planner, PlannerError, Planning, Proposal
from tenure.planners.base import LATER, NOW, Edge
from tests.chats import assistant, chat_session, system, tool, user
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.planners.chats import FACTS, OPTIONS, filler
from tests.test_restore import Shelf

ALL = {
    "planner": "explicit+online+retrieval",
    "planner_options": {"retrieval": {"scorer": "both", "allowance": 64}, "online": {"allowance": 64}},
}


@pytest.mark.parametrize("seed", range(3))
def test_planners_follow_a_session_through_everything(engines, seed):
    rng = random.Random(seed)
    sessions = [chat_session(engines, **OPTIONS, **ALL, plan=Plan([Step("a", ("s1",)), Step("b", ("s2",))]))]
    for turn in range(14):
        session = rng.choice(sessions)
        text = rng.choice([*FACTS.values(), "What of FeeRule, MAX_SHARDS and E417?", filler(turn, 12)])
        marks = {"step": rng.choice("ab")} if rng.random() < 0.2 else {}
        happens = rng.choice(["ask", "append", "cancel", "back", "fork", "sync", "call"])
        if happens == "ask":
            session.ask(user(text, **marks), max_tokens=3)
        elif happens == "append":
            session.append([user(text, **marks), assistant("$ cat a.py"), tool(f"VALUE_{turn}")])
        elif happens == "cancel":
            session.queue(user(text), reply=True)
            session.start_turn(max_tokens=9).close()
        elif happens == "back":
            session.keep_first(rng.randint(0, len(session)))
        elif happens == "fork" and len(sessions) < 4:
            sessions.append(session.fork())
        elif happens == "sync":
            session.sync([user(FACTS["rule"]), assistant("ok"), user(text)], reply=False)
        else:
            session.append([user(text), assistant('<plan>[{"id": "c", "reads": [{"message": 0}]}]</plan>')])
        session.append(user(f"so far {turn}"))
        check_ledger(session)
        computed = [span.id for span in session.memory.ledger.spans]
        _, online, retrieval = session.planning.planners
        assert set(online._spans) == set(retrieval._index._documents)
        # What was waiting at the last boundary is learnt at the next one.
        assert set(online._spans) == set(computed[: len(online._spans)])
        assert set(session.plan.superseded) <= set(computed)


class Wild(Planner):
    """Proposes what it must not."""

    name = "wild"

    def propose(self, context):
        table = [span.id for span in context.memory.ledger.spans]
        edges = [
            Edge(span, step, "because") for span in table for step in (NOW, LATER, "fix", "no such step")
        ]
        return Proposal(
            [Edge("no such span", NOW, "why not"), *edges],
            superseded={"a": "a", **dict.fromkeys(table[:1], "b")},
            finished=["no such step"],
            expected=True,
        )

    def fork(self):
        return Wild()


class Failing(Wild):
    """Never has anything to say."""

    name = "failing"

    def propose(self, context):
        raise PlannerError("out of ideas")


def test_planners_cannot_break_a_session(engines):
    session = chat_session(engines, **OPTIONS, planner="retrieval", plan=Plan([Step("fix", ("f0",))]))
    session.planning = Planning([Failing(), Wild()])
    for number in range(8):
        session.append(user(filler(number, 12), span=f"f{number}"))
    session.ask(user("And?", step="fix"), max_tokens=3)
    check_ledger(session)
    table, half = session.memory.ledger.spans, OPTIONS["budget"] // 2
    assert sum(len(table.get(read)) for read in session.plan["fix"].spans) <= half
    assert session.plan["fix"].spans[0] == "f0", "the client's own reads stay"
    assert [step.id for step in session.plan.steps] == ["fix"]
    assert session.planning.counts["failing.problems"] == 9
    assert any("out of ideas" in problem for problem in session.planning.problems)
    assert any("does not fit what" in problem for problem in session.planning.problems)
    session.ask(user("again"), max_tokens=3)
    assert session.plan.turn is None


def test_tool_results_belong_to_the_turn_that_called(engines):
    session = chat_session(
        engines, **OPTIONS, planner="retrieval", planner_options={"allowance": 64, "most": 1}
    )
    session.append([user(FACTS["rule"], span="rule"), assistant("noted")])
    for seed in range(6):
        session.append([tool(filler(seed)), assistant("go on")])
    session.queue(user("How does FeeRule round?"), reply=True)
    session.planning.ended(session, calls=True)
    assert session.plan.turn.spans == ("rule",), "a call of a tool does not end the turn"
    name = session.plan.turn.id
    session.append(tool("nothing to see"))
    assert session.plan.turn.spans == ("rule",)
    assert session.plan.turn.id == name
    session.planning.ended(session)
    assert session.plan.turn is None


@pytest.mark.parametrize("policy", ["auto", "foresight"])
def test_what_is_fetched_stays_and_pushes_no_rules_out(engines, policy):
    """Rules of almost half of the budget, and a planner that would take the other half."""
    options = {"policy": policy, "planner": "retrieval", "planner_options": {"allowance": 120}}
    pin = {} if policy == "auto" else {"pin": "soft"}
    session = chat_session(engines, **{"budget": 256, "chunk": 32, "slack": 4, **options})
    session.append(system(filler(9, 31), span="rules", **pin))
    facts = ("MAX_SHARDS is 48 kestrel", "QUEUE_DEPTH is 7 marlin", "FeeRule E417 badger")
    for name, fact in zip("abc", facts, strict=True):
        session.append([user(f"{fact} {filler(3, 4)}", span=name), assistant("noted")])
    for seed in range(8):
        session.append([tool(filler(seed, 14)), assistant("go on")])
    sizes = {span.id: len(span) for span in session.memory.ledger.spans}
    assert 96 < sizes["rules"] <= 128
    assert sizes["a"] + sizes["b"] + sizes["c"] > 256 - 4 - 64 - sizes["rules"], "not all of them fit beside"
    question = "MAX_SHARDS kestrel QUEUE_DEPTH marlin FeeRule E417 badger?" + " what is it all about" * 4
    session.queue(user(question, span="q"), reply=True)
    read = session.plan.turn.spans
    assert read
    assert session.planning.counts["fetched"] == len(read)
    for moment in range(2):
        assert {name: session.explain(name).resident for name in ("rules", *read)} == dict.fromkeys(
            ("rules", *read), 1.0
        ), moment
        session.engine.drain([session])
    assert "does not fit what now may read" in session.stats().planner["problem"]
    check_ledger(session)


@pytest.mark.parametrize("policy", ["auto", "foresight", "h2o"])
def test_a_fetch_on_a_guess_keeps_to_what_is_spare(engines, policy):
    session = chat_session(engines, policy=policy, budget=128, chunk=32, slack=4, archive=Shelf())
    session.append_ids(random_ids(40), span="rules", region="system", pin="soft")
    session.append_ids(random_ids(40, seed=1), span="a")
    session.append_ids(random_ids(17, seed=2), span="b")
    session.append_ids(random_ids(200, seed=3))
    spare = session.memory.policy.spare(session.memory.view())
    assert spare == (127 - 4 if policy == "h2o" else 128 - 4 - 36 - 32)
    back = session.memory.restore(["a", "b"], guessed=True)
    assert back == (["a", "b"] if policy == "h2o" else ["a"])
    assert ("b" in back) or session.memory.restore(["b"]) == ["b"], "asked for by the client"
    check_ledger(session)
