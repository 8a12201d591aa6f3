"""Sessions on tiers: they go on whatever becomes of the stores, and come back elsewhere (C19, C21)."""

from __future__ import annotations

import copy
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tenure import Engine, EngineConfig, Plan, Step
from tenure.errors import ConfigError, SaveError
from tenure.sessiontier import names, remove
from tenure.tiers.archive import SpanArchive
from tenure.tiers.spec import TierSpec
from tenure.tiers.stack import TierStack
from tests.chats import SHAPE, chat_engine, tokenizer, user
from tests.oracles import check_ledger, state_of
from tests.test_restore import Shelf
from tests.tiers.conftest import SlowProxy, at
from tests.tiers.records import record, same

OPTIONS = {"budget": 96, "chunk": 32, "slack": 4}
TOPICS = ("pump", "valve", "motor", "belt")


@pytest.fixture
def engine(models, tmp_path):
    """``engine("disk:...:1M", ...)``: equal weights each time, tiers of its own."""
    made = []

    def make(*tiers):
        model = copy.deepcopy(models("qwen2", **SHAPE))
        made.append(Engine(model, tokenizer("chatml"), config=EngineConfig(tiers=tiers)))
        return made[-1]

    yield make
    for one in made:
        if one.tiers is not None:
            one.tiers.close()


def told(engine, **options):
    """A session that has read four things of 50 tokens or so and has lost most of them."""
    plan = Plan([Step(f"fix {topic}", (topic,)) for topic in TOPICS])
    session = engine.session(plan=plan, **{**OPTIONS, **options})
    for number, topic in enumerate(TOPICS):
        session.append(user(f"The {topic} has number {number}. " * 2, span=topic))
        session.append(user("Go on. " * 8))
    return session


def work(session, topics=TOPICS):
    """Answers to steps that each read a thing which has left the cache."""
    answers = []
    for topic in topics:
        answers.append(session.ask(user(f"Which number has the {topic}?", step=f"fix {topic}"), max_tokens=6))
        check_ledger(session)
    return answers


def all_back(session):
    """Begins each step and fetches what it reads, all of which must be in resident rows then."""
    fetched = []
    for topic in TOPICS:
        session.plan.begin(f"fix {topic}")
        fetched += session.fetch([topic])
        assert session.explain(topic).resident == 1.0
        check_ledger(session)
    assert len(fetched) >= 3, "most were in no row before"


@pytest.mark.parametrize(
    "tiers",
    [
        ("host:1M",),
        ("host:10KB", "disk:{folder}:1M"),
        ("host:10KB", "disk:{folder}:60KB", "valkey:20M"),
        ("host:10KB", "disk:{folder}:1M?codec=zstd"),
    ],
)
def test_a_session_on_tiers_is_the_session_on_an_unlimited_dict(engine, engines, tmp_path, tiers):
    plain = told(chat_engine(engines), archive=Shelf())
    session = told(engine(*(text.format(folder=tmp_path / "spans") for text in tiers)))
    session.engine.tiers.flush()
    assert session.memory.ledger.evicted_ever
    assert work(session) == work(plain)
    assert state_of(session) == state_of(plain)
    assert sum(span.restored for span in session.memory.ledger.spans) >= 3


def test_what_the_next_step_reads_is_there_before_it_begins(engine, tmp_path):
    session = told(engine("host:80KB", f"disk:{tmp_path}/spans:1M"))
    stack = session.engine.tiers
    stack.flush()
    before = stack.stats().get("prefetched", 0)
    work(session, TOPICS[:1])
    for _ in range(500):
        if stack.stats().get("prefetched", 0) > before and not stack._coming:
            break
        time.sleep(0.01)
    waited = stack.stats().get("waited ms", 0)
    assert session.fetch(["valve"]) == ["valve"]
    assert stack.stats().get("waited ms", 0) == waited


def test_forks_share_and_closing_leaves_nothing(engine, tmp_path):
    session = told(engine("host:10KB", f"disk:{tmp_path}/spans:1M"))
    stack = session.engine.tiers
    with session.fork() as fork:
        fork.append(user("Only the fork reads this. " * 4, span="own"))
        fork.append(user("Go on. " * 20))
        fork.keep_first(len(session) - 60)
    stack.flush()
    fork = session.fork()
    assert work(fork) == work(session)
    session.close()
    fork.close()
    del session, fork
    stack.flush()
    assert not list((tmp_path / "spans").iterdir())
    assert len(stack.host) == 0


# -- saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "disk", "valkey"])
def test_restored_elsewhere_with_its_spans(engine, valkey_server, tmp_path, where):
    tiers = ["host:10KB", f"disk:{tmp_path}/spans:1M"]
    if where == "valkey":
        tiers.append(at(valkey_server()).where)
    session = told(engine(*tiers))
    session.append(user("The last one is still op", span="open"))
    session.engine.tiers.flush()
    place = tmp_path / "session" if where == "file" else "tier:agent 7/ü"
    assert session.save(place) > 10_000
    again = engine(*tiers).restore(place)
    assert state_of(again) == state_of(session)
    kept = again.memory.archive.stack
    assert {span for span in TOPICS if again.memory.archive.get(span) is not None} == set(TOPICS)
    answers = work(again)
    assert answers == work(session)
    assert state_of(again) == state_of(session)
    assert kept.stats()["hits"]
    session.close()
    session.engine.tiers.close()
    third = engine(*tiers).restore(place)
    assert {span for span in TOPICS if third.memory.archive.get(span) is not None} == set(TOPICS)
    assert work(third) == answers
    assert state_of(third) == state_of(again)


@pytest.mark.parametrize("end", ["session", "process"])
@pytest.mark.parametrize("where", ["disk", "valkey"])
def test_restored_and_closed_again_its_spans_stay(engine, valkey_server, tmp_path, where, end):
    below = f"disk:{tmp_path}/spans:1M" if where == "disk" else at(valkey_server()).where
    session = told(engine("host:10KB", below))
    session.engine.tiers.flush()
    session.save(tmp_path / "session")
    session.engine.tiers.close()
    for _ in range(2):
        again = engine("host:10KB", below).restore(tmp_path / "session")
        stack = again.memory.archive.stack
        all_back(again)
        again.close()
        if end == "session":
            del again
            gc.collect()
            stack.flush()
            assert not stack._holders, "no session knows the spans any more"
        stack.close()


def test_a_server_of_one_s_own_is_no_place_to_leave_spans_in(engine, tmp_path):
    one = engine("host:80KB", "valkey:64MiB")
    session = told(one)
    one.tiers.flush()
    assert set(session.memory.archive.places().values()) == {"host", "valkey"}
    moved = one.tiers.host.counters.to_json()
    for call in (session.save, one.restore):
        with pytest.raises(ConfigError, match="no tier that outlives it"):
            call("tier:a")
    session.save(tmp_path / "session")
    assert one.tiers.host.counters.to_json() == moved, "nothing has to make room"
    one.tiers.close()
    again = engine("host:1M").restore(tmp_path / "session")
    assert state_of(again) == state_of(session)
    all_back(again)


def test_named_sessions_go_to_the_last_tier_that_outlives_the_process(engine, tmp_path):
    session = told(engine("host:10KB", f"disk:{tmp_path}/spans:1M", "valkey:64MiB"))
    session.save("tier:a")
    session.engine.tiers.close()
    again = engine("host:10KB", f"disk:{tmp_path}/spans:1M").restore("tier:a")
    assert state_of(again) == state_of(session)
    all_back(again)


def test_restored_without_tiers_or_into_some(engine, tmp_path):
    session = told(engine("host:1M"))
    session.save(tmp_path / "with")
    bare = engine()
    again = bare.restore(tmp_path / "with")
    assert state_of(again) == state_of(session)
    assert again.memory.archive is None
    plain = told(bare)
    plain.append(user("The start of a span that goes on", span="half"))
    plain.save(tmp_path / "without")
    into = engine("host:1M").restore(tmp_path / "without")
    assert state_of(into) == state_of(plain)
    for one in (plain, into):
        one.append(user("Further. " * 5, span="new"))
        one.append(user("Go on. " * 20))
    assert state_of(into) == state_of(plain)
    assert into.fetch(["half"]) == []
    assert into.fetch(["new"]) == ["new"]
    check_ledger(into)


def test_names(engine, tmp_path):
    one = engine(f"disk:{tmp_path}/spans:1M")
    session = one.session(**OPTIONS)
    session.append("Hello")
    for name in ("", "a\0b", "x" * 101, "\ud800"):
        with pytest.raises(ConfigError, match="name"):
            session.save(f"tier:{name}")
    session.save("tier:b/../c")
    session.save("tier:a")
    assert names(one) == ["a", "b/../c"]
    remove(one, "a")
    with pytest.raises(SaveError, match="no such session"):
        one.restore("tier:a")
    assert state_of(one.restore("tier:b/../c")) == state_of(session)
    with pytest.raises(ConfigError, match="tier"):
        engine("host:1M").session(**OPTIONS).save("tier:a")


def test_saved_sessions_stay_and_spans_go(engine, tmp_path):
    one = engine("host:10KB", f"disk:{tmp_path}/spans:300KB?ttl=1s")
    session = told(one)
    size = session.save("tier:mine")
    for _ in range(6):
        told(one)
    one.tiers.flush()
    time.sleep(1.1)
    one.tiers.stores[0].tier.collect()
    assert names(one) == ["mine"]
    assert len(one.tiers.stores[0].tier.entries()) == 1
    fit = 300 * 1024 // size
    for number in range(1, fit - 1):
        session.save(f"tier:{number}")
    for name in ("mine", "1"):
        session.save(f"tier:{name}")  # again, in place of itself
    with pytest.raises(SaveError, match="saved sessions"):
        _ = [session.save(f"tier:more {number}") for number in range(3)]
    assert one.restore("tier:mine") is not None


AT_EXIT = """
import sys
from tests.chats import SHAPE, tokenizer
from tests.conftest import tiny_model
from tests.tiers.test_sessions import told, work
from tenure import Engine, EngineConfig

tiers = "host:10KB", f"disk:{sys.argv[1]}:60KB", "valkey:64MiB"
engine = Engine(tiny_model("qwen2", **SHAPE), tokenizer("chatml"), config=EngineConfig(tiers=tiers))
dropped = told(engine)
work(dropped.fork())
kept = told(engine)
engine.tiers.flush()
print(engine.tiers.stores[1].tier._server._process.pid, *set(kept.memory.archive.places().values()))
kept.save(sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_that_ends_leaves_what_is_saved_and_nothing_else(engine, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, tmp_path / "spans", tmp_path / "session"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        check=True,
    )
    assert done.stderr == ""
    server, *places = done.stdout.split()
    assert set(places) >= {"disk", "valkey"}
    assert not Path(f"/proc/{server}").exists(), "the server is gone"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spans", "session"}
    assert len({path.name.split("-")[0] for path in (tmp_path / "spans").iterdir()}) == 1
    all_back(engine("host:10KB", f"disk:{tmp_path}/spans:1M").restore(tmp_path / "session"))


# -- stores that die ----------------------------------------------------------------------------------


def test_all_tiers_die_and_the_session_goes_on(engine, valkey_server, tmp_path):
    server = valkey_server()
    one = engine("host:10KB", f"disk:{tmp_path}/spans:60KB", at(server).where + "?timeout=0.3")
    session = told(one)
    one.tiers.flush()
    server.terminate()
    shutil.rmtree(tmp_path / "spans")
    (tmp_path / "spans").write_text("no folder any more")
    start = time.monotonic()
    work(session)
    session.append(user("More. " * 60, span="more"))
    assert session.ask(user("And now?"), max_tokens=4) is not None
    assert time.monotonic() - start < 20
    session.check_integrity()
    counts = [tier for tier in one.tiers.stats()["tiers"] if tier["tier"] != "host"]
    assert all(sum(n for name, n in tier.items() if "errors" in name) for tier in counts)
    session.save(tmp_path / "saved")
    assert state_of(one.restore(tmp_path / "saved")) == state_of(session)
    with pytest.raises(SaveError):
        session.save("tier:a")


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-random", "volatile-lru"])
def test_a_full_server_keeps_whole_sessions_or_none(engine, valkey_server, policy):
    """C21: 3 MB sessions on a server of 8 MB."""
    server = valkey_server(maxmemory="8mb", maxmemory_policy=policy)
    one = engine("host:10KB", at(server, timeout=5).where + "?timeout=5s")
    base = one.session(policy="full", positions="logical")
    base.append_ids([20 + i % 300 for i in range(5600)], span="all")
    sessions = [base.fork() for _ in range(5)]
    for number, session in enumerate(sessions):
        session.append_ids([30 + number])
    talker = told(one)
    saved, refused, missed = {}, [], []
    for number, session in enumerate(sessions):
        try:
            assert session.save(f"tier:{number}") > 2_500_000
            saved[number] = state_of(session)
        except SaveError as error:
            refused.append(str(error))
        work(talker, TOPICS[:1])
        for other in list(saved):
            try:
                assert state_of(one.restore(f"tier:{other}")) == saved[other]
            except SaveError as error:
                missed.append(str(error))
                del saved[other]
    assert saved
    assert len(saved) < 5
    assert all("no such session" in text for text in missed), "a clean miss, not a broken one"
    if policy == "noeviction":
        assert refused
        assert not missed, "what was saved before a refusal is intact"
        client = server.client()
        one.tiers.flush()
        spans = len(client.keys("tenure:*")) - len(client.keys("tenure:part:*")) - len(saved)
        assert len(client.keys("tenure:part:*")) <= 2 * len(saved) + spans * 2, "no part of what was refused"
    port = server.port
    server.terminate()
    work(talker, TOPICS[1:2])
    with pytest.raises(SaveError):
        sessions[0].save("tier:0")
    again = valkey_server(port=port)
    sessions[0].save("tier:0")
    assert state_of(one.restore("tier:0")) == state_of(sessions[0])
    work(talker, TOPICS[2:])
    assert again.client().ping()


def test_cancelled_reads_never_shift_replies(valkey_server):
    """C19: reads that are given up or break off on a slow line, ten at a time, give what was asked for or nothing."""
    server = valkey_server()
    fill = TierStack([TierSpec(kind="host", capacity=1), at(server, timeout=5)], "f")
    archive = SpanArchive(fill)
    records = {str(number): record(str(number), seed=number, tokens=40) for number in range(8)}
    for one in records.values():
        archive.put(one)
    fill.flush()
    keys, _ = archive.describe()
    assert set(keys) == set(records)
    proxy = SlowProxy(server.port, 0.0)
    stack = TierStack([TierSpec(kind="host", capacity=1), at(proxy.port, timeout=0.04)], "f")
    wrong, right, late = [], [], []

    def reader(seed):
        draw = random.Random(seed)
        mine = SpanArchive(stack)
        mine.adopt(keys)
        for _ in range(20):
            proxy.delay = draw.choice((0.0, 0.0, 0.015, 0.03, 0.06)) if seed != 99 else 0.0
            stack.stores[0].breaker.worked()
            name = draw.choice(sorted(keys))
            got = mine.get(name)
            (late if got is None else right if same(got, records[name]) else wrong).append(name)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "no deadlock"
    assert late
    proxy.delay, deadline = 0.0, time.monotonic() + 20  # the line is quick again: replies are those asked for
    while not right and time.monotonic() < deadline:
        stack.stores[0].breaker.worked()
        reader(99)
    assert not wrong
    assert right
    assert proxy.most <= 8, "connections do not grow"
    counts = stack.stores[0].tier.counters.to_json()
    assert "broken" not in counts, "no reply was taken for another one"
    stack.close()
    fill.close()
    proxy.close()
