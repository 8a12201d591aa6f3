"""Spans that were evicted and come back: exact rows, honest ledger, and a session that goes on as if."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import Plan, Step
from tenure.errors import ConfigError
from tenure.reads import spare
from tenure.tiers.record import SpanRecord
from tests.chats import chat_engine, chat_session, user
from tests.conftest import random_ids
from tests.oracles import check_ledger, state_of
from tests.reference import MaskedReference


class Shelf:
    """The plainest archive: a dict."""

    def __init__(self, records: dict[str, SpanRecord] | None = None) -> None:
        self.records = dict(records or {})
        self.prefetched: list[str] = []

    def put(self, record: SpanRecord) -> None:
        self.records[record.span] = record

    def get(self, span_id: str) -> SpanRecord | None:
        return self.records.get(span_id)

    def prefetch(self, span_ids: Iterable[str]) -> None:
        self.prefetched += span_ids

    def forget(self, span_ids: Iterable[str]) -> None:
        for span_id in span_ids:
            self.records.pop(span_id, None)

    def fork(self) -> Shelf:
        return Shelf(self.records)


OPTIONS = {"budget": 64, "chunk": 32, "slack": 8, "sinks": 2}


def step_both(session, reference, ids):
    """One chunk in the engine and in the masked reference; logits must agree."""
    want = reference.beside(session, ids)
    got = session.feed(ids)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    check_ledger(session)


@pytest.mark.parametrize("rotate", ["copy", "read"])
@pytest.mark.parametrize("positions", ["bounded", "logical", "compact"])
@pytest.mark.parametrize("policy", ["foresight", "h2o", "recency"])
def test_a_restored_span_is_attended_as_the_masked_reference_says(models, engines, policy, positions, rotate):
    engine = engines("qwen3", rotate=rotate)
    session = engine.session(policy=policy, positions=positions, archive=Shelf(), **OPTIONS)
    reference = MaskedReference(models("qwen3"))
    names = []
    for number in range(8):
        ids = random_ids(24, seed=number)
        step_both(session, reference, ids)
        names.append(session.memory.ledger.spans[-1].id)
    lost = next(name for name in names if session.explain(name).resident < 1.0)
    assert session.fetch([lost, "nowhere"]) == [lost]
    report = session.explain(lost)
    assert report.resident == 1.0
    assert not report.evicted
    check_ledger(session)
    for number in range(3):
        step_both(session, reference, random_ids(20, seed=100 + number))


def test_a_span_of_many_chunks_and_of_decoded_tokens_comes_back_whole(engines):
    session = engines("llama").session(policy="recency", archive=(shelf := Shelf()), **OPTIONS)
    session.append_ids(random_ids(50, seed=1), span="long")  # two chunks
    session.force(random_ids(30, seed=2))  # past the slack: evictions while it grows
    decoded = session.memory.ledger.spans[-1].id
    session.append_ids(random_ids(90, seed=3), span="noise")
    full = engines("llama").session(policy="full", chunk=32)
    full.append_ids(random_ids(50, seed=1))
    record = shelf.records["long"]
    torch.testing.assert_close(record.keys, full.memory.rows.raw[:, :, :50], atol=1e-5, rtol=0)
    torch.testing.assert_close(record.values, full.memory.rows.values[:, :, :50], atol=1e-5, rtol=0)
    assert list(shelf.records[decoded].ids) == random_ids(30, seed=2)
    assert session.fetch([decoded]) == [decoded]
    start = session.memory.ledger.spans.get(decoded).start
    inside = session.memory.ledger.logical[0, : session.memory.ledger.rows]
    rows = torch.isin(inside, torch.arange(start, start + 30))
    assert torch.equal(session.memory.rows.raw[:, :, : len(rows)][:, :, rows], shelf.records[decoded].keys)


def test_a_span_returns_into_its_gap_while_there_is_one(engines):
    """Before the first renumbering the gap is still there; short gaps are better left alone than closed."""
    session = engines("llama").session(policy="recency", archive=Shelf(), limit=1024, **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    assert session.fetch(["b"]) == ["b"]
    assert session.stats().renumbers == 0
    assert session.explain("b").positions == (20, 39)
    check_ledger(session)


def test_what_the_begun_step_reads_is_fetched(engines):
    plan = Plan([Step("one"), Step("two", ("facts",))])
    session = engines("llama").session(policy="recency", plan=plan, archive=Shelf(), **OPTIONS)
    session.append_ids(random_ids(20), span="facts")
    session.append_ids(random_ids(200, seed=1))
    assert session.explain("facts").resident < 1.0
    plan.begin("two")
    assert session.fetch(plan.current.reads) == ["facts"]
    assert session.memory.ledger.spans.get("facts").restored == 1


def test_a_farther_span_is_spilled_whole_and_comes_back_for_its_step(engines):
    plan = Plan([Step("now", ("a",)), Step("late", ("b",))])
    session = engines("llama").session(
        policy="foresight", policy_options={"min_recent": 8}, plan=plan, archive=Shelf(), **OPTIONS
    )
    for name in "ab":
        session.append_ids(random_ids(34, seed=ord(name)), span=name)
    session.append_ids(random_ids(120, seed=9), span="noise")
    assert session.explain("a").resident == 1.0
    late = session.explain("b")
    assert late.resident == 0.0
    assert set(late.evicted) == {"spilled"}
    plan.finish("now")
    assert session.fetch(plan.current.reads) == ["b"]
    session.append_ids(random_ids(120, seed=10))
    assert session.explain("b").resident == 1.0, "the current step reads it"
    check_ledger(session)


def test_no_room_no_change(engines):
    session = engines("llama").session(policy="recency", archive=Shelf(), **OPTIONS)
    session.append_ids(random_ids(40), span="big")
    session.append_ids(random_ids(30, seed=1), span="pinned", pin="hard")
    session.append_ids(random_ids(90, seed=2))
    before = state_of(session)
    assert session.fetch(["big"]) == []
    assert state_of(session) == before


def test_a_record_of_another_span_is_a_miss(engines):
    """C19: a mixed-up store must not put another session's rows in."""
    session = engines("llama").session(policy="recency", archive=(shelf := Shelf()), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    shelf.records["a"], shelf.records["b"] = shelf.records["b"], shelf.records["a"]
    shelf.records["c"] = replace(shelf.records["c"], ids=array("I", random_ids(20, seed=1)))
    before = state_of(session)
    assert session.fetch(["a", "b", "c"]) == []
    assert state_of(session) == before


def test_the_same_text_at_another_place_is_another_span(engines):
    """Its keys have seen other tokens before them."""
    session = engines("llama").session(policy="recency", archive=(shelf := Shelf()), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20), span=name)
    shelf.records["a"], shelf.records["b"] = shelf.records["b"], shelf.records["a"]
    assert session.fetch(["a", "b"]) == []


def test_what_planners_ask_for_comes_back_as_far_as_the_policy_keeps_it(engines):
    """A soft pin is kept before it, and so is what they have asked for before."""
    session = engines("llama").session(
        policy="foresight", policy_options={"min_recent": 8}, archive=Shelf(), **OPTIONS
    )
    session.append_ids(random_ids(20), span="rules", pin="soft")
    for name, size in (("a", 14), ("b", 22), ("c", 23)):
        session.append_ids(random_ids(size, seed=size), span=name)
    session.append_ids(random_ids(100, seed=2))
    assert spare(session.memory) == 14 + 22
    twin = session.fork()
    assert session.memory.restore(["a", "b"], guessed=True) == ["a", "b"]
    assert twin.memory.restore(["a", "c"], guessed=True) == ["a"]
    assert twin.memory.restore(["a", "c"]) == ["c"], "a client may"
    for one in (session, twin):
        check_ledger(one)


def test_what_is_compressed_leaves_less_for_what_comes_back(engines):
    session = engines("llama").session(policy="recency", archive=Shelf(), **OPTIONS)
    for name in "ab":
        session.append_ids(random_ids(30, seed=ord(name)), span=name)
    session.compress("b", ratio=2, method="snapkv", recent=0)
    slots = session.memory.frozen.slots
    assert slots >= 15
    session.append_ids(random_ids(80, seed=1))
    assert session.fetch(["a"]) == ["a"]
    memory = session.memory
    assert memory.frozen.slots == slots
    assert memory.ledger.rows == 64 - slots
    entries, places = (
        memory.frozen.segments[0].entries,
        memory.frozen.placed(memory.ledger).segments[0].entries,
    )
    assert torch.equal(entries.position, places.position), "renumbered with the rows"
    check_ledger(session)


def test_compact_positions_have_no_gap_where_a_span_comes_back_in_a_burst(engines):
    """More rows go than come, because decoding has used the slack."""
    session = engines("llama").session(policy="recency", positions="compact", archive=Shelf(), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    session.force(random_ids(6, seed=1))
    assert session.memory.ledger.rows == 70
    assert session.fetch(["b"]) == ["b"]
    assert session.memory.ledger.next_position == session.memory.ledger.rows == 64
    check_ledger(session)


@pytest.mark.parametrize(
    ("policy", "marks"), [("foresight", {"pin": "soft"}), ("auto", {"region": "system"}), ("auto", {})]
)
def test_what_is_left_of_a_span_does_not_stand_in_its_own_way(engines, policy, marks):
    session = engines("llama").session(
        policy=policy, policy_options={"min_recent": 8}, archive=Shelf(), **OPTIONS
    )
    for name, size in (("start", 4), ("a", 50), ("noise", 6)):
        session.append_ids(random_ids(size, seed=size), span=name, **(marks if name == "a" else {}))
    lose(session, range(10, 30))
    assert session.explain("a").resident == 0.6
    assert session.memory.restore(["a"], guessed=True) == ["a"]
    check_ledger(session)


def test_rules_stay_beside_a_large_span_that_comes_back(engines):
    """Their share is one of the whole budget, not of what the span leaves."""
    session = engines("llama").session(
        policy="auto", policy_options={"min_recent": 8}, archive=Shelf(), **OPTIONS
    )
    session.append_ids(random_ids(24), span="rules", region="system")
    session.append_ids(random_ids(30, seed=1), span="a", region="user")
    session.append_ids(random_ids(100, seed=2), region="tool_output")
    assert session.explain("rules").resident == 1.0
    assert session.fetch(["a"]) == ["a"]
    assert session.explain("rules").resident == 1.0
    check_ledger(session)


def test_only_what_the_plan_sends_away_is_called_spilled(engines):
    """An archive has the others, too, but nobody is to read them."""
    plan = Plan([Step("now", ("new",))])
    session = engines("llama").session(policy="foresight", plan=plan, archive=Shelf(), **OPTIONS)
    session.append_ids(random_ids(20), span="old")
    session.append_ids(random_ids(20, seed=1), span="new")
    plan.supersede("old", "new")
    session.append_ids(random_ids(100, seed=2))
    assert set(session.explain("old").evicted) == {"superseded"}


def test_a_rollback_before_any_eviction_archives_what_stays(engines):
    session = engines("llama").session(policy="recency", archive=Shelf(), **OPTIONS)
    for name in "ab":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    session.keep_first(30)
    session.append_ids(random_ids(100, seed=1))
    assert session.fetch(["a", "b"]) == ["a", "b"]
    check_ledger(session)


def test_a_span_as_large_as_the_budget_comes_back(engines):
    """The sinks are its own tokens, and one slot is left for the newest."""
    session = engines("llama").session(policy="h2o", archive=(shelf := Shelf()), **OPTIONS)
    session.append_ids(random_ids(63), span="a", region="retrieved")
    session.append_ids(random_ids(90, seed=1))
    assert session.fetch(["a"]) == ["a"]
    memory, record = session.memory, shelf.records["a"]
    inside = memory.ledger.inside(memory.ledger.spans.get("a"))
    assert torch.equal(
        memory.ledger.score[:, : memory.ledger.rows][inside].view_as(record.score), record.score
    )
    code = memory.aging.table.code("retrieved")
    assert bool((memory.ledger.region[:, : memory.ledger.rows][inside] == code).all())
    born = memory.ledger.born[:, : memory.ledger.rows][inside]
    assert born.unique().tolist() == [memory.aging.times[memory.aging.table.specs[code].clock]]
    check_ledger(session)


def test_what_makes_room_unseen_is_archived_before(engines):
    """A span that no eviction has touched yet loses rows to another that comes back."""
    session = engines("llama").session(policy="h2o", archive=(shelf := Shelf()), **OPTIONS)
    for name in "abc":
        session.append_ids(random_ids(30, seed=ord(name)), span=name)
    session.keep_first(60)
    session.append_ids(random_ids(64 - session.memory.ledger.rows, seed=1), span="new")
    rows, size = session.memory.ledger.rows, len(session.memory.ledger.spans.get("new"))
    keys = session.memory.rows.raw[:, :, rows - size : rows].clone()
    assert session.fetch(["a", "a"]) == ["a"]
    assert shelf.prefetched == ["a"]
    assert session.explain("new").resident < 1.0
    session.append_ids(random_ids(60, seed=2))
    assert torch.equal(shelf.records["new"].keys, keys)


def test_after_a_rollback_the_archive_knows_what_is_left(engines):
    session = engines("llama").session(policy="recency", archive=(shelf := Shelf()), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    session.keep_first(50)  # in the middle of c
    assert set(shelf.records) == {"a", "b"}
    session.append_ids(random_ids(100, seed=1), span="new")
    session.append_ids(random_ids(8, seed=2), span="end")
    assert set(shelf.records) == {"a", "b", "c", "new"}
    assert list(shelf.records["c"].ids) == random_ids(20, seed=ord("c"))[:10]
    assert session.fetch(["c"]) == ["c"]
    check_ledger(session)


def test_a_fork_has_its_own_archive(engines):
    session = engines("llama").session(policy="recency", archive=(shelf := Shelf()), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    twin = session.fork()
    twin.keep_first(10)
    assert set(shelf.records) >= {"a", "b", "c", "d"}
    assert session.fetch(["b"]) == ["b"]
    check_ledger(twin)


@pytest.mark.parametrize("policy", ["recency", "h2o", "memdecay"])
def test_spans_that_come_back_together_do_not_take_each_others_place(engines, policy):
    session = engines("llama").session(policy=policy, archive=Shelf(), **OPTIONS)
    for name in "abcdef":
        session.append_ids(random_ids(20, seed=ord(name)), span=name)
    back = session.fetch(["b", "c", "d", "a"])
    assert back[:3] == ["b", "c", "d"]
    assert "a" not in back, "there is no room for a fourth"
    assert all(session.explain(name).resident == 1.0 for name in back)
    check_ledger(session)
    session.fetch(["b", "a"])
    assert session.explain("b").resident == 1.0, "whole already, and before it in the list"
    check_ledger(session)


def lose(session, tokens):
    """Evict tokens of a session that has all of them, in every layer."""
    stays = ~torch.isin(torch.arange(len(session)), torch.tensor([*tokens]))
    with torch.inference_mode():
        index = stays.nonzero().view(1, -1).expand(session.memory.ledger.groups, -1)
        session.memory.drop(index, "budget")


@pytest.mark.parametrize("policy", ["foresight", "auto"])
def test_what_is_left_of_a_span_takes_no_room_beside_the_whole_of_it(engines, policy):
    plan = Plan([Step("now", ("a",)), Step("later", ("b",))])
    session = engines("llama").session(
        policy=policy, policy_options={"min_recent": 8}, plan=plan, archive=Shelf(), **OPTIONS
    )
    for name, size in (("start", 4), ("a", 20), ("b", 26), ("noise", 14)):
        session.append_ids(random_ids(size, seed=size), span=name)
    lose(session, range(10, 20))
    session.append_ids(random_ids(10, seed=2))
    assert session.explain("a").resident == 0.5
    assert session.fetch(["a"]) == ["a"]
    assert session.explain("b").resident == 1.0, "both fit"
    check_ledger(session)


@pytest.mark.parametrize("policy", ["foresight", "auto"])
def test_all_that_a_step_reads_comes_back(engines, policy):
    """What is left of a span that comes back counts once, not beside the whole of it."""
    session = chat_engine(engines).session(policy=policy, archive=Shelf(), **OPTIONS)
    for name, size in (("a", 24), ("b", 22), ("noise", 18)):
        session.append_ids(random_ids(size, seed=size), span=name)
    lose(session, [*range(8, 19), *range(30, 41)])
    session.append_ids(random_ids(22, seed=2))  # the budget is full again
    assert all(0.0 < session.explain(name).resident < 1.0 for name in "ab")
    session.queue({"role": "user", "content": "go", "step": "both", "reads": ["a", "b"]})
    assert all(session.explain(name).resident == 1.0 for name in "ab")
    session.engine.drain([session])
    session.append_ids(random_ids(60, seed=3))
    assert all(session.explain(name).resident == 1.0 for name in "ab")
    check_ledger(session)


@pytest.mark.parametrize("policy", ["foresight", "auto"])
def test_what_the_current_step_reads_makes_no_room_for_others(engines, policy):
    plan = Plan([Step("now", ("mine",))])
    session = engines("llama").session(policy=policy, plan=plan, archive=Shelf(), **OPTIONS)
    for name, size in (("mine", 40), ("other", 24), ("little", 12)):
        session.append_ids(random_ids(size, seed=size), span=name)
    session.append_ids(random_ids(100, seed=9))
    assert session.fetch(["other", "little"]) == ["little"]
    assert session.explain("mine").resident == 1.0
    check_ledger(session)
    plan.finish("now")
    assert session.fetch(["other"]) == ["other"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_calls_keeps_the_ledger_true(engines, data):
    policy = data.draw(st.sampled_from(["foresight", "h2o", "recency", "random"]))
    positions = data.draw(st.sampled_from(["bounded", "compact", "logical"]))
    session = engines("llama", layers=2).session(
        policy=policy, positions=positions, archive=Shelf(), **OPTIONS
    )
    for number in range(data.draw(st.integers(4, 14))):
        spans = [span.id for span in session.memory.ledger.spans]
        action = data.draw(st.sampled_from(["append", "append", "append", "fetch", "cut", "force", "fork"]))
        if action == "append" or not spans:
            session.append_ids(random_ids(data.draw(st.integers(1, 50)), seed=number), span=f"s{number}")
        elif action == "fetch":
            wanted = data.draw(st.lists(st.sampled_from(spans), max_size=3))
            for name in session.fetch(wanted):
                assert session.memory.ledger.spans.get(name).restored
                assert session.explain(name).resident == 1.0
        elif action == "cut":
            session.keep_first(data.draw(st.integers(0, len(session))))
        elif action == "force":
            session.force(random_ids(data.draw(st.integers(1, 12)), seed=number))
        else:
            session = session.fork()
        check_ledger(session)
    assert session.feed(random_ids(5)).isfinite().all()


def test_a_compressed_span_returns_to_a_session_without_a_budget(engines):
    """The slab was cut to what the compression left."""
    session = engines("qwen2").session(policy="full", chunk=64, archive=Shelf())
    for number, (name, count) in enumerate((("a", 100), ("b", 60), ("c", 20))):
        session.append_ids(random_ids(count, number), span=name)
    session.compress("a", ratio=8, method="streaming")
    assert session.memory.rows.capacity < 180
    assert session.fetch(["a"]) == ["a"]
    assert session.explain("a").resident == 1
    check_ledger(session)
    session.append_ids(random_ids(30, 9))
    check_ledger(session)


def test_what_made_room_is_in_the_log_of_evictions(engines):
    session = engines("qwen2").session(**OPTIONS, policy="recency", archive=Shelf())
    for seed, name in enumerate("abcdef"):
        session.append_ids(random_ids(20, seed), span=name)
    pages = len(session.evictions())
    assert session.fetch(["a"]) == ["a"]
    noted = session.evictions()[pages:]
    assert {one.reason for one in noted} == {"room"}
    assert "a" not in {one.span for one in noted}, "what was left of it is not lost"
    told = sum(session.explain(name).evicted.get("room", 0) for name in "bcdef")
    assert sum(one.tokens * one.layers for one in noted) * session.memory.ledger.groups == pytest.approx(told)
    for wrong in ("a", None, 5):
        with pytest.raises(ConfigError, match=r"span_ids: .* is no list of ids"):
            session.fetch(wrong)


class Resting(Shelf):
    rests = False

    def get(self, span_id):
        return None if self.rests else super().get(span_id)


@pytest.mark.parametrize("seed", range(3))
def test_a_span_that_a_rollback_opens_again_is_captured_layer_by_layer(engines, seed):
    """Where layers keep different tokens its rows are not the same ones in all of them."""
    session = engines("qwen2").session(budget=100, chunk=16, policy="tova", archive=Resting())
    session.append_ids(random_ids(20, seed), span="a")
    session.append_ids(random_ids(20, seed + 100), span="b", pin="soft")
    session.append_ids(random_ids(100, seed + 200), span="c")
    memory, span = session.memory, session.memory.ledger.spans.get("b")
    ledger = memory.ledger
    assert ledger.resident(span) == 1.0
    assert len({tuple(row) for row in ledger.logical[:, : ledger.rows].tolist()}) > 1
    stop = span.start + 16
    where = [(ledger.logical[group] == span.start).int().argmax() for group in range(ledger.groups)]
    keys = torch.stack([memory.rows.raw[layer][:, row : row + 16] for layer, row in enumerate(where)])
    archive = memory.archive
    archive.rests = True
    session.keep_first(stop)
    archive.rests = False
    session.append_ids(random_ids(100, seed + 300), span="d")
    record = archive.get("b")
    assert list(record.ids) == session.memory.ids[span.start : stop].tolist()
    assert torch.equal(record.keys, keys)


def test_a_rollback_while_a_store_rests_loses_no_span_that_is_here(engines):
    session = engines("qwen2").session(**OPTIONS, policy="recency", archive=Resting())
    session.append_ids(random_ids(20, 1), span="a")
    stop = len(session)
    session.append_ids(random_ids(10, 2), span="b")
    session.memory.capture_new()
    archive = session.memory.archive
    archive.rests = True
    session.keep_first(stop)
    archive.rests = False
    for seed in range(6):
        session.append_ids(random_ids(20, 3 + seed))
    assert session.explain("a").resident < 1
    assert session.fetch(["a"]) == ["a"]
    check_ledger(session)


@pytest.mark.parametrize("named", [False, True])
def test_a_message_that_another_takes_the_place_of_comes_back_under_its_own_name(engines, named):
    """The two begin alike, so that the span of the first goes on as that of the second."""
    session = chat_session(engines, policy="recency", archive=Shelf(), **OPTIONS)
    session.sync([user("the limit is 48", **({"span": "draft"} if named else {}))], reply=False)
    session.sync([user("the node limit is 99 here", span="final")], reply=False)
    for number in range(4):
        session.append(user(f"filler {number} " * 6))
    assert session.explain("final").resident == 0.0
    assert session.fetch(["final"]) == ["final"]
    assert session.explain("final").resident == 1.0
    assert "draft" not in session.memory.archive.records
    check_ledger(session)
