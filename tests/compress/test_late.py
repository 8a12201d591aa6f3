"""Compression of what is older than the last turn."""

from __future__ import annotations

import pytest
import torch

from tenure import Plan, Step
from tenure.compress.apply import compress
from tenure.compress.probes import Recorder
from tenure.config import SessionConfig
from tenure.errors import BudgetError, ConfigError, TenureError
from tenure.pins import stays
from tenure.reads import needed
from tests.chats import chat_engine
from tests.conftest import random_ids
from tests.oracles import check_ledger

TEXT = "one two three four five six seven eight nine ten " * 4


@pytest.fixture
def engine(engines):
    return chat_engine(engines)


@pytest.mark.parametrize("ratio", [2, 8])
def test_every_turn_has_the_entries_of_its_ratio(engine, monkeypatch, ratio):
    """Sinks are charged to none of them: a short turn is not left with next to nothing."""
    from tenure.compress import apply

    made = []

    def spy(*args, **options):
        made.append(compress(*args, **options))
        return made[-1]

    monkeypatch.setattr(apply, "compress", spy)
    session = engine.session(policy="full", chunk=64, compress="snapkv", compress_ratio=ratio)
    for _ in range(5):
        session.ask("one two three four five six seven eight", max_tokens=3)
    heads = engine.layout.layers * engine.layout.kv_heads
    assert len(made) > 2
    assert [one.entries for one in made] == [heads * one.tokens // ratio for one in made]


def test_probes_stand_behind_what_was_there_before_them(engine):
    """Also where a renumbering has closed the gaps of tokens that were evicted since."""
    session = engine.session(
        budget=256,
        chunk=64,
        slack=8,
        policy="auto",
        positions="compact",
        compress="gracekv",
        compress_ratio=4,
    )
    late, looked = session.memory.late, 0
    placed = late._placed

    def spy(memory, start, recorder):
        nonlocal looked
        probes = placed(memory, start, recorder)
        if probes is not None:
            before = memory.ledger.logical[:, : memory.ledger.rows] < start
            old = memory.ledger.position[:, : memory.ledger.rows][before]
            assert int(probes.position.min()) > int(old.max())
            looked += 1
        return probes

    late._placed = spy
    for number in range(8):
        session.ask(f"{TEXT} {number} " * 2, max_tokens=60)
    assert looked


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
    # The third message compresses the first turn, the fourth one what is left of both.
    sinks = session.memory.config.sinks
    assert [span for span, _ in seen] == [(sinks, edges[0]), (sinks, edges[1])]
    for (_, stop), delayed in seen:
        assert len(delayed) <= 64
        assert int(delayed.position.min()) >= stop, "the probes are queries of the turn that followed"
    frozen = session.memory.frozen
    for segment, (start, stop) in zip(frozen.segments, [(4, edges[0]), (edges[0], edges[1])], strict=True):
        assert start <= segment.start < segment.stop <= stop
    last = session.memory.ledger.spans[-1]
    assert session.explain(last.id).resident == 1.0
    fork, state = session.fork(), session.memory.late.state()[0]
    fork.ask(TEXT, max_tokens=3)
    assert session.memory.late.state()[0] == state
    assert len(fork.memory.frozen.segments) == 3
    assert len(session.memory.frozen.segments) == 2
    seen.clear()
    session.keep_first(edges[0])
    assert len(session.memory.frozen.segments) == 1
    again = edges[:1]
    for _ in range(3):
        session.ask(TEXT, max_tokens=3)
        again.append(len(session) + session.memory.waiting)
        check_ledger(session)
    # What was taken back is done again, and the queries of turns that are gone are no evidence.
    assert [span for span, _ in seen] == [(sinks, again[1])]
    assert int(seen[0][1].position.min()) >= again[1]


def test_a_turn_begins_where_the_one_before_was_answered(engine):
    """However many calls its messages come in; a history that is replayed has answers, too."""
    session = engine.session(policy="full", chunk=64, compress="snapkv", compress_ratio=4)

    def turn():
        session.append({"role": "user", "content": TEXT})
        session.append({"role": "user", "content": TEXT})
        session.append({"role": "user", "content": "eleven twelve"})

    turn()
    list(session.generate(max_tokens=3))
    first = len(session) + session.memory.waiting
    turn()
    assert session.memory.frozen.entries == 0, "nothing is older than the last turn"
    session.append({"role": "assistant", "content": "yes"})
    second = len(session) + session.memory.waiting
    turn()
    assert [one.stop for one in session.memory.frozen.segments] == [first]
    list(session.generate(max_tokens=3))
    turn()
    assert [
        one.stop <= stop for one, stop in zip(session.memory.frozen.segments, (first, second), strict=True)
    ]
    check_ledger(session)


@pytest.mark.parametrize("again", [False, True])
def test_a_turn_that_is_answered_anew_is_no_other_turn(engine, monkeypatch, again):
    """A client that sends all of it every time, and once the same for another answer."""
    seen = []
    from tenure.compress import apply

    def spy(session, span, **options):
        seen.append((span, options["delayed"] is not None))
        return compress(session, span, **options)

    monkeypatch.setattr(apply, "compress", spy)
    session = engine.session(policy="full", chunk=64, compress="keydiff", compress_ratio=4)
    messages, starts = [], []
    for number in range(4):
        starts.append(len(session) + session.memory.waiting)
        messages.append({"role": "user", "content": TEXT})
        for _ in range(2 if again and number == 1 else 1):
            session.sync(messages)
            text = "".join(session.generate(max_tokens=3))
        messages.append({"role": "assistant", "content": text})
        check_ledger(session)
    assert [stop for (_, stop), _ in seen] == [pytest.approx(start, abs=8) for start in starts[1:3]]
    assert all(delayed for _, delayed in seen)


def test_an_edited_turn_does_not_compress_what_it_follows(engine):
    session = engine.session(policy="full", chunk=64, compress="keydiff", compress_ratio=4)
    messages, starts = [], []
    for _ in range(3):
        starts.append(len(session) + session.memory.waiting)
        messages.append({"role": "user", "content": TEXT})
        session.sync(messages)
        messages.append({"role": "assistant", "content": "".join(session.generate(max_tokens=3))})
    session.sync([*messages[:4], {"role": "user", "content": "another " + TEXT}])
    assert all(one.stop <= starts[1] for one in session.memory.frozen.segments)
    list(session.generate(max_tokens=3))
    session.sync([*messages[:2], {"role": "user", "content": "again another " + TEXT}])
    assert all(one.stop <= starts[1] for one in session.memory.frozen.segments)
    check_ledger(session)


def test_a_refused_name_compresses_nothing(engine):
    session = engine.session(policy="full", chunk=64, compress="keydiff", compress_ratio=4)
    for _ in range(2):
        session.ask(TEXT, max_tokens=3)
    taken, before = session.memory.ledger.spans[0].id, len(session)
    with pytest.raises(TenureError, match=taken):
        session.append({"role": "user", "content": "x", "span": taken})
    assert (session.memory.frozen.entries, len(session)) == (0, before)
    session.append({"role": "user", "content": "x"})
    assert session.memory.frozen.entries > 0


def test_a_refused_history_compresses_nothing(engine):
    """Names that are taken twice, and pins that do not fit, are told before old turns are compressed."""

    def of(role, content, **marks):
        return {"role": role, "content": content, **marks}

    history = [of("user", TEXT, span="x"), of("assistant", "one"), of("user", TEXT), of("assistant", "two")]
    session = engine.session(policy="full", chunk=64, compress="keydiff", compress_ratio=4)
    for message in history:
        session.append(message)
    before = session.memory.frozen.entries
    with pytest.raises(TenureError, match="x"):
        session.sync([*history, of("user", "three", span="x")])
    assert session.memory.frozen.entries == before
    session.sync([*history, of("user", "three", span="y")])
    assert session.memory.frozen.entries > before
    session = engine.session(budget=300, chunk=64, compress="keydiff", compress_ratio=4)
    for message in history:
        session.append(message)
    there = session.memory.frozen.entries, session.memory.ledger.rows
    with pytest.raises(BudgetError):
        session.append(of("user", TEXT * 9, pin="hard"))
    assert (session.memory.frozen.entries, session.memory.ledger.rows) == there


def test_a_forward_that_was_interrupted_is_no_evidence(engine, monkeypatch):
    class Broken(Recorder):
        def __call__(self, layer, q, lse):
            super().__call__(layer, q, lse)
            raise KeyboardInterrupt

    session = engine.session(policy="full", chunk=64, compress="gracekv", compress_ratio=4)
    session.ask(TEXT, max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(session.memory.late, "watch", lambda count: Broken(0))
        with pytest.raises(KeyboardInterrupt):
            session.append(TEXT)
    assert session.memory.waiting
    for number in range(4):
        session.ask(TEXT, max_tokens=3)
        assert len(session.memory.frozen.segments) == number
        check_ledger(session)


def test_a_message_that_was_taken_back_is_no_evidence(engine):
    session, other = (engine.session(policy="full", chunk=64, compress="gracekv") for _ in range(2))
    for one in (session, other):
        one.ask(TEXT, max_tokens=3)
        engine.drain([one])
    count = len(session)
    session.append("two three wrong")
    session.keep_first(count)
    for one in (session, other):
        one.append("four five")
    assert session.memory.ids == other.memory.ids
    (values, tensors), (want, probes) = (one.memory.late.state() for one in (session, other))
    assert values == want
    assert all(torch.equal(tensors[name], probe) for name, probe in probes.items())


def test_only_the_last_queries_of_a_turn_are_kept(engine):
    session = engine.session(policy="full", chunk=32, compress="snapkv")
    session.append(TEXT * 4)
    assert sum(recorder.count for _, recorder in session.memory.late._seen) <= 64 + 31
    start, recorder = session.memory.late._seen[-1]
    assert start + recorder.count == len(session)


@pytest.mark.parametrize("ratio", [1.1, 4])
def test_hard_pins_come_before_compressed_turns(engine, ratio):
    session = engine.session(
        budget=300, chunk=64, slack=8, policy="recency", compress="snapkv", compress_ratio=ratio
    )
    for _ in range(3):
        session.ask(TEXT, max_tokens=3)
        check_ledger(session)
    assert session.memory.frozen.slots <= (300 - 4) // 2
    assert session.memory.frozen.entries > 0, "what does not fit is compressed further, not thrown away"
    long = {"role": "user", "content": TEXT, "span": "pinned", "pin": "hard"}
    session.ask(long, max_tokens=3)
    assert session.explain("pinned").resident == 1.0
    session.ask(TEXT, max_tokens=3)
    assert session.explain("pinned").resident == 1.0
    check_ledger(session)


@pytest.mark.parametrize("options", [{"policy": "full"}, {"policy": "h2o", "budget": 300}], ids=str)
def test_a_restored_session_compresses_what_it_would_have(engine, tmp_path, options):
    session = engine.session(chunk=64, compress="gracekv", compress_ratio=4, **options)
    for _ in range(2):
        session.ask(TEXT, max_tokens=3)
    session.save(tmp_path / "session")
    again = engine.restore(tmp_path / "session")
    assert session.ask(TEXT, max_tokens=8) == again.ask(TEXT, max_tokens=8)
    one, other = session.memory.frozen.segments[-1].entries, again.memory.frozen.segments[-1].entries
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.position, other.position)
    assert session.memory.ids == again.memory.ids


def test_delayed_queries_are_those_of_the_turn(engine):
    session = engine.session(policy="full", chunk=64, compress="gracekv")
    session.append(TEXT)
    before = len(session)
    session.append("eleven twelve")
    start, recorder = session.memory.late._seen[-1]
    count = recorder.count
    assert (start, start + count) == (before, len(session))
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
    spans = session.memory.ledger.spans
    assert needed(session.memory) == 4 + len(spans.get("pinned")) + len(spans.get("read"))
    assert stays(session.memory) == 4 + len(spans.get("pinned")), (
        "a step's reads take no room from themselves"
    )
    plan.finish("now")
    assert needed(session.memory) == stays(session.memory)


@pytest.mark.parametrize("policy", ["recency", "auto"])
def test_a_budget_compresses_what_would_be_evicted_and_no_more(engine, policy):
    session = engine.session(budget=600, chunk=64, policy=policy, compress="keydiff", compress_ratio=4)
    text = "one two three four five six seven eight nine ten " * 3
    session.append({"role": "system", "content": text[:100]})
    coming, compressed = 0, []
    for _ in range(7):
        before = len(session)
        compressed.append(before + coming + 32 > 600)
        session.ask(text, max_tokens=3)
        coming = len(session) - before
        check_ledger(session)
        assert (session.memory.frozen.entries > 0) == compressed[-1]
        evicted = [session.explain(span.id).evicted for span in session.memory.ledger.spans]
        assert not any(lost.get("budget") for lost in evicted), "turns of one length find room"
    assert 0 < sum(compressed) < len(compressed)
    kept = session.explain(session.memory.ledger.spans[0].id).resident
    assert (kept == 1.0) == (policy == "auto"), "a system text is dear to it"


@pytest.mark.parametrize(
    ("method", "positions"), [("gracekv", "logical"), ("keydiff", "bounded"), ("snapkv", "compact")]
)
def test_what_was_said_first_fades_and_does_not_end(engine, method, positions):
    """Past what fits, all that was ever compressed competes for the room, in one segment."""
    session = engine.session(
        budget=600, chunk=64, policy="recency", positions=positions, compress=method, compress_ratio=4
    )
    ages, text = [], "one two three four five six seven eight nine ten " * 3
    for _ in range(24):
        session.ask(text, max_tokens=3)
        check_ledger(session)
        frozen = session.memory.frozen
        assert frozen.slots <= (600 - 4) // 2
        ages.append(frozen.inside(0, 600))
    assert len(session) > 3000
    assert len(frozen.segments) <= 2
    assert 0 < ages[-1] < max(ages) / 2
    assert frozen.inside(1200, 1800) > 0
    session.close()


def test_what_cannot_be_compressed_is_told_once_and_left_to_eviction(engine, caplog):
    session = engine.session(budget=420, chunk=8, policy="recency", compress="kvzip")
    with caplog.at_level("INFO", logger="tenure.compress"):
        for _ in range(7):
            session.ask(TEXT[:100], max_tokens=3)
            check_ledger(session)
    assert session.memory.frozen.entries == 0
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO", "INFO"]
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
    for number in range(3):
        session.append_ids(random_ids(100, number))
    assert session.memory.frozen.entries == 0
    assert session.compress(ratio=4).entries == session.memory.frozen.entries > 0
    check_ledger(session)
