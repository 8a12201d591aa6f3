"""Compressing a session: exact budgets, honest ledgers, and the same answers twice (C11)."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from tenure import Plan, Step
from tenure.compress import make_compressor
from tenure.compress.base import best, spread, take
from tenure.errors import ConfigError, TenureError
from tenure.heap import _trim
from tests.chats import chat_engine
from tests.conftest import random_ids, stock_logits
from tests.oracles import check_ledger

TOKENS = 90


@pytest.fixture
def engine(engines):
    return engines("qwen2")


def filled(engine, tokens=TOKENS, **options):
    session = engine.session(**{"policy": "full", "chunk": 64, **options})
    session.append_ids(random_ids(tokens // 2, 1), span="a")
    session.append_ids(random_ids(tokens - tokens // 2, 2), span="b")
    return session


def heads(engine):
    return engine.layout.layers * engine.layout.kv_heads


def answer(session, ids=(20, 21, 22), steps=5):
    """Logits of a question of several tokens and of the greedy tokens behind it."""
    fork = session.fork()
    found = [fork.feed(list(ids))]
    for _ in range(steps):
        found.append(fork.feed([int(found[-1][-1].argmax())]))
    check_ledger(fork)
    return torch.cat(found)


@pytest.mark.parametrize("ratio", [1.33, 2, 3, 4, 8, 16, 64])
def test_the_budget_is_exact(engine, ratio):
    session = filled(engine)
    done = session.compress(ratio=ratio, method="snapkv")
    total = int(heads(engine) * TOKENS / ratio)
    left = heads(engine) * session.memory.ledger.rows + session.memory.frozen.entries
    assert left == max(total, heads(engine) * session.config.sinks + 1)
    assert done.kept == left / heads(engine)
    assert done.entries == session.memory.frozen.entries
    assert answer(session).isfinite().all()
    check_ledger(session)


def test_ratio_1_is_the_full_cache_to_the_bit(engine):
    session, other = filled(engine), filled(engine)
    assert session.compress(ratio=1).entries == 0
    assert torch.equal(answer(session), answer(other))


def test_every_row_in_a_ragged_segment_answers_as_before(engine, models):
    """All but the sinks as entries: only the storage differs."""
    session = filled(engine)

    class Everything(type(make_compressor("random"))):
        def compress(self, context, budget):
            return take(context, torch.ones(context.shape, dtype=torch.bool), torch.zeros(context.shape))

    want = answer(session)
    from tenure.compress import apply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "_verify", lambda *_: None)
        session.compress(ratio=2, method=Everything(), recent=0)
    assert session.memory.ledger.rows == session.config.sinks
    torch.testing.assert_close(answer(session), want, atol=1e-4, rtol=1e-4)
    ids = session.memory.ids.tolist()
    torch.testing.assert_close(
        session.feed([20, 21]), stock_logits(models("qwen2"), [*ids, 20, 21])[-2:], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [{"ratio": 2}, {"ratio": 10}, {"ratio": 100}, {"budget": 1}])
@pytest.mark.parametrize("sinks", [0, 4])
def test_tiny_contexts_keep_something_and_answer_twice_alike(engine, tokens, budget, sinks):
    session = engine.session(policy="full", sinks=sinks)
    session.append_ids(random_ids(tokens, 3))
    session.compress(method="random", **budget)
    rows, entries = session.memory.ledger.rows, session.memory.frozen.entries
    assert rows >= min(sinks, tokens)
    assert heads(engine) * rows + entries > heads(engine) * min(sinks, tokens - 1), "one besides the sinks"
    first, second = answer(session), answer(session)
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"ratio": 0.5}, {"ratio": float("nan")}, {}, {"ratio": 2, "budget": 2}]
)
def test_what_cannot_work_is_refused_and_nothing_changes(engine, wrong):
    session = filled(engine)
    before = answer(session)
    with pytest.raises(ConfigError):
        session.compress(**wrong)
    for options in ({"span": "c"}, {"method": "zip"}, {"options": {"pool": 1}}):
        with pytest.raises(TenureError):
            session.compress(**{"ratio": 2, "method": "snapkv", **options})
    assert torch.equal(answer(session), before)


@pytest.mark.parametrize("method", ["gracekv", "kvzip"])
def test_a_chunk_too_short_to_read_in_is_refused_and_nothing_changes(engines, method):
    engine = chat_engine(engines)
    session = engine.session(policy="h2o", budget=200, chunk=8)
    session.append({"role": "user", "content": "one two three four " * 5})
    before = session.memory.ledger.rows, session.stats().kv_bytes
    with pytest.raises(ConfigError, match="chunk"):
        session.compress(ratio=2, method=method)
    assert (session.memory.ledger.rows, session.stats().kv_bytes) == before
    assert session.compress(ratio=2, method="keydiff").entries
    free = engine.session(policy="full", chunk=8)
    free.append({"role": "user", "content": "one two three four " * 5})
    assert free.compress(ratio=2, method=method).entries
    check_ledger(free)


def test_memory_falls_by_what_is_freed(engine):
    session = filled(engine, 600)
    before = session.stats()
    done = session.compress(ratio=8, method="snapkv")
    after = session.stats()
    assert after.kv_bytes == done.kv_bytes == session.memory.rows.nbytes + session.memory.frozen.nbytes
    assert after.kv_bytes < before.kv_bytes / 5
    slot = 3 * engine.layout.head_dim * 4  # raw, rotated, value
    assert session.memory.frozen.nbytes < done.entries * (slot + 20) + 8 * heads(engine) + 1
    assert after.compressed == pytest.approx(done.entries / heads(engine))
    assert after.resident == session.memory.ledger.rows
    assert after.tokens == 600
    session.close()
    assert session.stats().kv_bytes == 0


def test_explain_says_where_the_tokens_went(engine):
    session = filled(engine)
    session.compress("a", ratio=4, method="snapkv")
    a, b = session.explain("a"), session.explain("b")
    assert a.resident == pytest.approx(4 / 45)  # the sinks
    assert a.evicted == {"compressed": 41 * session.memory.ledger.groups}
    assert a.compressed == pytest.approx(session.memory.frozen.entries / heads(engine))
    assert (b.resident, b.compressed, b.evicted) == (1.0, 0.0, {})


def test_pins_and_planned_spans_stay_exact(engine):
    plan = Plan([Step("now", ("planned",))])
    session = engine.session(policy="full", plan=plan)
    session.append_ids(random_ids(30, 1), span="old")
    session.append_ids(random_ids(30, 2), span="pinned", pin="hard")
    session.append_ids(random_ids(30, 3), span="planned")
    session.append_ids(random_ids(30, 4), span="new")
    session.compress(ratio=3, method="snapkv")
    assert session.explain("pinned").resident == session.explain("planned").resident == 1.0
    entries = session.memory.frozen.entries + heads(engine) * (session.memory.ledger.rows - 60)
    assert entries == heads(engine) * 20
    check_ledger(session)


def test_turns_on_top_and_back(engine):
    session = filled(engine)
    session.compress(ratio=4, method="snapkv")
    fork = session.fork()
    session.append_ids(random_ids(20, 5), span="c")
    session.compress(ratio=2, method="random")  # a second segment
    assert len(session.memory.frozen.segments) == 2
    check_ledger(session)
    session.append_ids(random_ids(20, 6), span="d")
    session.keep_first(TOKENS)
    check_ledger(session)
    assert all(one.stop <= TOKENS for one in session.memory.frozen.segments)
    assert len(fork.memory.frozen.segments) == 1
    session.keep_first(30)
    assert answer(session).isfinite().all()
    session.keep_first(0)
    assert session.memory.frozen.entries == 0
    session.append_ids(random_ids(10, 7))
    check_ledger(session)


@pytest.mark.parametrize("positions", ["bounded", "compact", "logical"])
@pytest.mark.parametrize("granularity", ["session", "layer"])
def test_a_session_with_a_budget(engine, positions, granularity):
    """The slots of compressed tokens are part of the budget, and renumbering keeps the order of everything."""
    session = engine.session(
        budget=64, chunk=32, slack=8, policy="h2o", positions=positions, granularity=granularity
    )
    session.append_ids(random_ids(40, 1), span="a")
    session.append_ids(random_ids(50, 2), span="b")
    done = session.compress((0, 80), ratio=2, method="snapkv", recent=0)
    frozen = session.memory.frozen
    assert frozen.slots == -(-done.entries // heads(engine))
    for number in range(6):
        session.append_ids(random_ids(30, 10 + number))
        memory = session.memory
        assert memory.ledger.rows + memory.frozen.slots <= 64
        assert memory.rows.capacity == 64 + 32 + 8 - memory.frozen.slots
        if positions != "logical":
            check_order(memory)
    assert answer(session).isfinite().all()
    assert torch.equal(answer(session), answer(session))


def check_order(memory):
    """Rotary positions of rows and entries of a head follow their logical indices."""
    if not memory.ledger.renumbers:
        return
    ledger = memory.ledger
    for segment in memory.frozen.segments:
        entries, owner = segment.entries, segment.entries.owner
        assert int(entries.position.max()) < ledger.next_position
        for head in range(entries.lengths.numel()):
            layer = head // entries.lengths.shape[1]
            mine = owner == head
            logical = torch.cat([ledger.logical[layer % ledger.groups, : ledger.rows],
                                 (entries.start[mine].long() + entries.stop[mine] - 1) // 2])  # fmt: skip
            position = torch.cat([ledger.position[layer % ledger.groups, : ledger.rows],
                                  entries.position[mine].long()])  # fmt: skip
            order = logical.argsort(stable=True)
            assert (position[order].diff() >= 0).all()
            rows = ledger.position[layer % ledger.groups, : ledger.rows]
            assert (rows.diff() > 0).all()


def test_shares_are_spread_to_the_last_unit():
    assert spread(torch.tensor([1.0, 1.0, 1.0]), 10, 9).tolist() == [4, 3, 3]
    assert spread(torch.tensor([8.0, 1.0, 1.0]), 10, 4).tolist() == [4, 3, 3]
    assert spread(torch.tensor([1.0, 0.0, 0.0]), 10, 4).tolist() == [4, 3, 3]
    assert spread(torch.zeros(2, 2), 16, 4).tolist() == [[4, 4], [4, 4]]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        weight = torch.rand(7, generator=generator) ** 4
        budget = int(torch.randint(0, 7 * 5 + 1, (), generator=generator))
        share = spread(weight, budget, 5)
        assert int(share.sum()) == budget
        assert ((share >= 0) & (share <= 5)).all()


def test_ties_go_to_the_earlier_token():
    mask = best(torch.zeros(1, 2, 4), torch.tensor([[1, 3]]))
    assert mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 1, 0]]]


@pytest.mark.parametrize(
    "options", [{"policy": "full"}, {"budget": 64, "chunk": 32, "slack": 8, "policy": "h2o"}]
)
def test_save_and_restore(engine, tmp_path, options):
    session = filled(engine, 60, **options)
    session.compress("a", ratio=3, method="snapkv")
    session.append_ids(random_ids(70, 9))
    session.compress(ratio=2, method="random")
    session.save(tmp_path / "session")
    again = engine.restore(tmp_path / "session")
    assert replace(again.stats(), kv_bytes=0) == replace(session.stats(), kv_bytes=0)
    assert torch.equal(answer(again), answer(session))
    assert [one.to_json() for one in map(again.explain, ("a", "b"))] == [
        one.to_json() for one in map(session.explain, ("a", "b"))
    ]


def test_a_span_that_comes_back_from_a_tier_is_no_longer_compressed(engine):
    class Shelf(dict):
        def put(self, record):
            self[record.span] = record

        def prefetch(self, ids):
            pass

        def forget(self, ids):
            for one in ids:
                self.pop(one, None)

        def fork(self):
            return Shelf(self)

    session = engine.session(budget=80, chunk=64, slack=8, policy="foresight", archive=Shelf())
    session.append_ids(random_ids(30, 1), span="a")
    session.append_ids(random_ids(30, 2), span="b")
    session.append_ids(random_ids(5, 3), span="c")
    session.compress(["a", "b"], ratio=4, method="random")
    assert session.explain("a").compressed > 0
    assert session.fetch(["a"]) == ["a"]
    a, b = session.explain("a"), session.explain("b")
    assert (a.resident, a.compressed, a.evicted) == (1.0, 0.0, {})
    assert b.compressed > 0
    check_ledger(session)
    assert answer(session).isfinite().all()


def test_rows_of_a_budget_are_not_starved(engine):
    session = filled(engine, 100, policy="recency", budget=64, chunk=32, slack=8)
    with pytest.raises(
        ConfigError, match=r"ratio: compressed tokens would take 59 of 64 slots.*8 are for new"
    ):
        session.compress(ratio=1.02, method="random", recent=0)
    for number in range(12):
        session.append_ids(random_ids(40, number))
        try:
            session.compress(ratio=2, method="random")
        except ConfigError:
            break
        check_ledger(session)
    else:
        pytest.fail("compressed tokens took all of the budget")
    assert session.memory.row_budget >= 8 + session.config.sinks
    session.append_ids(random_ids(40, 20))
    check_ledger(session)


@pytest.mark.parametrize("method", ["gracekv", "snapkv"])
def test_messages_that_lost_their_beginning_are_not_mixed(engine, method):
    session = engine.session(policy="recency", budget=200, chunk=64, slack=8)
    for number in range(12):
        session.append_ids(random_ids(25, number), span=f"message-{number}")
    first = int(session.memory.ledger.logical[0, session.config.sinks])
    assert first % 25, "a message is cut"
    session.compress(ratio=4, method=method)
    check_ledger(session)


def test_rules_of_the_default_policy_stay_exact(engines):
    engine = chat_engine(engines)
    session = engine.session(budget=400, chunk=64)
    assert session.config.policy == "auto"
    rules, told = session.append([{"role": "system", "content": "Be brief. " * 8},
                                  {"role": "user", "content": "one two three four " * 9}])  # fmt: skip
    session.compress(ratio=4, method="snapkv")
    assert session.explain(rules.id).resident == 1.0
    assert session.explain(told.id).compressed > 0


def test_layers_that_hold_more_keep_the_most_wanted(engine):
    """Nothing outside of the range is touched to make up for what a layer has lost."""
    session = engine.session(policy="h2o", granularity="layer", budget=100, chunk=32, slack=8)
    for number in range(6):
        session.append_ids(random_ids(40, number), span=f"message-{number}")
    ledger = session.memory.ledger
    before = ledger.logical[:, : ledger.rows].clone()
    held = {edge: (before < edge).sum(1) - session.config.sinks for edge in range(5, 240)}
    edge, chosen = max(held.items(), key=lambda one: int(one[1].max() - one[1].min()))
    assert int(chosen.max()) > int(chosen.min()) > 0, "layers lost different tokens"
    assert session.compress((0, edge), ratio=1, recent=0).entries == 0
    done = session.compress((0, edge), ratio=3, method="snapkv", recent=0)
    assert done.tokens == int(chosen.min())
    assert (
        done.entries
        == heads(engine) * (done.tokens + session.config.sinks) // 3 - heads(engine) * session.config.sinks
    )
    for old, new in zip(before.tolist(), ledger.logical[:, : ledger.rows].tolist(), strict=True):
        assert all(token < edge for token in set(old) - set(new))
    check_ledger(session)


def test_a_rollback_past_compressed_tokens_goes_on_behind_them(engine):
    session = engine.session(policy="recency", budget=80, chunk=32, slack=8, limit=160)
    for number in range(8):
        session.append_ids(random_ids(40, number))
    assert session.memory.ledger.renumbers
    session.compress((0, 310), ratio=3, method="snapkv", recent=0)
    frozen = session.memory.frozen
    session.keep_first(frozen.segments[0].stop)
    check_order(session.memory)
    check_ledger(session)
    session.append_ids(random_ids(30, 9))
    check_order(session.memory)
    check_ledger(session)


def test_a_rollback_to_compressed_tokens_goes_on_behind_them(engine):
    """The rows before them end long before they do, and what is taken back has few positions."""
    session = engine.session(policy="recency", budget=80, chunk=32, slack=8, limit=160)
    session.append_ids(random_ids(60))
    session.compress((0, 60), ratio=3, method="snapkv", recent=0)
    for number in range(8):
        session.append_ids(random_ids(40, number))
    assert session.memory.ledger.renumbers
    session.keep_first(60)
    assert session.memory.frozen.segments
    check_order(session.memory)
    check_ledger(session)
    session.append_ids(random_ids(30, 9))
    check_order(session.memory)
    check_ledger(session)


def test_compact_positions_have_no_gap_behind_a_rollback_into_compressed_tokens(engine):
    session = engine.session(policy="recency", positions="compact", budget=80, chunk=32, slack=8)
    session.append_ids(random_ids(60))
    session.compress((0, 60), ratio=2, method="snapkv", recent=0)
    session.keep_first(40)
    assert session.memory.ledger.next_position == session.memory.ledger.rows + session.memory.frozen.slots
    check_order(session.memory)
    check_ledger(session)
    session.append_ids(random_ids(30, 9))
    check_order(session.memory)
    check_ledger(session)


def test_a_tiny_budget_keeps_a_row_for_the_newest_token(engine):
    session = engine.session(budget=7, sinks=4, chunk=4, slack=2, policy="recency")
    session.append_ids(random_ids(7, 1))
    with pytest.raises(ConfigError, match=r"would take 3 of 7 slots.*1 are for new"):
        session.compress((4, 7), ratio=1.2, method="keydiff", recent=0)
    session.append_ids(random_ids(10, 2))
    assert int(session.memory.ledger.logical[:, : session.memory.ledger.rows].max()) == 16


def test_what_changes_nothing_makes_no_room_either(engine):
    """Room for what a method reads doubles the slab of a session without a budget: taken once there is work to do."""
    session = filled(engine, 128)
    before = session.stats().kv_bytes, session.memory.ledger.rows
    for options in ({"budget": 10**9}, {"ratio": 1}, {"span": [], "ratio": 4}):
        assert session.compress(**options).entries == 0
    for options in ({"span": "no such"}, {"span": (0, 5), "ratio": 4, "budget": 3}):
        with pytest.raises(TenureError):
            session.compress(**{"ratio": 4, **options})
    assert (session.stats().kv_bytes, session.memory.ledger.rows) == before
    check_ledger(session)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ratio": "4"}, "ratio: '4' is no number"),
        ({"ratio": float("nan")}, "ratio: nan is no number"),
        ({"budget": 2.5}, "budget: 2.5 is no whole number"),
        ({"budget": True}, "budget: True is no whole number"),
        ({"ratio": 4, "span": (50, 10)}, r"span: \(50, 10\) holds none of 90 tokens"),
        ({"ratio": 4, "span": (-5, 10)}, r"span: \(-5, 10\) holds none"),
        ({"ratio": 4, "span": (90, 95)}, r"span: \(90, 95\) holds none"),
        ({"ratio": 4, "question": [10**9]}, "question: token ids must be in"),
        ({"ratio": 4, "question": ["a"]}, "question: .*Give whole numbers"),
        ({"ratio": 4, "question": "words"}, "question: the engine has no tokenizer"),
        ({"ratio": 4, "method": make_compressor("keydiff"), "options": {"a": 1}},
         "options: keydiff was made already"),
        ({"ratio": 4, "options": {"floor": "abc"}}, "gracekv, floor: 'abc' is not a number"),
        ({"ratio": 4, "options": {"repeat": None}}, "gracekv, repeat: None is not a number"),
        ({"ratio": 4, "options": {"trees": "no"}}, "gracekv, trees: 'no' is not true or false"),
        ({"ratio": 4, "method": "snapkv", "options": {"window": 1.5}}, "snapkv, window: 1.5 is not a whole number"),
        ({"ratio": 4, "method": "cake", "options": {"tau1": 0}}, "tau1: 0 is not above 0"),
        ({"ratio": 4, "recent": "x"}, "recent: 'x' is no number of tokens"),
        ({"ratio": 4, "recent": -3}, "recent: -3 is no number of tokens"),
        ({"ratio": 4, "method": "snapvk"}, "Did you mean 'snapkv'"),
    ],
)  # fmt: skip
def test_wrong_values_are_named_and_change_nothing(engine, options, text):
    session = filled(engine)
    want = answer(session)
    with pytest.raises(ConfigError, match=text):
        session.compress(**options)
    assert torch.equal(answer(session), want)
    assert session.compress(ratio=4).entries > 0


def test_compressing_twice_leaves_entries_as_they_are(engine):
    session = filled(engine)
    first = session.compress(ratio=2, method="keydiff")
    segment = session.memory.frozen.segments[0]
    again = session.compress(ratio=8, method="keydiff")
    assert session.memory.frozen.segments[0] is segment
    assert session.memory.frozen.entries == first.entries + again.entries
    check_ledger(session)


@pytest.mark.skipif(_trim() is None, reason="no GNU C library")
@pytest.mark.parametrize("method", ["gracekv", "keydiff"])
def test_the_memory_of_the_process_falls_by_what_is_told(engines, method):
    engine = engines(
        "qwen2",
        layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    session = engine.session(policy="full", chunk=512)
    for seed in range(4):
        session.append_ids(random_ids(1000, seed))
    session.fork().compress(
        ratio=8, method=method
    )  # what the libraries keep from their first use is not the cache's
    engine.heap.give_back()
    process, told = psutil.Process(), session.stats().kv_bytes
    before = process.memory_info().rss
    session.compress(ratio=8, method=method)
    fell = told - session.stats().kv_bytes
    assert fell > 30e6
    assert before - process.memory_info().rss > 0.9 * fell
