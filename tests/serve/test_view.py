"""The page's picture of a session against the session's own answers, span by span."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from time import perf_counter

import pytest

from tenure import Engine, Plan, Region, Step
from tenure.config import EngineConfig
from tenure.serve.view import memory_view, percent, session_summary
from tests.conftest import random_ids

REGIONS = list(Region)


@pytest.fixture(params=["foresight", "random"])
def session(engines, request):
    """A session far past its budget; ``foresight`` keeps a set a layer, ``random`` one for all."""
    plan = Plan([Step("a", ("span-1", "span-4")), Step("b", ("span-4",)), Step("c", ("span-9", "nowhere"))])
    session = engines("llama").session(budget=96, chunk=48, slack=8, policy=request.param, plan=plan)
    plan.begin("a")
    for number in range(14):
        session.append_ids(
            random_ids(10 + 3 * number, seed=number),
            span=f"span-{number}",
            region=REGIONS[number % len(REGIONS)],
            pin={2: "hard", 3: "soft"}.get(number),
        )
    plan.finish("a")
    session.append_ids(random_ids(40, seed=99), span="last")
    return session


def test_blocks_say_what_the_session_says_of_each_span(session):
    view = memory_view(session)
    assert [block["id"] for block in view["blocks"]] == [span.id for span in session.memory.ledger.spans]
    assert any(0 < block["resident"] < 100 for block in view["blocks"])
    for block in view["blocks"]:
        said = session.explain(block["id"])
        assert (block["start"], block["stop"]) == (said.start, said.start + said.tokens)
        assert block["spans"] == 1
        assert block["resident"] == percent(said.resident, 1)
        assert block["positions"] == (None if said.positions is None else list(said.positions))
        assert block["gap"] == (None if said.rotary_gap is None else pytest.approx(said.rotary_gap, abs=0.51))
        groups = session.memory.ledger.groups
        assert block["evicted"] == {
            name: pytest.approx(count / groups, abs=0.051) for name, count in said.evicted.items()
        }
        assert (block["region"], block["role"], block["pin"]) == (said.region, said.role, said.pin)
        assert (tuple(block["readers"]), block["next"]) == (said.readers, session.plan.delta(block["id"]))
        if groups > 1:
            assert block["by_layer"] == [percent(share, 1) for share in said.resident_by_layer]
        else:
            assert "by_layer" not in block


def test_sums(session):
    view, stats, spans = memory_view(session), session.stats(), list(session.memory.ledger.spans)
    for name in ("tokens", "resident", "budget", "evicted", "next_position", "limit", "renumbers"):
        assert view[name] == getattr(stats, name), name
    assert (view["kv_bytes"], view["full_kv_bytes"]) == (stats.kv_bytes, stats.full_kv_bytes)
    assert sum(row["tokens"] for row in view["regions"].values()) == stats.tokens
    assert sum(row["resident"] for row in view["regions"].values()) == pytest.approx(stats.resident, abs=1)
    assert sum(view["evictions"].values()) == pytest.approx(stats.evicted, abs=1)
    assert view["pinned"] == {"hard": len(spans[2]), "soft": len(spans[3])}
    assert view["plan"]["current"] == "b"
    assert [step["state"] for step in view["plan"]["steps"]] == ["done", "current", "coming"]
    wanted = [session.explain(name) for name in ("span-4", "span-9")]
    held = sum(one.resident * one.tokens for one in wanted)
    assert view["planned"]["resident"] == percent(held, sum(one.tokens for one in wanted))
    assert {name: view[name] for name in session_summary(session)} == session_summary(session)
    json.dumps(view, allow_nan=False)


@pytest.mark.parametrize("most", [1, 2, 5, 13])
def test_merged_blocks_cover_the_window_and_lose_nothing(session, most):
    each = memory_view(session)["blocks"]
    blocks = memory_view(session, most=most)["blocks"]
    assert len(blocks) <= 2 * most + 1
    assert blocks[0]["start"] == 0
    assert blocks[-1]["stop"] == len(session)
    assert all(one["stop"] == two["start"] for one, two in itertools.pairwise(blocks))
    assert sum(block["spans"] for block in blocks) == len(each)
    for block in blocks:
        parts = [one for one in each if block["start"] <= one["start"] < block["stop"]]
        tokens = block["stop"] - block["start"]
        held = sum(one["resident"] * (one["stop"] - one["start"]) for one in parts)
        assert block["resident"] == pytest.approx(held / tokens, abs=1)
        places = [one["positions"] for one in parts if one["positions"]]
        assert block["positions"] == (
            [min(low for low, _ in places), max(high for _, high in places)] if places else None
        )
        lost = sum((Counter(one["evicted"]) for one in parts), Counter())
        assert block["evicted"] == {reason: pytest.approx(count, abs=0.5) for reason, count in lost.items()}
        if len(parts) > 1:
            assert (block["first"], block["last"]) == (parts[0]["id"], parts[-1]["id"])
            assert sum(block["regions"].values()) == tokens


def test_a_window_shows_the_spans_that_touch_it(session):
    spans = list(session.memory.ledger.spans)
    edge = spans[5].start
    ids = [block["id"] for block in memory_view(session, start=edge - 1, stop=edge + 1)["blocks"]]
    assert ids == ["span-4", "span-5"]
    assert memory_view(session, start=10**9)["blocks"] == []
    assert memory_view(session, start=-5, stop=10**9)["window"] == [0, len(session)]


def test_an_empty_and_a_closed_session(engines):
    session = engines("llama").session(budget=64, chunk=32, slack=8)
    empty = memory_view(session)
    assert (empty["tokens"], empty["blocks"], empty["planned"]["resident"]) == (0, [], None)
    session.append_ids(random_ids(100), span="x")
    session.close()
    assert memory_view(session)["blocks"][0]["id"] == "x"


def test_five_thousand_spans_are_looked_at_quickly(engines):
    plan = Plan([Step(f"s{number}", (f"span-{9 * number}",)) for number in range(500)])
    session = engines("llama").session(budget=512, chunk=512, slack=32, plan=plan)
    for number in range(5000):
        session.queue_ids([10 + number % 300] * 3, span=f"span-{number}")
    session.engine.drain([session])
    began = perf_counter()
    view = memory_view(session)
    spent = perf_counter() - began
    assert sum(block["spans"] for block in view["blocks"]) == 5000
    assert len(view["blocks"]) <= 801
    assert len(json.dumps(view)) < 250_000
    assert spent < 1.0, f"{spent * 1e3:.0f} ms"  # about 30 ms on one quiet core


def test_percent_never_rounds_a_rest_away():
    assert [percent(part, 1000) for part in (0, 1, 500, 999, 1000)] == [0, 1, 50, 99, 100]
    assert percent(0, 0) == 0


def test_tiers_say_where_spans_can_come_back_from(models):
    plan = Plan([Step("a", ("span-9",)), Step("b", ("span-1",))])
    engine = Engine(copy.deepcopy(models("llama")), config=EngineConfig(tiers=("host:64MiB",)))
    session = engine.session(budget=96, chunk=48, slack=8, plan=plan)
    plan.begin("a")
    for number in range(12):
        session.append_ids(random_ids(20, seed=number), span=f"span-{number}")
    before = memory_view(session)
    assert before["tiers"] == [{"name": "host", "spans": 11, "tokens": 220}]
    assert (before["traffic"]["stored"], before["traffic"].get("hits")) == (11, None)
    *whole, last = before["blocks"]
    assert {(block["tier"], block["retrievable"]) for block in whole} == {("host", 100)}
    assert last["retrievable"] == 0  # it may still grow
    gone = next(block["id"] for block in before["blocks"] if block["resident"] == 0)
    session.fetch([gone])
    after = memory_view(session)
    block = next(block for block in after["blocks"] if block["id"] == gone)
    assert (block["resident"], block["restored"]) == (100, 1)
    assert after["traffic"]["hits"] == 1
    assert after["traffic"]["bytes in"] == 20 * engine.layout.token_bytes
    assert sum(block["restored"] for block in memory_view(session, most=2)["blocks"]) == 1


def test_what_is_compressed_is_counted_by_span(engines):
    session = engines("llama").session(budget=192, chunk=64, slack=8)
    for number in range(5):
        session.append_ids(random_ids(24, seed=number), span=f"span-{number}")
    assert all("compressed" not in block for block in memory_view(session)["blocks"])
    session.compress(ratio=4, method="snapkv")
    view, stats = memory_view(session), session.stats()
    assert view["compressed"] == pytest.approx(stats.compressed, abs=0.051)
    assert view["compressed"] > 0
    assert view["kv_bytes"] == stats.kv_bytes
    for block in view["blocks"]:
        assert block["compressed"] == pytest.approx(session.explain(block["id"]).compressed, abs=0.051)
