"""Reads by message number and by quote, on sessions; and plans that are wrong in every way."""

from __future__ import annotations

import contextlib
import random

import pytest

from tenure import Plan, Session, Step
from tenure.errors import BudgetError, MessageError, PlanError
from tenure.plan import MessageNumber, Quote
from tests.chats import assistant, chat_session, encode, system, tool, user
from tests.oracles import check_ledger


def test_quotes_and_numbers_find_their_spans(engines):
    plan = Plan([Step("go", (Quote("limit is\n 48"), MessageNumber(2), MessageNumber(9), Quote("nowhere")))])
    session = chat_session(engines, plan=plan)
    session.queue([user("The limit  is 48.", span="limits"), assistant("Noted.")])
    assert session.plan["go"].spans == ("limits",), "settled while the message still waits"
    session.append([user("And now?", span="now"), tool("The limit is 48.")])
    assert session.plan["go"].spans == ("limits", "now"), "a later message with the text changes nothing"
    session.check_plan()
    with pytest.raises(PlanError) as caught:
        session.check_plan(pending_ok=False)
    assert str(caught.value).count("message 9, which fits no span") == 1
    assert str(caught.value).count("quote 'nowhere', which fits no span") == 1
    session.plan.finish("go")
    with pytest.raises(PlanError, match="message 9, which fits no span"):
        session.check_plan()  # nothing is to come for a step that is done


def test_an_ambiguous_quote_is_reported_and_has_no_effect(engines):
    session = chat_session(engines)
    session.append([user("the limit is 48", span="a"), tool("the limit is 48", span="b")])
    session.append(user("which?", step="go", reads=[{"quote": "limit is 48"}, "a"]))
    assert session.plan["go"].spans == ("a",)
    with pytest.raises(PlanError, match="quote 'limit is 48', which fits 2 spans: a, b"):
        session.check_plan()
    session.plan.set_reads("go", ["b", "gone"])
    with pytest.raises(PlanError, match="step 'go' reads unknown spans: 'gone'"):
        session.check_plan(pending_ok=False)
    session.plan.set_reads("go", ["b"])
    session.check_plan(pending_ok=False)


def test_a_quote_is_not_found_in_the_plan_that_holds_it(engines):
    session = chat_session(engines, planner="explicit")
    session.append([user("The limit is 48.", span="limits"), user("Make a plan.")])
    text = (
        'Let me see. <Plan>[{"id": "go", "reads": [{"quote": "limit is 48"}]}]</Plan> So much for the plan.'
    )
    session.append(assistant(text, span="said"))
    assert session.explain("said").region == "assistant"
    assert session.plan["go"].spans == ("limits",)
    session.plan.add(Step("next", (Quote("so much for"), Quote("Let me see. So"))))
    with pytest.raises(PlanError, match="'so much for', which fits no span"):
        session.check_plan(pending_ok=False)
    session.plan.set_reads("next", [Quote("So much for")])
    session.check_plan()
    assert session.plan["next"].spans == ("said",), "the text beside a plan is searched"


def test_a_message_that_is_a_plan_is_not_searched(engines):
    session = chat_session(engines)
    session.append(user("The limit is 48.", span="limits"))
    session.append(assistant("First see why the limit is 48.", span="todo", region="plan"))
    session.plan.add(Step("go", (Quote("limit is 48"),)))
    session.check_plan(pending_ok=False)
    assert session.plan["go"].spans == ("limits",)


@pytest.mark.parametrize("read", [Quote("limit is 48"), MessageNumber(2)], ids=str)
def test_a_reference_follows_its_message_when_it_is_read_again(engines, read):
    session = chat_session(engines, plan=Plan([Step("go", (read,))]))
    talk = [user("Hi."), assistant("Hello."), user("The limit is 48."), assistant("The limit is 48, then.")]
    session.sync(talk[:3], reply=False)
    (before,) = session.plan["go"].spans
    session.sync([*talk, user("Now?")])
    assert session.plan["go"].spans == (before,)
    session.sync([user("Good day."), *talk[1:], user("Now?")])
    (after,) = session.plan["go"].spans
    assert after != before, "the message has another id"
    assert "The limit is 48." in session.explain(after).text
    session.check_plan(pending_ok=False)
    session.keep_first(session.memory.ledger.spans.get(after).start)
    assert session.plan["go"].reads == (read,)
    session.append([user("The limit is 48."), user("Is the limit is 48 right?")])
    assert session.plan["go"].spans == (session.memory.ledger.spans[-2].id,)


def test_a_reference_stays_where_its_span_stays(engines):
    session = chat_session(engines, plan=Plan([Step("go", (Quote("limit is 48"),))]))
    session.append([user("The limit is 48."), user("And now for something else.")])
    (span,) = session.plan["go"].spans
    session.drop_last(4)
    assert session.plan["go"].spans == (span,)
    session.keep_first(session.memory.ledger.spans.get(span).stop - 1)
    assert session.plan["go"].spans == (span,), "what is left of it holds the text"
    fork = session.fork()
    fork.keep_first(session.memory.ledger.spans.get(span).start + 5)
    assert fork.plan["go"].reads == (Quote("limit is 48"),)
    assert session.plan["go"].spans == (span,)


def test_messages_are_counted_without_the_template_s_own_spans(engines):
    # This template writes a system text of its own before a list that has none.
    session = chat_session(engines, "tools")
    session.append([user("zero", span="s0"), assistant("one", span="s1")])
    session.append(user("two", span="s2", pin="hard", step="go", reads=[{"message": k} for k in range(4)]))
    session.append(user("three", span="s3"))
    assert session.memory.ledger.spans[0].role == "system"
    assert session.plan["go"].spans == ("s0", "s1", "s2", "s3")
    fork = session.fork()
    fork.plan.add(Step("next", (MessageNumber(3),)))
    fork.check_plan(pending_ok=False)
    assert fork.plan["next"].spans == ("s3",)


def test_raw_ids_are_no_message(engines):
    session = chat_session(engines, plan=Plan([Step("go", (MessageNumber(1),))]))
    session.append(user("zero", span="s0"))
    session.append_ids(encode("chatml", "something else"), span="raw")
    session.append(user("one", span="s1"))
    assert session.plan["go"].spans == ("s1",)


def test_bad_references_are_refused_with_the_message(engines):
    session = chat_session(engines)
    for reads, words in (
        ([{"quote": ""}], r"message 0: reads\[0\].quote: expected a text"),
        ([{"massage": 1}], r"message 0: reads\[0\]: unknown fields: massage"),
        ("abc", "message 0: reads: expected a list of span ids, got str"),
    ):
        with pytest.raises(MessageError, match=words):
            session.append(user("x", step="go", reads=reads))
    assert len(session) == 0
    assert len(session.plan) == 0


def test_reads_of_later_messages_join_their_step(engines):
    session = chat_session(engines)
    session.append([system("s", span="s"), user("x", span="x", step="go", reads=["s"])])
    session.append(tool("y", step="go", reads=["x"]))
    assert session.plan["go"].spans == ("s", "x")


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_is_wrong_in_every_way_breaks_nothing(engines, seed):
    rng = random.Random(seed)
    names = [f"s{k}" for k in range(12)] + ["never", "user-1"]
    reads = [*names, MessageNumber(3), MessageNumber(99), Quote("a"), Quote("no such text")]
    plan = Plan(
        [Step(f"step-{k}", tuple(rng.sample(reads, 4))) for k in range(6)], expire_after=rng.choice([None, 1])
    )
    session = chat_session(engines, plan=plan, budget=48, chunk=16, slack=4, policy="foresight")
    for turn in range(12):
        step = rng.choice([None, *(one.id for one in plan.steps), f"new-{turn}"])
        marks = {} if step is None else {"step": step, "reads": rng.sample(names, 1) if turn % 3 else []}
        with contextlib.suppress(BudgetError):  # what a step reads must fit; refused at once, nothing changed
            session.append(user(" ".join(rng.choices(["alpha", "beta", "a"], k=8)), span=f"s{turn}", **marks))
        rng.choice(
            [
                lambda: plan.finish(rng.choice(plan.steps).id),
                lambda: plan.begin(rng.choice(plan.steps).id),
                lambda: plan.expect(rng.sample(names, 3)),
                lambda: plan.add_turn_reads(rng.sample(names, 3)),
                lambda: plan.remove(rng.choice(plan.steps).id),
                lambda: session.keep_first(len(session) // 2),
            ]
        )()
        check_ledger(session)
    assert session.ask("go on", max_tokens=3) is not None
    check_ledger(session)


def test_spans_are_decoded_once_while_a_quote_is_looked_for(engines, monkeypatch):
    """A quote that nobody has said yet is looked for at every message."""
    decoded = []
    real = Session.text_of
    monkeypatch.setattr(Session, "text_of", lambda self, ids: (decoded.append(len(ids)), real(self, ids))[1])
    session = chat_session(
        engines, policy="full", plan=Plan([Step("fix", reads=(Quote("the limit is 48"),))])
    )
    for number in range(20):
        session.append(user(f"{number} apples and pears"))
    assert sum(decoded) < 4 * len(session)
    session.keep_first(len(session) // 2)
    session.append(user("the limit is 48", span="here"))
    assert session.plan["fix"].reads == ("here",)
    assert session.fork().plan["fix"].reads == ("here",)
