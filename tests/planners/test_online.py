"""Online: names that come again, habits, and readings that are old."""

from __future__ import annotations

import pytest

from tenure.errors import ConfigError
from tests.chats import assistant, chat_session, tool, user
from tests.oracles import check_ledger
from tests.planners.chats import OPTIONS, drowned, filler

ONLINE = {"planner": "online", "planner_options": {"allowance": 64}}


def test_a_turn_reads_what_first_had_its_names(engines):
    session = drowned(engines, **ONLINE)
    assert session.explain("rule").resident < 1
    session.queue(user("Does FeeRule round?", span="q"), reply=True)
    assert session.explain("rule").resident == 1.0
    assert session.explain("rule").edges[0].why == "shares FeeRule"
    assert session.plan.planned() == {"rule": 0}
    session.start_turn(max_tokens=2).close()
    assert session.plan.planned() == {}
    check_ledger(session)


def test_what_is_read_again_and_again_is_expected(engines):
    session = drowned(engines, **ONLINE)
    for _ in range(2):
        session.ask(user("E417 again"), max_tokens=2)
    session.append(user("and now?"))
    assert session.plan.expected == ("codes",)
    assert session.explain("codes").edges[0].why.startswith("read in 2 turns")
    for seed in range(30, 40):
        session.append([tool(filler(seed)), assistant("go on")])
    assert session.explain("codes").resident == 1.0, "the habit keeps it, with nothing that names it"
    assert session.explain("rule").resident < 1
    check_ledger(session)


def test_a_newer_reading_of_a_file_supersedes_the_older_one(engines):
    few = {"policy_options": {"min_recent": 8, "recent_ratio": 0.1}}
    session = chat_session(engines, **(OPTIONS | few), **ONLINE)
    call = '{"name": "read_file", "arguments": {"path": "fees.py"}}'
    session.append([user("read it"), assistant(call), tool("RATE_A is 3", span="old")])
    session.append([assistant(call), tool("RATE_A is 4", span="new")])
    session.append([assistant("$ ls"), tool("fees.py", span="ls")])
    session.append(user("go on"))
    assert session.plan.superseded == {"old": "new"}
    assert session.stats().planner["counts"]["online.superseded"] == 1
    session.queue(user("What is RATE_A?"), reply=True)
    assert "new" in session.plan.turn.spans
    assert "old" not in session.plan.turn.spans
    session.start_turn(max_tokens=1).close()
    before = session.explain("old").resident
    session.append(user(filler(1, 12)))
    report = session.explain("old")
    assert report.resident == 0 < before
    assert set(report.evicted) == {"superseded"}
    assert session.explain("new").resident > 0, "others have lost less"
    check_ledger(session)


def test_each_reading_supersedes_the_one_before(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400}), **ONLINE)
    for number in range(3):
        session.append([assistant("$ cat a.py"), tool(f"VALUE_{number}", span=f"a{number}")])
    session.append(user("go on"))
    assert session.plan.superseded == {"a0": "a1", "a1": "a2"}


def test_a_name_asks_for_where_it_came_first_and_last_and_the_rarer_one_counts_more(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400}), **ONLINE)
    texts = ["NAME_A", "NAME_A again", "NAME_A at last", "NAME_B only here"]
    for number, text in enumerate(texts):
        session.append([user(text, span=f"s{number}"), assistant("ok")])
    session.queue(user("NAME_A and NAME_B?"), reply=True)
    assert session.plan.turn.spans == ("s3", "s0", "s2")


def test_habits_fade_and_are_unlearnt(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400, "planner": "online"}))
    session.append([user("NAME_A", span="a"), assistant("ok"), user("NAME_B", span="b"), assistant("ok")])
    lengths = []
    for name in ("NAME_A", "NAME_A", "NAME_B", "NAME_B"):
        lengths.append(len(session))
        session.append([user(name), assistant("ok")])
    session.append(user("go on"))
    assert session.plan.expected == ("b", "a"), "the latest habit first"
    fork = session.fork()
    session.keep_first(lengths[1])
    session.append([user("well"), assistant("ok")])
    session.append(user("go on"))
    assert session.plan.expected == (), "asked for once, by what is left"
    fork.append(user("and there?"))
    assert set(fork.plan.expected) == {"a", "b"}


def test_two_messages_of_one_turn_are_one_reading(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400, "planner": "online"}))
    session.append([user("NAME_A", span="a"), assistant("ok")])
    session.append([user("NAME_A"), tool("NAME_A"), assistant("ok")])
    session.append(user("go on"))
    assert session.plan.expected == ()


def test_several_calls_in_one_message_are_told_apart(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400}), **ONLINE)
    one, two = (
        '{"name": "read", "arguments": {"path": "a.py"}}',
        '{"name": "read", "arguments": {"path": "b.py"}}',
    )
    session.append([user("x"), assistant(one + two), tool("A one", span="a1"), tool("B one", span="b1")])
    session.append([assistant(two + one), tool("B two", span="b2"), tool("A two", span="a2")])
    session.append(user("go on"))
    assert session.plan.superseded == {"a1": "a2", "b1": "b2"}


def test_what_is_taken_back_is_unlearnt(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400}), **ONLINE)
    session.append([user("x"), assistant("$ cat a.py"), tool("VALUE_1", span="old")])
    session.append(assistant("$ cat a.py"))
    length = len(session)
    session.append(tool("VALUE_2", span="new"))
    session.append(user("go on", span="u"))
    assert session.plan.superseded == {"old": "new"}
    fork = session.fork()
    session.keep_first(length)
    session.append(user("never mind", span="u"))
    assert session.plan.superseded == {}
    session.queue(user("What is VALUE_1?"), reply=True)
    assert session.plan.turn.spans == ("old",)
    fork.append(user("and there?"))
    assert fork.plan.superseded == {"old": "new"}


def test_common_names_say_nothing(engines):
    session = chat_session(engines, **(OPTIONS | {"budget": 400}), **ONLINE)
    for number in range(6):
        session.append(user(f"COMMON_NAME in message number_{number}", span=f"s{number}"))
    session.queue(user("COMMON_NAME?"), reply=True)
    assert session.plan.turn is None


def test_planners_are_joined(engines):
    session = drowned(
        engines,
        planner="online+retrieval",
        planner_options={"retrieval": {"most": 1, "allowance": 64}, "online": {"allowance": 64}},
    )
    session.queue(user("Does FeeRule round? Is the ledger frozen?"), reply=True)
    assert set(session.plan.turn.spans) == {"rule", "codes"}
    assert [edge.planner for edge in session.explain("rule").edges] == ["retrieval", "online"][1:]
    assert session.stats().planner["planners"] == ["online", "retrieval"]


@pytest.mark.parametrize(
    ("planner", "options", "words"),
    [
        ("online", {"rare": 2}, "planner online, rare: 2 is no share"),
        ("online", {"habit": 0}, "planner online, habit: 0 is too small"),
        ("online+retrieval", {"most": 3}, "planner_options: 'most' is not one of the planners"),
        ("online+", {}, "planner: '' is not known"),
    ],
)
def test_bad_options(engines, planner, options, words):
    with pytest.raises(ConfigError, match=words):
        chat_session(engines, **OPTIONS, planner=planner, planner_options=options)
