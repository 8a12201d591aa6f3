"""Explicit: plans that the agent writes into the conversation."""

from __future__ import annotations

import json

import pytest

from tenure.plan import Quote
from tests.chats import assistant, chat_session, encode, tokenizer, tool, user
from tests.oracles import Script, check_ledger
from tests.planners.chats import OPTIONS, filler
from tests.test_restore import Shelf

EXPLICIT = {**OPTIONS, "planner": "explicit"}


def plan_text(*steps: object, **fields: object) -> str:
    return f"<plan>{json.dumps({'steps': list(steps), **fields} if fields else list(steps))}</plan>"


def test_a_plan_in_a_message_is_followed(engines):
    session = chat_session(engines, **EXPLICIT)
    session.append([user("the limit is 48", span="limits"), user("E417 is a code", span="codes")])
    text = plan_text({"id": "look", "reads": ["codes"]}, {"id": "fix", "reads": [{"quote": "limit is 48"}]})
    session.append(user(text, span="plan"))
    assert [(step.id, step.reads) for step in session.plan.steps] == [
        ("look", ("codes",)),
        ("fix", ("limits",)),
    ]
    assert session.explain("codes").edges[0].why == "given in 'plan'"
    for seed in range(5):
        session.append([assistant("go on"), tool(filler(seed))])
    assert session.explain("limits").resident == session.explain("codes").resident == 1.0
    session.append(assistant(plan_text({"id": "look"}, {"id": "fix"}, {"id": "end"}, finished=["look"])))
    session.append(user("x"))
    assert session.plan.finished == {"look"}
    assert [step.id for step in session.plan.coming] == ["fix", "end"]
    assert session.plan["fix"].spans == ("limits",), "a shorter plan takes no reads away"
    check_ledger(session)


def test_a_plan_that_the_model_writes_counts_from_the_next_message_on(engines, monkeypatch):
    session = chat_session(engines, **(EXPLICIT | {"budget": 400}))
    session.append(user("the limit is 48", span="limits"))
    text = plan_text({"id": "fix", "reads": ["limits", "nowhere"]})
    Script([*encode("chatml", text), tokenizer("chatml").eos_token_id]).install(monkeypatch)
    session.ask(user("plan it"), max_tokens=200)
    session.queue(user("go"))
    assert session.plan["fix"].spans == ("limits", "nowhere")
    assert session.plan.planned() == {"limits": 0, "nowhere": 0}


def test_overdue_steps_are_confirmed_by_being_listed_again(engines):
    session = chat_session(engines, **(EXPLICIT | {"budget": 400}))
    session.plan.expire_after = 2
    session.append(
        [user("a", span="a"), user(plan_text({"id": "one", "reads": ["a"]}, {"id": "two"}, {"id": "three"}))]
    )
    session.plan.begin("two")
    session.plan.begin("three")
    session.append(user(plan_text({"id": "one"})))
    session.plan.add_reads("three", [])
    assert session.plan.to_json()["overdue"]["one"] == 0
    assert session.plan.delta("a") == 0


@pytest.mark.parametrize("name", ["now", "later", "turn-1"])
def test_steps_of_any_name_keep_their_reads(engines, name):
    session = chat_session(engines, **EXPLICIT)
    session.append([user("the limit is 48", span="limits"), user("E417 is a code", span="codes")])
    session.append(user(plan_text({"id": "a", "reads": ["codes"]}, {"id": name, "reads": ["limits"]})))
    assert [(step.id, step.reads) for step in session.plan.steps] == [("a", ("codes",)), (name, ("limits",))]
    assert session.plan.turn is None
    assert session.plan.expected == ()


def test_a_plan_says_which_step_is_under_way(engines):
    session = chat_session(engines, **EXPLICIT, archive=Shelf())
    session.append([user("the limit is 48", span="limits"), user("E417 is a code", span="codes")])
    for seed in range(8):
        session.append([assistant("go on"), tool(filler(seed))])
    assert session.explain("limits").resident < 1.0
    steps = {"id": "a", "reads": ["codes"]}, {"id": "b", "reads": ["limits"]}
    session.append(user(plan_text(*steps, current="b")))
    assert session.plan.current.id == "b"
    assert session.explain("limits").resident == 1.0, "what it reads is fetched"
    session.append(user("go", step="a"))
    session.append(assistant(plan_text(*steps, current="b")))
    session.queue(user("and?"))
    assert session.plan.current.id == "a", "messages say which step is under way"
    assert "step 'b' is not begun: 'a' is under way" in session.stats().planner["problem"]


def test_a_later_plan_may_name_steps_and_spans_of_earlier_messages(engines):
    session = chat_session(engines, **(EXPLICIT | {"budget": 400}))
    session.append([user("the limit is 48", span="old"), user("the limit is 64", span="new")])
    session.append(user(plan_text({"id": "a"}, {"id": "b"}, {"id": "c", "reads": ["old", "new"]})))
    session.append(user('<plan>{"finished": ["a"], "current": "c", "superseded": {"old": "new"}}</plan>'))
    assert session.plan.finished == {"a"}
    assert session.plan.current.id == "c"
    assert session.plan.superseded == {"old": "new"}
    assert session.stats().planner["problem"] is None
    session.append(user('<plan>{"expire_after": 1, "expected": ["new"]}</plan>', span="odd"))
    assert session.plan.expire_after is None
    assert session.plan.expected == ()
    assert "not taken from the plan in 'odd': expire_after, expected" in session.stats().planner["problem"]
    session.append(user('<plan>{"finished": ["nowhere"]}</plan>', span="bad"))
    assert "unknown step 'nowhere'" in session.stats().planner["problem"]


def test_two_plans_in_one_message(engines):
    session = chat_session(engines, **EXPLICIT)
    text = plan_text({"id": "a"}, {"id": "b"}) + '<plan>{"finished": ["a"], "current": "b"}</plan>'
    session.append(user(text))
    assert session.plan.finished == {"a"}, "the second may name steps of the first"
    assert session.plan.current.id == "b"


def test_what_cannot_be_read_is_noted_and_nothing_breaks(engines):
    session = chat_session(engines, **EXPLICIT)
    session.append(user("<plan>first this, then that</plan>", span="p1"))
    session.append(user(f"<plan>{'[' * 3000}</plan>", span="p0"))
    session.append(user('<plan>{"steps": [{"id": 3}]}</plan><plan>[{"id": "ok"}]</plan>', span="p2"))
    session.append(user(plan_text({"id": "q", "reads": [Quote("no such text").to_json()]}), span="p3"))
    assert [step.id for step in session.plan.steps] == ["ok", "q"]
    stats = session.stats().planner
    assert stats["counts"]["explicit.problems"] == 3
    assert "the plan in 'p2' cannot be read: steps[0].id" in stats["problem"]
    json.dumps(session.stats().to_json())
    json.dumps(session.explain("p1").to_json())


def test_a_plan_larger_than_the_budget_is_cut_not_refused(engines):
    session = chat_session(engines, **EXPLICIT)
    for number in range(6):
        session.append(user(filler(number, 6), span=f"s{number}"))
    session.append(user(plan_text({"id": "all", "reads": [f"s{number}" for number in range(6)]})))
    assert 0 < len(session.plan["all"].reads) < 6
    session.append(user("now", step="all"))
    assert "does not fit what all may read" in session.stats().planner["problem"]
    check_ledger(session)


def test_after_a_rollback_a_plan_under_the_same_id_is_read(engines):
    session = chat_session(engines, **(EXPLICIT | {"budget": 400}))
    session.append(user("a", span="a"))
    length = len(session)
    session.append(user(plan_text({"id": "x"}), span="plan"))
    session.keep_first(length)
    session.append(user(plan_text({"id": "y"}), span="plan"))
    assert [step.id for step in session.plan.steps] == ["x", "y"], "the plan is the client's to take back"
    session.append(user("go on"))
    session.keep_first(length)
    session.plan.remove("y")
    session.append(user("b"))
    session.append(user(plan_text({"id": "y"}), span="plan"))
    assert "y" in session.plan, "it was taken back and has come again"


def test_a_plan_is_taken_once_though_its_message_grows(engines, monkeypatch):
    """The end of an answer belongs to its message only once the next one comes."""

    def answer(text):
        Script([*encode("chatml", text), tokenizer("chatml").eos_token_id]).install(monkeypatch)
        "".join(session.generate(max_tokens=200))

    session = chat_session(engines, **(EXPLICIT | {"budget": 400}))
    session.append(user("go"))
    reply = plan_text({"id": "a"}, {"id": "b"}, {"id": "c"}, current="a")
    answer(reply)
    session.append(user("next"))
    session.plan.finish("a")
    session.plan.remove("c")
    answer("done")
    session.append(user("more"))
    assert [step.id for step in session.plan.steps] == ["a", "b"]
    assert session.plan.current.id == "b"


@pytest.mark.parametrize("computed", [False, True])
def test_a_restored_session_takes_no_plan_again(engines, tmp_path, computed):
    session = chat_session(engines, **EXPLICIT)
    session.append(user(plan_text({"id": "a"}, {"id": "b"}, current="a")))
    if computed:
        session.append(user("go on"))
    session.plan.finish("a")
    session.save(tmp_path / "saved")
    for one in (session, session.engine.restore(tmp_path / "saved")):
        one.append(user("more"))
        assert one.plan.current.id == "b"
        one.append(user(plan_text({"id": "c"}, current="c"), span="anew"))
        assert one.plan.current.id == "c"
