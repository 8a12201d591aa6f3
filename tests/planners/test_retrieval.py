"""Retrieval: which spans come back for a turn, whole, and when they may go again."""

from __future__ import annotations

import pytest

from tenure import Plan, Step
from tenure.errors import ConfigError
from tenure.planners.base import within
from tests.chats import chat_session, user
from tests.conftest import random_ids
from tests.oracles import check_ledger
from tests.planners.chats import FACTS, OPTIONS, drowned, filler

QUESTIONS = {
    "limits": "What is MAX_SHARDS?",
    "rule": "How does FeeRule round?",
    "codes": "We got E417. Why?",
}


@pytest.mark.parametrize("terms", ["words", "ids"])
@pytest.mark.parametrize("wanted", FACTS)
def test_what_was_lost_comes_back_for_the_turn_that_asks(engines, wanted, terms):
    session = drowned(engines, planner="retrieval", planner_options={"terms": terms, "most": 1})
    ledger = session.memory.ledger
    assert ledger.resident(ledger.spans.get(wanted)) < 1
    session.ask(user(QUESTIONS[wanted], span="q"), max_tokens=4)
    assert ledger.resident(ledger.spans.get(wanted)) == 1.0
    edges = session.explain(wanted).edges
    assert [edge.when for edge in edges] == ["now"]
    assert edges[0].planner == "retrieval"
    assert edges[0].why.startswith("shares ")
    assert session.stats().planner["counts"]["fetched"] == 1
    assert session.plan.turn is None, "the turn is over, and so are its reads"
    check_ledger(session)


def test_it_stays_while_the_turn_lasts_and_may_go_behind_it(engines):
    session = drowned(engines, planner="retrieval", planner_options={"most": 1})
    session.queue(user(QUESTIONS["limits"]), reply=True)
    assert session.explain("limits").readers == ("turn-10",), "nine of the assistant's turns came before"
    turn = session.start_turn(max_tokens=60)
    for _ in turn:
        span = session.memory.ledger.spans.get("limits")
        assert session.memory.ledger.resident(span) == 1.0
    assert session.explain("limits").readers == ()
    for seed in range(20, 26):
        session.append(user(filler(seed)))
    assert session.explain("limits").resident < 1
    assert session.explain("limits").evicted["expired"] > 0
    check_ledger(session)


def test_messages_before_a_reply_ask_when_it_is_requested(engines):
    session = drowned(engines, planner="retrieval", planner_options={"most": 1})
    session.append(user(QUESTIONS["rule"]))
    assert session.explain("rule").resident < 1, "by default only a reply asks"
    for _ in session.generate(max_tokens=2):
        pass
    assert session.explain("rule").resident == 1.0

    session = drowned(engines, planner="retrieval", planner_options={"most": 1, "on": "message"})
    session.append(user(QUESTIONS["rule"]))
    assert session.explain("rule").resident == 1.0


def test_a_plan_of_the_client_goes_on_beside_it(engines):
    plan = Plan([Step("a", ("codes",)), Step("b", ("rule",))])
    session = drowned(engines, planner="retrieval", planner_options={"most": 1}, plan=plan)
    session.queue(user(QUESTIONS["limits"], step="b"), reply=True)
    assert session.plan.planned() == {"limits": 0, "rule": 0, "codes": 0}
    session.start_turn(max_tokens=2).close()
    assert session.plan.turn is None


@pytest.mark.parametrize(
    ("most", "least", "taken"),
    [(8, 0.1, "ac"), (1, 0.1, "a"), (8, 0.5, "a"), (8, 0.4, "ac"), (8, 0.0, "acd")],
)
def test_the_best_spans_that_fit_are_taken(most, least, taken):
    ranked = [("a", 5.0), ("b", 4.0), ("c", 2.0), ("d", 0.1), ("e", 0.0)]
    tokens = {"a": 5, "b": 6, "c": 3, "d": 2, "e": 0}
    assert "".join(span for span, _ in within(ranked, tokens.get, 10, most=most, least=least)) == taken


def test_the_end_of_a_long_turn_asks(engines):
    session = drowned(engines, planner="retrieval", planner_options={"query": 12, "least": 0.01})
    session.queue(user("How does FeeRule round? Never mind. And what says the error E417?"), reply=True)
    assert session.plan.turn.spans == ("codes",)


def test_what_is_superseded_is_not_promoted(engines):
    session = drowned(engines, planner="retrieval", planner_options={"most": 1})
    session.plan.supersede("rule", "limits")
    session.queue(user(QUESTIONS["rule"]), reply=True)
    assert session.plan.turn is None or "rule" not in session.plan.turn.spans


def test_what_matches_far_less_than_the_best_is_left(engines):
    question = user("MAX_SHARDS, QUEUE_DEPTH, and is E417 frozen?")
    for least, spans in ((0.0, {"limits", "codes"}), (0.99, {"limits"})):
        session = drowned(engines, planner="retrieval", planner_options={"most": 2, "least": least})
        session.queue(question, reply=True)
        assert set(session.plan.turn.spans) == spans


def test_nothing_is_promoted_beyond_the_allowance_or_without_a_match(engines):
    session = drowned(engines, planner="retrieval", planner_options={"allowance": 5})
    session.queue(user(QUESTIONS["limits"]), reply=True)
    assert session.plan.turn is None
    session = drowned(engines, planner="retrieval", planner_options={"terms": "words"})
    session.queue(user("xyzzy plugh"), reply=True)
    assert session.plan.turn is None
    assert "fetched" not in session.stats().planner["counts"]


def test_forks_and_rollbacks(engines):
    session = drowned(engines, planner="retrieval", planner_options={"most": 1})
    fork = session.fork()
    fork.ask(user(QUESTIONS["codes"]), max_tokens=2)
    assert fork.explain("codes").resident == 1.0
    assert session.explain("codes").resident < 1
    assert session.stats().planner["counts"].get("fetched", 0) == 0
    session.ask(user("nothing of all that"), max_tokens=2)
    session.keep_first(0)
    session.append(user("E417 means the disk is full", span="codes"))
    for seed in range(6):
        session.append(user(filler(seed)))
    session.ask(user(QUESTIONS["codes"]), max_tokens=2)
    assert session.explain("codes").resident == 1.0
    assert "disk" in session.explain("codes").text
    check_ledger(session)


def test_whole_conversations_ask_as_well(engines):
    session = chat_session(
        engines, **OPTIONS, planner="retrieval", planner_options={"allowance": 64, "most": 1}
    )
    messages = [user(FACTS["rule"], span="rule")]
    for seed in range(6):
        messages += [
            {"role": "assistant", "content": "go on"},
            {"role": "tool", "content": filler(seed)},
        ]
    session.sync(messages, reply=False)
    assert session.explain("rule").resident < 1
    session.sync([*messages, user(QUESTIONS["rule"])])
    assert session.explain("rule").resident == 1.0


def test_raw_ids_are_looked_up_by_ids(engines):
    session = chat_session(
        engines, **OPTIONS, planner="retrieval", planner_options={"terms": "ids", "most": 1}
    )
    fact = random_ids(16, seed=3)
    session.append_ids(fact, span="fact")
    low = [10 + number % 5 for number in range(40)]
    for number in range(8):
        session.append_ids(low, span=f"filler-{number}")
    assert session.explain("fact").resident < 1
    session.queue_ids([token for token in fact if token > 15][:6], span="q")
    session.start_turn(max_tokens=2).close()
    assert session.explain("fact").resident == 1.0


def test_it_needs_a_budget_to_do_anything(engines):
    session = chat_session(engines, planner="retrieval", policy="full", positions="logical")
    session.append(user(FACTS["rule"], span="rule"))
    session.ask(user(QUESTIONS["rule"]), max_tokens=2)
    assert session.plan.turn is None
    assert session.explain("rule").edges == ()


@pytest.mark.parametrize(
    ("planner", "options", "words"),
    [
        ("retreival", {}, "planner: 'retreival' is not known. Did you mean 'retrieval'"),
        ("retrieval", {"depth": 2}, "planner retrieval: .*depth"),
        ("retrieval", {"scorer": "magic"}, "planner retrieval, scorer: 'magic' is not known"),
        ("retrieval", {"allowance": 0}, "planner retrieval, allowance: 0 is too small"),
        ("retrieval", {"on": "monday"}, "planner retrieval, on: 'monday'"),
    ],
)
def test_bad_options(engines, planner, options, words):
    with pytest.raises(ConfigError, match=words):
        chat_session(engines, **OPTIONS, planner=planner, planner_options=options)
