"""C12: hard pins larger than the budget are refused, or the oldest gives way; never a loop, never a silent loss."""

from __future__ import annotations

import time

import pytest

from tenure.errors import BudgetError, ConfigError
from tenure.pins import STUB, giving_way, stays
from tests.chats import chat_engine, chat_session, user
from tests.conftest import random_ids
from tests.oracles import check_ledger, state_of
from tests.test_restore import Shelf

OPTIONS = {"policy": "memdecay", "budget": 100, "chunk": 64, "slack": 8, "sinks": 2}


def session_of(engines, pins, archive=None, **options):
    return engines("qwen2", layers=2).session(pins=pins, archive=archive, **{**OPTIONS, **options})


@pytest.mark.parametrize("pins", ["refuse", "demote", "spill"])
def test_a_pin_over_the_whole_budget_is_refused_at_once(engines, pins) -> None:
    session = session_of(engines, pins, Shelf())
    session.append_ids(random_ids(40), span="old", pin="hard")
    session.append_ids(random_ids(40, seed=1))
    before, start = state_of(session), time.perf_counter()
    with pytest.raises(BudgetError, match=r"pinned tokens 40 \+ 98 new, 2 sinks and 1 free slot need 141"):
        session.append_ids(random_ids(98, seed=2), pin="hard")
    assert time.perf_counter() - start < 2
    assert state_of(session) == before
    session.append_ids(random_ids(50, seed=3))
    check_ledger(session)


def test_the_oldest_pin_is_demoted(engines) -> None:
    session = session_of(engines, "demote")
    for number in range(4):
        session.append_ids(random_ids(30, seed=number), span=f"pin-{number}", pin="hard")
        check_ledger(session)
    assert [session.explain(f"pin-{number}").pin for number in range(4)] == ["soft", "hard", "hard", "hard"]
    assert session.explain("pin-0").resident < 1.0
    assert all(session.explain(f"pin-{number}").resident == 1.0 for number in (1, 2, 3))


def test_the_oldest_pin_is_spilled_and_comes_back(engines) -> None:
    session = session_of(engines, "spill", Shelf())
    for number in range(4):
        session.append_ids(random_ids(30, seed=number), span=f"pin-{number}", pin="hard")
        check_ledger(session)
    report = session.explain("pin-0")
    assert report.pin is None
    assert report.evicted["spilled"] == (30 - STUB) * session.memory.ledger.groups, (
        "all but the stub went at once"
    )
    assert [session.explain(f"pin-{number}").pin for number in (1, 2, 3)] == ["hard"] * 3
    loose = session_of(engines, "spill", Shelf())
    loose.append_ids(random_ids(60), span="pin", pin="hard")
    loose.append_ids(random_ids(5, seed=2))
    loose.append_ids(random_ids(45, seed=1), span="other", pin="hard")
    table = loose.memory.ledger.spans
    table.pin(table.get("other"), None)
    assert loose.fetch(["pin"]) == ["pin"]
    assert loose.explain("pin").resident == 1.0
    check_ledger(loose)


def test_spilling_needs_somewhere_to_put_it(engines) -> None:
    session = session_of(engines, "spill")
    session.append_ids(random_ids(60), span="pin", pin="hard")
    with pytest.raises(BudgetError) as caught:
        session.append_ids(random_ids(60, seed=1), pin="hard")
    assert "tiers" in str(caught.value.way_out)
    assert session.explain("pin").pin == "hard"


def test_what_is_to_be_refused_is_not_spilled(engines) -> None:
    session = session_of(engines, "refuse", Shelf())
    session.append_ids(random_ids(40), span="old", pin="hard")
    session.append_ids(random_ids(40, seed=1))
    before = state_of(session)
    with pytest.raises(BudgetError) as caught:
        session.append_ids(random_ids(60, seed=2), pin="hard")
    assert "demote" in str(caught.value.way_out)
    assert state_of(session) == before


def test_a_spilled_pin_leaves_the_sinks(engines) -> None:
    session = session_of(engines, "spill", Shelf(), sinks=STUB + 4)
    for number in range(4):
        session.append_ids(random_ids(40, seed=number), span=f"pin-{number}", pin="hard")
        check_ledger(session)
    assert session.explain("pin-0").evicted["spilled"] == (40 - STUB - 4) * session.memory.ledger.groups


def test_pins_that_wait_count_until_they_are_taken_back(engines) -> None:
    session = session_of(engines, "refuse")
    session.queue_ids(random_ids(40), pin="hard")
    assert stays(session.memory) == 42
    with pytest.raises(BudgetError, match=r"pinned tokens 40 \+ 60 new"):
        session.queue_ids(random_ids(60, seed=1), pin="hard")
    assert giving_way(session.memory, 60, upto=0) == []
    session.keep_first(0)
    session.append_ids(random_ids(60, seed=1), pin="hard")
    check_ledger(session)


def test_pins_count_as_far_as_they_stay(engines) -> None:
    """Before a session goes back: what lies beyond is gone by then, and of a pin that is cut the rest is."""
    session = session_of(engines, "demote")
    first = session.append_ids(random_ids(40), pin="hard")
    second = session.append_ids(random_ids(40, seed=1), pin="hard")
    assert giving_way(session.memory, 57, upto=40) == []
    assert giving_way(session.memory, 58, upto=40) == [first]
    assert giving_way(session.memory, 47, upto=50) == []
    assert giving_way(session.memory, 87, upto=50) == [first]
    assert giving_way(session.memory, 88, upto=50) == [first, second]
    assert giving_way(session.memory, 97, upto=20) == [first]
    with pytest.raises(BudgetError, match=r"pinned tokens 20 \+ 98 new"):
        giving_way(session.memory, 98, upto=20)


def test_what_is_compressed_leaves_less_for_pins(engines) -> None:
    session = session_of(engines, "refuse")
    session.append_ids(random_ids(40), span="old")
    session.append_ids(random_ids(10, seed=1))
    session.compress("old", ratio=4, method="snapkv")
    slots = session.memory.frozen.slots
    assert slots
    with pytest.raises(BudgetError, match=rf"the budget is {100 - slots} besides {slots} compressed"):
        session.append_ids(random_ids(98 - slots, seed=2), pin="hard")
    session.append_ids(random_ids(97 - slots, seed=2), pin="hard")
    check_ledger(session)


@pytest.mark.parametrize("policy", ["recency", "memdecay"])
def test_a_region_may_pin_softly(engines, policy) -> None:
    for regions in ({}, {"retrieved": {"pin": "soft"}}):
        session = session_of(engines, "refuse", policy=policy, regions=regions)
        session.append_ids(random_ids(40))
        session.append_ids(random_ids(10, seed=1), span="facts", region="retrieved")
        session.append_ids(random_ids(300, seed=2), region="retrieved" if not regions else "user")
        assert (session.explain("facts").resident == 1.0) is bool(regions)
        check_ledger(session)


def test_options_are_checked(engines) -> None:
    with pytest.raises(ConfigError, match="pins"):
        session_of(engines, "drop")


def test_a_pinned_message_makes_an_older_one_give_way(engines) -> None:
    chat = chat_session(engines, **{**OPTIONS, "pins": "demote"})
    first = chat.append(user("Remember the first thing. " * 3, pin=True))[0]
    while first.pin == "hard":
        chat.append(user("Remember the next thing. " * 3, pin=True))
        check_ledger(chat)
        assert len(chat) < 400
    assert first.pin == "soft"


def test_many_evictions_while_pins_fill_the_budget(engines) -> None:
    """C12 (c): 600 tokens written with 40 pinned, exactly as many as asked for."""
    session = chat_engine(engines).session(**OPTIONS)
    session.append(user("Pinned. " * 8, pin=True))
    session.force([20 + number % 300 for number in range(600)])
    check_ledger(session)
    with pytest.raises(BudgetError):
        session.append(user("Far too long to pin. " * 40, pin=True))
    session.append(user("Still alive."))
    check_ledger(session)
