"""What the current step reads: what is let through is kept whole, and what cannot be is refused with the numbers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import Plan, Step, reads
from tenure.errors import BudgetError
from tenure.pieces import Piece
from tenure.plan import MessageNumber, Quote
from tenure.planners import Proposal
from tenure.planners.base import Edge
from tenure.regions import Region
from tests.chats import assistant, chat_engine, chat_session, user
from tests.conftest import random_ids
from tests.oracles import check_ledger, state_of
from tests.test_restore import Shelf

OPTIONS = {"budget": 64, "chunk": 32, "slack": 8, "sinks": 2}
ROOM = 64 - 2 - 4
"""Slots for reads in these options: sinks, and a quarter of a quarter of the budget for the newest."""

follows = pytest.mark.parametrize("policy", ["foresight", "auto"])


def chat(engines, policy="auto", **options):
    return chat_engine(engines).session(policy=policy, **{"archive": Shelf(), **OPTIONS, **options})


def go(reads, step="go", **marks):
    return user("go", step=step, reads=reads, **marks)


@follows
def test_a_large_span_is_kept_beside_large_rules(engines, policy):
    """A system text of two fifths of the budget, and a span of half of it."""
    session = chat(engines, policy, budget=256)
    session.append_ids(random_ids(100), span="rules", region="system")
    session.append_ids(random_ids(125, seed=1), span="facts", region="tool_output")
    session.append_ids(random_ids(200, seed=2))
    session.append(go(["facts"]))
    for seed in range(3):
        session.append_ids(random_ids(60, seed=seed))
        assert session.explain("facts").resident == 1.0
        check_ledger(session)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_let_through_stays_whole(engines, data):
    policy = data.draw(st.sampled_from(["foresight", "auto"]))
    budget = data.draw(st.integers(40, 120))
    options = {"min_recent": data.draw(st.sampled_from([0, 8, 256]))}
    session = chat(engines, policy, budget=budget, policy_options=options)
    regions = st.sampled_from(["system", "tool_output", "user"])
    for number in range(data.draw(st.integers(1, 6))):
        pin = data.draw(st.sampled_from([None, None, "soft", "hard"]))
        size = data.draw(st.integers(1, budget // 3))
        held = sum(len(span) for span in session.memory.ledger.spans if span.pin == "hard")
        pin = None if pin == "hard" and held + size > budget // 3 else pin
        session.append_ids(
            random_ids(size, seed=number), span=f"s{number}", region=data.draw(regions), pin=pin
        )
    names = [span.id for span in session.memory.ledger.spans]
    session.plan.add_turn_reads(data.draw(st.lists(st.sampled_from(names), max_size=3)))
    if data.draw(st.booleans()):
        session.append_ids(random_ids(budget, seed=99))
    reads = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    before, table = state_of(session), session.memory.ledger.spans
    tokens = sum(len(table.get(name)) for name in reads)
    pinned = sum(len(span) for span in table if span.pin == "hard" and span.id not in reads)
    if tokens > session.memory.policy.room(budget, pinned + 2):
        words = f"reads {tokens} tokens of {len(reads)} spans; with {pinned} pinned tokens"
        with pytest.raises(BudgetError, match=words):
            session.append(go(reads))
        assert state_of(session) == before
        return
    session.append(go(reads))
    for number in range(4):
        assert all(session.explain(name).resident == 1.0 for name in reads)
        if number % 2:
            session.force(random_ids(12, seed=number))
        else:
            session.append_ids(random_ids(30, seed=number))
        check_ledger(session)
    newest = max(1, min(options["min_recent"], budget // 4) // 4)
    logical = session.memory.ledger.logical[:, : session.memory.ledger.rows].tolist()
    assert all(set(range(len(session) - newest, len(session))) <= set(held) for held in logical)


@follows
def test_the_refusal_has_the_numbers(engines, policy):
    session = chat(engines, policy)
    for name, size in (("a", 30), ("b", ROOM - 29)):
        session.append_ids(random_ids(size, seed=size), span=name)
    session.append_ids(random_ids(40))
    before = state_of(session)
    words = (
        f"reads: step 'both' reads {ROOM + 1} tokens of 2 spans; with 0 pinned tokens, 2 sinks and 4 slots for the "
        "newest tokens it needs 65, the budget is 64"
    )
    with pytest.raises(BudgetError, match=re.escape(words)):
        session.append(go(["a", "b", "nowhere"], "both"))
    assert state_of(session) == before
    session.append(go(["a"], "one"))
    check_ledger(session)


@follows
def test_only_policies_that_follow_the_plan_promise_anything(engines, policy):
    for name, refuses in ((policy, True), ("h2o", False), ("memdecay", False)):
        session = chat(engines, name)
        session.append_ids(random_ids(ROOM + 1), span="a")
        if refuses:
            with pytest.raises(BudgetError):
                session.append(go(["a"]))
        else:
            session.append(go(["a"]))


@pytest.mark.parametrize(
    "what", ["a pin in the same call", "the rest of a batch", "two messages", "a quote", "a number"]
)
def test_all_that_is_about_to_be_there_counts(engines, what):
    session = chat(engines)
    first = session.append(user("a " * 12, span="a"))[0]
    session.append_ids(random_ids(ROOM - len(first), seed=1), span="b")
    assert not session.memory.backlog
    calls = {
        "a pin in the same call": [user("keep", pin="hard"), go(["a", "b"])],
        "the rest of a batch": [user("new", span="new"), go(["a", "b", "new"])],
        "two messages": [go(["b"]), go(["a", "new"]), user("new", span="new")],
        "a quote": [user("what of it", span="new"), go(["b", "new", {"quote": "a a a a"}])],
        "a number": [user("what of it"), go(["a", "b", {"message": 1}])],
    }
    before = state_of(session)
    with pytest.raises(BudgetError, match="reads: step 'go' reads"):
        session.queue(calls[what])
    assert state_of(session) == before
    session.append(go(["a", "b"]))


def test_where_a_session_goes_back_what_stays_counts(engines):
    """A span that is cut counts as far as it stays, and what waits is taken back with the rest."""
    session = chat(engines)
    session.append_ids(random_ids(30), span="a")
    session.append_ids(random_ids(40, seed=1), span="b")
    session.queue_ids(random_ids(20, seed=2), pin="hard")
    both, one = (
        Piece([20, 21], "message", Region.USER, "user", 0, step="go", reads=names) for names in ("ab", "b")
    )
    reads.check_reads(session, [both], upto=ROOM)
    with pytest.raises(BudgetError, match=f"reads {ROOM + 1} tokens of 2 spans; with 0 pinned"):
        reads.check_reads(session, [both], upto=ROOM + 1)
    reads.check_reads(session, [one], upto=70)
    with pytest.raises(BudgetError, match="reads 40 tokens of 1 spans; with 20 pinned"):
        reads.check_reads(session, [one])


def test_where_a_session_goes_back_what_stays_compressed_counts(engines):
    session = chat_engine(engines).session(policy="auto", archive=None, **OPTIONS)
    session.append_ids(random_ids(20), span="a")
    session.append_ids(random_ids(32, seed=1), span="old")
    session.append_ids(random_ids(8, seed=2))
    session.compress("old", ratio=2, method="snapkv")
    ids = random_ids(ROOM - 20, seed=3)
    piece = Piece(ids, "message", Region.USER, "user", 0, "new", step="go", reads=("a", "new"))
    slots = session.memory.frozen.slots
    for upto in (None, 52):
        with pytest.raises(BudgetError, match=f"besides {slots} compressed"):
            reads.check_reads(session, [piece], upto=upto)
    reads.check_reads(session, [piece], upto=20)


def test_a_quote_fits_what_was_said_before_it(engines):
    """A question that repeats the text does not take its place."""
    session = chat(engines)
    session.append(user("alpha beta " + "a " * ROOM, span="long"))
    before = state_of(session)
    with pytest.raises(BudgetError, match="of 1 spans"):
        session.append([user("what of alpha beta"), go([{"quote": "alpha beta"}])])
    assert state_of(session) == before


def test_a_pin_that_the_step_reads_counts_once(engines):
    session = chat(engines)
    session.append_ids(random_ids(30), span="pinned", pin="hard")
    session.append_ids(random_ids(ROOM - 30, seed=1), span="a")
    session.append(go(["pinned", "a"]))
    assert session.explain("a").resident == 1.0
    check_ledger(session)


def test_of_several_steps_the_last_one_counts(engines):
    """The others are over before anything is computed."""
    session = chat(engines)
    for name, size in (("a", 30), ("b", ROOM - 29)):
        session.append_ids(random_ids(size, seed=size), span=name)
    before = state_of(session)
    with pytest.raises(BudgetError, match="step 'two' reads"):
        session.append([go(["a"], "one"), go(["a", "b"], "two")])
    assert state_of(session) == before
    session.append([go(["a", "b"], "one"), go(["a"], "two")])
    assert session.explain("a").resident == 1.0


@pytest.mark.parametrize(("policy", "more"), [("foresight", 20), ("h2o", 0)])
def test_what_compressed_tokens_may_not_take(engines, policy, more):
    """Sinks, pins, and what the current step reads beside them where the policy promises it."""
    session = chat(engines, policy)
    session.append_ids(random_ids(20), span="a")
    session.append_ids(random_ids(10, seed=1), span="pinned", pin="hard")
    session.queue_ids(random_ids(3, seed=2), pin="hard")
    session.plan.add(Step("go", ("a", "pinned", "nowhere")))
    assert reads.needed(session.memory) == 2 + 10 + 3 + more


def test_what_is_compressed_counts(engines):
    session = chat_engine(engines).session(policy="auto", archive=None, **OPTIONS)
    session.append_ids(random_ids(30), span="old")
    session.append_ids(random_ids(ROOM - 10, seed=1), span="facts")
    session.compress("old", ratio=2, method="snapkv")
    slots = session.memory.frozen.slots
    assert slots > 0
    before = state_of(session)
    with pytest.raises(BudgetError, match=rf"the budget is {64 - slots} besides {slots} compressed"):
        session.append(go(["facts"]))
    assert state_of(session) == before
    with pytest.raises(BudgetError, match=rf"reads 30 tokens of 1 spans.* besides {slots} compressed"):
        session.append([user("pin", pin="hard"), user("a " * 12, pin="hard"), go(["old"])])
    assert state_of(session) == before


def test_a_compressed_span_that_comes_back_counts_once(engines):
    session = chat(engines)
    session.append_ids(random_ids(40), span="old")
    session.append_ids(random_ids(8, seed=1), span="more")
    session.append_ids(random_ids(8, seed=2))
    session.compress("old", ratio=2, method="snapkv")
    assert session.memory.frozen.slots + 48 > ROOM
    session.append(go(["old", "more"]))
    assert session.memory.frozen.slots == 0
    assert all(session.explain(name).resident == 1.0 for name in ("old", "more"))
    check_ledger(session)


def test_a_sync_is_checked_before_anything_changes(engines):
    session = chat(engines)
    talk = [user("a " * 25, span="a"), assistant("ok"), user("b " * 25, span="b"), assistant("ok")]
    session.sync([*talk, user("and")], reply=False)
    before = state_of(session)
    with pytest.raises(BudgetError, match="reads: step 'go' reads"):
        session.sync([*talk, go(["a", "b"])])
    assert state_of(session) == before
    changed = [talk[0], assistant("no"), user("c", span="b"), assistant("ok")]
    session.sync([*changed, go(["a", "b"])])  # what is taken back does not count
    assert all(session.explain(name).resident == 1.0 for name in "ab")
    check_ledger(session)


def test_a_sync_counts_a_reference_where_it_will_be(engines):
    plan = Plan([Step("go", (Quote("a a a a"), MessageNumber(1)))])
    session = chat(engines, plan=plan)
    session.sync([user("a " * 25), user("b")], reply=False)
    assert len(plan["go"].spans) == 2
    before = state_of(session)
    with pytest.raises(BudgetError, match="reads: step 'go' reads"):
        session.sync([user("so"), user("b " * 25), user("a " * 26), go([])])
    assert state_of(session) == before


def test_pins_that_give_way_do_not_count(engines):
    session = chat(engines, pins="demote")
    session.append_ids(random_ids(40), span="old", pin="hard")
    session.append_ids(random_ids(20, seed=1), span="facts")
    session.append([user("a " * 15, pin="hard"), go(["facts"])])
    assert session.explain("old").pin == "soft"
    assert session.explain("facts").resident == 1.0
    check_ledger(session)


def test_planners_add_no_reads_that_pins_leave_no_room_for(engines):
    session = chat_session(
        engines, **{**OPTIONS, "budget": 128}, policy="auto", planner="explicit", archive=Shelf()
    )
    session.append_ids(random_ids(70), span="pinned", pin="hard")
    session.append_ids(random_ids(55, seed=1), span="large")
    session.append_ids(random_ids(20, seed=2), span="small")
    edges = [Edge(name, "go", "because") for name in ("large", "small")]
    session.planning._enter(session, "explicit", Proposal(edges, [Step("go")], looked=False))
    assert session.plan["go"].spans == ("small",)
    session.append(go([]))
    assert session.explain("small").resident == 1.0


def test_a_check_reads_the_spans_of_its_step_only(engines, monkeypatch):
    """However many the session has, unless a reference may fit any of them."""
    session = chat(engines)
    for number in range(40):
        session.append_ids(random_ids(9, seed=number), span=f"s{number}", pin="soft" if number == 3 else None)
    seen = []
    real = reads.contents

    def counted(*given):
        for span, ids in real(*given):
            seen.append(span.id)
            yield span, ids

    monkeypatch.setattr(reads, "contents", counted)
    session.append(go(["s7", "s30"]))
    assert seen == ["s3", "s7", "s30", "s39"]
    seen.clear()
    session.append(go([{"quote": "nowhere said"}], step="next"))
    assert len(seen) > 40
