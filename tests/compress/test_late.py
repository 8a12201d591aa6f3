"""Compression of what is older than the last turn."""

from __future__ import annotations

import pytest
import torch

from tenure import Plan, Step
from tenure.compress.apply import compress
from tenure.config import SessionConfig
from tenure.errors import ConfigError
from tests.chats import chat_engine
from tests.conftest import random_ids
from tests.oracles import check_ledger

TEXT = "one two three four five six seven eight nine ten " * 4


@pytest.fixture
def engine(engines):
    return chat_engine(engines)


def test_old_turns_are_compressed_one_turn_late(engine, monkeypatch):
    seen = []
    from tenure.compress import apply

    def spy(session, span, **options):
        seen.append((span, options["delayed"]))
        return compress(session, span, **options)

    monkeypatch.setattr(apply, "compress", spy)
    session = engine.session(policy="full", chunk=64, compress="gracekv", compress_ratio=4)
    edges = []
    for _ in range(4):
        session.ask(TEXT, max_tokens=3)
        edges.append(len(session) + session.memory.waiting)
        check_ledger(session)
    # The third message compresses the first turn, the fourth one the second.
    assert [span for span, _ in seen] == [(0, edges[0]), (edges[0], edges[1])]
    for (_, stop), delayed in seen:
        assert len(delayed) <= 64
        assert int(delayed.position.min()) >= stop, "the probes are queries of the turn that followed"
    frozen = session.memory.frozen
    for segment, (start, stop) in zip(frozen.segments, [(4, edges[0]), (edges[0], edges[1])], strict=True):
        assert start <= segment.start < segment.stop <= stop
    last = session.memory.ledger.spans[-1]
    assert session.explain(last.id).resident == 1.0
    fork = session.fork()
    fork.ask(TEXT, max_tokens=3)
    assert len(fork.memory.frozen.segments) == 3
    assert len(session.memory.frozen.segments) == 2
    session.keep_first(edges[0])
    session.ask(TEXT, max_tokens=3)
    check_ledger(session)


def test_delayed_queries_are_those_of_the_turn(engine):
    session = engine.session(policy="full", chunk=64, compress="gracekv")
    session.append(TEXT)
    seen = []
    watch = session.memory.late.watch
    session.memory.late.watch = lambda start, count: seen.append((start, count)) or watch(start, count)
    session.append("eleven twelve")
    ((start, count),) = seen
    recorder = session.memory.late._seen[-1][1]
    probes = session.memory.late._placed(session.memory, start, recorder)
    from tenure.compress.probes import SessionReader

    session.memory.prepare(32)
    again = SessionReader(engine, session.memory, 32).tail(count)
    torch.testing.assert_close(probes.raw, again.raw, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(probes.lse, again.lse, atol=1e-4, rtol=1e-4)
    assert torch.equal(probes.position, again.position)


def test_plans_and_pins_stay_exact_and_a_budget_is_kept(engine):
    plan = Plan([Step("now", ("read",))])
    session = engine.session(
        budget=420, chunk=64, slack=8, policy="foresight", plan=plan, compress="snapkv", compress_ratio=4
    )
    session.append([{"role": "user", "content": TEXT[:60], "span": "pinned", "pin": "hard"},
                    {"role": "assistant", "content": "yes"},
                    {"role": "user", "content": TEXT[:60], "span": "read"}])  # fmt: skip
    for _ in range(8):
        session.ask(TEXT[:100], max_tokens=3)
        check_ledger(session)
        assert session.memory.ledger.rows + session.memory.frozen.slots <= 420 + 8
        assert session.memory.frozen.slots <= 210
    assert session.explain("pinned").resident == session.explain("read").resident == 1.0
    assert session.memory.frozen.entries > 0


def test_what_cannot_be_compressed_is_told_once_and_left_to_eviction(engine, caplog):
    session = engine.session(budget=420, chunk=8, policy="recency", compress="kvzip")
    with caplog.at_level("INFO", logger="tenure.compress"):
        for _ in range(4):
            session.ask(TEXT[:60], max_tokens=3)
            check_ledger(session)
    assert session.memory.frozen.entries == 0
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]
    assert "chunk" in caplog.text


def test_off_by_default_and_checked():
    assert SessionConfig().compress is None
    for ratio in (0.5, "4", float("nan")):
        with pytest.raises(ConfigError, match="compress_ratio"):
            SessionConfig(compress="snapkv", compress_ratio=ratio)
    assert (
        SessionConfig.load(env={"TENURE_COMPRESS": "kvzip", "TENURE_COMPRESS_RATIO": "2.5"}).compress_ratio
        == 2.5
    )


def test_an_unknown_method_is_refused(engine):
    with pytest.raises(ConfigError, match="zip"):
        engine.session(compress="zip")


def test_raw_sessions_are_compressed_by_hand(engine):
    session = engine.session(policy="full", chunk=64, compress="gracekv")
    session.append_ids(random_ids(100, 1))
    assert session.memory.frozen.entries == 0
