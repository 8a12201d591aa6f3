"""Planners through everything that can happen to a session; what they know must be what the session holds."""

from __future__ import annotations

import json
import random

import pytest

from tenure import Plan, Step
from tenure.planners import Planner, PlannerError, Planning, Proposal
from tenure.planners.base import LATER, NOW, Edge
from tenure.planners.corpus import Corpus
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


def enter(session, *edges, name="llm", **fields):
    session.planning._enter(session, name, Proposal(edges, **fields))


def test_what_a_planner_says_takes_the_place_of_what_it_said(engines, tmp_path):
    session = chat_session(engines, **OPTIONS, planner="online", plan=Plan([Step("fix", ("a",))]))
    session.append([user("one", span="a"), user("two", span="b"), user("three", span="c")])
    plan = session.plan
    enter(session, Edge("b", NOW, "because"), name="retrieval")
    enter(session, Edge("b", "fix", "because"), Edge("c", NOW, "because"))
    assert plan["fix"].spans == ("a", "b")
    assert plan.turn.spans == ("b", "c")
    enter(session, looked=False)
    assert plan["fix"].spans == ("a", "b")
    assert plan.turn.spans == ("b", "c")
    enter(session)
    assert plan["fix"].spans == ("a",), "what the client has named stays"
    assert plan.turn.spans == ("b",), "and what another planner says"
    session.save(tmp_path / "session")
    for twin in (session.fork(), session.engine.restore(tmp_path / "session")):
        enter(twin, Edge("c", NOW, "because"))
        assert twin.plan.turn.spans == ("b", "c")
    assert plan.turn.spans == ("b",)


def test_what_is_expected_is_added_or_replaced(engines):
    session = chat_session(engines, **OPTIONS, planner="online")
    enter(session, Edge("a", LATER, "because"))
    enter(session, Edge("b", LATER, "because"))
    assert session.plan.expected == ("a", "b")
    enter(session, Edge("c", LATER, "because"), expected=True)
    assert session.plan.expected == ("c",)
    enter(session, expected=True)
    assert session.plan.expected == ()


def test_the_surest_edges_come_first_and_one_that_does_not_fit_is_passed_over(engines):
    session = chat_session(engines, **OPTIONS, planner="online", plan=Plan([Step("fix")]))
    for name, count in (("a", 15), ("b", 15), ("c", 2)):
        session.append([user(filler(1, count), span=name), assistant("ok")])
    size = {span.id: len(span) for span in session.memory.ledger.spans}
    assert size["a"] + size["c"] <= OPTIONS["budget"] // 2 < size["a"] + size["b"]
    scores = {"c": 0.1, "b": 0.5, "a": 0.9}
    enter(session, *(Edge(span, "fix", "because", score) for span, score in scores.items()))
    assert session.plan["fix"].spans == ("a", "c")
    assert session.stats().planner["problem"] == "llm: b does not fit what fix may read"


def test_what_overdue_steps_read_takes_from_the_turn(engines):
    plan = Plan([Step("late", ("a",)), Step("go")])
    session = chat_session(engines, **OPTIONS, planner="online", plan=plan)
    for name in "ab":
        session.append([user(filler(1, 15), span=name), assistant("ok")])
    plan.begin("go")
    enter(session, Edge("b", NOW, "because"))
    assert plan.turn is None
    assert session.stats().planner["problem"] == "llm: b does not fit what now may read"
    plan.finish("late")
    enter(session, Edge("b", NOW, "because"))
    assert plan.turn.spans == ("b",)


def test_a_span_that_has_grown_keeps_what_was_said_of_it(engines):
    session = chat_session(engines, **OPTIONS, planner="retrieval")
    session.ask(user("What now?"), max_tokens=3)
    answer = session.memory.ledger.spans[-1]
    before = len(answer)
    session.append(user("More."))
    assert len(answer) > before, "its closing came with the next message"
    session.plan.expect([answer.id])
    session.append(user("And more."))
    assert session.plan.expected == (answer.id,)


def test_an_answer_that_goes_on_is_read_anew(engines):
    session, corpus = chat_session(engines), Corpus()
    session.ask(user("What now?"), max_tokens=2)
    corpus.update(session)
    for _ in session.generate(max_tokens=2):
        pass
    answer = session.memory.ledger.spans[-1]
    gone, come = corpus.update(session)
    assert gone == [answer.id]
    assert [one.ids for one in come] == [session.memory.ids[answer.start :]]
    assert corpus.update(session) == ([], [])


def test_a_fork_asks_with_all_messages_that_wait_for_an_answer(engines):
    session = chat_session(
        engines, **OPTIONS, planner="retrieval", planner_options={"allowance": 64, "most": 1}
    )
    session.append([user(FACTS["rule"], span="rule"), assistant("noted")])
    session.append([user("How does FeeRule round?"), user("Please.")])
    assert session.plan.turn is None
    turn = session.fork().generate(max_tokens=1)
    assert turn.session.plan.turn.spans == ("rule",)
    turn.close()


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


def test_explanations_are_the_same_after_a_restore_and_plain_json(engines, tmp_path):
    session = chat_session(engines, **OPTIONS, planner="retrieval")
    session.append([user("alpha_limit is 48", span="limit"), user(filler(1)), user(filler(2))])
    session.queue(user("What is alpha_limit?"), reply=True)
    session.engine.drain([session])
    told = session.explain("limit").to_json()
    assert [edge["step"] for edge in told["edges"]] == ["now"]
    assert "\\u0000" not in json.dumps(told)
    session.planning.problems.append("retrieval: something")
    session.save(tmp_path / "saved")
    restored = session.engine.restore(tmp_path / "saved")
    assert restored.explain("limit").to_json() == told
    assert restored.stats().planner == session.stats().planner
