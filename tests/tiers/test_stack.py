"""The tiers together: capacities, the way down and up, forks, and stores that stall."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _global_shutdown_lock
from dataclasses import replace

import pytest

from tenure.errors import TierError
from tenure.tiers.archive import SpanArchive
from tenure.tiers.codec import encode
from tenure.tiers.record import Portable
from tenure.tiers.spec import TierSpec
from tenure.tiers.stack import TierStack
from tests.tiers.conftest import at
from tests.tiers.records import record, same

SIZE = record().nbytes


@pytest.fixture
def stack(tmp_path):
    """``stack(host=2, disk=3, valkey=True)``: room for so many records."""
    made = []

    def make(*, host=2, disk=None, valkey=False, ttl=None, timeout=1.0, codec="raw", folder="spans"):
        specs = [TierSpec(kind="host", capacity=host * SIZE)]
        if disk is not None:
            room = disk * (SIZE + 1200)  # an entry's header comes on top
            where = str(tmp_path / folder)
            specs.append(
                TierSpec(kind="disk", where=where, capacity=room, ttl=ttl, timeout=timeout, codec=codec)
            )
        if valkey:
            specs.append(TierSpec(kind="valkey", ttl=ttl, timeout=timeout))
        made.append(TierStack(specs, "fingerprint"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "spans").iterdir())


def counts(stack, place=None):
    found = stack.stats()
    return found if place is None else found["tiers"][place]


def test_host_alone_loses_the_least_recently_used(stack):
    one = stack(host=2)
    records = [record(seed=seed) for seed in range(3)]
    one.put("0", records[0])
    one.put("1", records[1])
    assert one.get("0") is records[0]
    one.put("2", records[2])
    assert one.get("1") is None
    assert one.get("0") is records[0]
    assert one.get("2") is records[2]
    assert one.host.nbytes == 2 * SIZE
    assert (counts(one)["hits"], counts(one)["misses"], counts(one)["lost"]) == (3, 1, 1)


def test_down_to_disk_and_valkey_and_up_again(stack, tmp_path):
    one = stack(host=2, disk=3, valkey=True)
    records = {str(seed): record(seed=seed) for seed in range(10)}
    for key, each in records.items():
        one.put(key, each)
        one.flush()
    assert len(one.host) == 2
    assert files(tmp_path) == ["5.tier", "6.tier", "7.tier"]
    valkey = one.stores[1].tier
    assert {entry.key for entry in valkey.entries()} == {"0", "1", "2", "3", "4"}
    for key in ("7", "0", "3", "9", "5", "8", "1"):
        assert same(one.get(key), records[key]), key
    one.flush()
    assert "lost" not in counts(one)
    assert counts(one)["hits"] == 7


def test_what_came_up_leaves_again_without_being_written(stack, tmp_path):
    one = stack(host=1, disk=9)
    for seed in range(3):
        one.put(str(seed), record(seed=seed))
        one.flush()
    written = counts(one, 1)["written"]
    for key in ("0", "1", "0", "1"):
        assert one.get(key) is not None
        one.flush()
    assert counts(one, 1)["written"] == written + 1, "only 2, which had never been below"


def test_a_record_on_its_way_down_is_found(stack, monkeypatch):
    one = stack(host=1, disk=9)
    go = threading.Event()
    real = one.stores[0].tier.write
    monkeypatch.setattr(one.stores[0].tier, "write", lambda key, blob: (go.wait(5), real(key, blob)))
    records = [record(seed=seed) for seed in range(4)]
    for number, each in enumerate(records):
        one.put(str(number), each)
    assert all(one.get(str(number)) is each for number, each in enumerate(records))
    go.set()
    one.flush()
    assert all(same(one.get(str(number)), each) for number, each in enumerate(records))


def test_a_record_larger_than_host_memory_goes_down_at_once(stack):
    one = stack(host=1, disk=99)
    large = record(tokens=90)
    one.put("large", large)
    assert one.get("large") is large or same(one.get("large"), large)
    one.flush()
    assert same(one.get("large"), large)
    assert one.host.nbytes == 0


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_broken_entry_is_a_miss_that_is_counted_apart(stack, tmp_path, codec):
    one = stack(host=1, disk=9, codec=codec)
    for seed in range(3):
        one.put(str(seed), record(seed=seed))
    one.flush()
    path = tmp_path / "spans" / "0.tier"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    assert one.get("0") is None
    assert one.get("1") is not None
    assert (counts(one, 1)["broken"], counts(one)["misses"]) == (1, 1)


def test_records_of_another_model_are_refused(stack, tmp_path):
    one = stack(host=1, disk=9)
    for seed in range(2):
        one.put(str(seed), record(seed=seed))
    one.flush()
    other = stack(host=1, disk=9)
    other.fingerprint = "another model"
    other.expect(["0"])
    assert other.get("0") is None
    assert counts(other, 1)["broken"] == 1


def test_reading_ahead_brings_it_into_host_memory(stack):
    one = stack(host=2, disk=9)
    for seed in range(5):
        one.put(str(seed), record(seed=seed))
    one.flush()
    one.prefetch(["0", "1", "nothing"])
    for _ in range(200):
        if one.host.get("0") and one.host.get("1"):
            break
        time.sleep(0.01)
    waited = counts(one).get("waited ms", 0)
    assert same(one.get("0"), record(seed=0))
    assert same(one.get("1"), record(seed=1))
    assert counts(one).get("waited ms", 0) == waited
    assert counts(one)["prefetched"] == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_store_that_stalls_costs_one_time_out_and_a_warning(stack, monkeypatch, caplog, ahead):
    one = stack(host=1, disk=9, timeout=0.2)
    for seed in range(5):
        one.put(str(seed), record(seed=seed))
    one.flush()
    go = threading.Event()
    real = one.stores[0].tier.read
    monkeypatch.setattr(one.stores[0].tier, "read", lambda key: (go.wait(20), real(key))[1])
    with caplog.at_level(logging.WARNING, "tenure.tiers"):
        start = time.monotonic()
        if ahead:
            one.prefetch(map(str, range(4)))
        assert [one.get(str(seed)) for seed in range(4)] == [None] * 4
        assert 0.2 <= time.monotonic() - start < 0.4, "the others are not even asked"
        assert [entry.levelname for entry in caplog.records] == ["WARNING"]
        assert same(one.get("4"), record(seed=4)), "host memory still answers"
    start = time.monotonic()
    one.put("5", record(seed=5))
    assert time.monotonic() - start < 0.1
    go.set()
    for _ in range(500):
        if not one._coming:
            break
        time.sleep(0.01)
    one.stores[0].breaker._until = 0.0  # the rest is over
    assert same(one.get("3"), record(seed=3))


@pytest.fixture
def slow(stack, monkeypatch):
    """A disk with records 0 to 29, each of which takes a tenth of a second."""
    one = stack(host=1, disk=40, timeout=0.35)
    for seed in range(31):
        one.put(str(seed), record(seed=seed))
    one.flush()
    real = one.stores[0].tier.read
    monkeypatch.setattr(one.stores[0].tier, "read", lambda key: (time.sleep(0.1), real(key))[1])
    return one


def test_a_read_behind_many_others_is_late_and_no_failure_of_the_store(slow, caplog):
    with caplog.at_level(logging.WARNING, "tenure.tiers"), ThreadPoolExecutor(30) as callers:
        found = list(callers.map(slow.get, map(str, range(30))))  # eight rounds of the reading threads
        late = found.count(None)
        assert 0 < late < 30
        assert counts(slow)["timeouts"] == late
        while slow._coming:
            time.sleep(0.01)
        assert same(slow.get("12"), record(seed=12)), "the store is asked again at once"
    assert caplog.records == []


@pytest.mark.parametrize("key", ["29", "30"])
def test_what_is_wanted_now_does_not_wait_for_what_is_read_ahead(slow, key):
    slow.put("31", record(seed=31))  # 30 leaves host memory
    slow.flush()
    slow.prefetch(map(str, range(30)))
    assert same(slow.get(key), record(seed=int(key)))
    assert "timeouts" not in counts(slow)
    assert len(slow._coming) > 20, "the others are still being read"


def test_a_store_that_fails_to_write_hands_over_to_the_next(stack, monkeypatch):
    one = stack(host=1, disk=9, valkey=True)

    def full(key, blob):
        raise TierError("no space left")

    monkeypatch.setattr(one.stores[0].tier, "write", full)
    for seed in range(4):
        one.put(str(seed), record(seed=seed))
    one.flush()
    assert {entry.key for entry in one.stores[1].tier.entries()} == {"0", "1", "2"}
    assert all(same(one.get(str(seed)), record(seed=seed)) for seed in range(4))
    assert counts(one, 1)["write errors"] == 1
    assert counts(one, 1)["skipped"] >= 2


def test_a_record_that_cannot_be_packed_is_lost_with_a_warning(stack, monkeypatch, caplog):
    """A package that is missing, for example."""
    one = stack(host=1, disk=9, codec="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with caplog.at_level(logging.WARNING, "tenure.tiers"):
        for seed in range(3):
            one.put(str(seed), record(seed=seed))
        one.flush()
    assert [one.place(key) for key in "012"] == [None, None, "host"], "nothing waits to be written for ever"
    assert (counts(one)["lost"], counts(one, 1)["write errors"]) == (2, 2)
    assert all("zstandard" in entry.message for entry in caplog.records)
    assert len(caplog.records) == 2
    monkeypatch.undo()
    one.put("3", record(seed=3))
    one.flush()
    assert one.place("2") == "disk"


def test_what_another_process_has_packed_is_a_miss_without_the_package(stack, monkeypatch):
    one = stack(host=1, disk=9, codec="zstd")
    for seed in range(2):
        one.put(str(seed), record(seed=seed))
    one.flush()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert one.get("0") is None
    assert counts(one, 1)["broken"] == 1
    monkeypatch.undo()
    assert same(one.get("0"), record(seed=0)), "it is still there"


def test_a_record_that_is_looked_at_stays_where_it_is(stack):
    one = stack(host=1, disk=9)
    for seed in range(3):
        one.put(str(seed), record(seed=seed))
    one.flush()
    assert same(one.get("0", stay=True), record(seed=0))
    assert "2" in one.host
    assert one.get("0") is not None
    assert "0" in one.host


# -- archives -----------------------------------------------------------------------------------------


def test_an_archive_finds_its_own_spans_only(stack):
    one = stack(host=9)
    a, b = SpanArchive(one), SpanArchive(one)
    assert isinstance(a, Portable)
    a.put(record("x", seed=1))
    b.put(record("x", seed=2))
    assert same(a.get("x"), record("x", seed=1))
    assert same(b.get("x"), record("x", seed=2))
    a.put(record("x", seed=3))
    assert same(a.get("x"), record("x", seed=3))
    assert len(one.host) == 2
    a.forget(["x", "y"])
    assert a.get("x") is None
    assert b.get("x") is not None


def test_what_no_archive_knows_any_more_is_removed_everywhere(stack, tmp_path):
    one = stack(host=1, disk=9)
    archive = SpanArchive(one)
    for seed in range(4):
        archive.put(record(str(seed), seed=seed))
    one.flush()
    fork = archive.fork()
    fork.put(record("of the fork", seed=9))
    archive.forget(["0", "1"])
    one.flush()
    assert same(fork.get("0"), record("0", seed=0))
    del archive
    gc.collect()
    one.flush()
    assert all(same(fork.get(str(seed)), record(str(seed), seed=seed)) for seed in range(4))
    fork.forget(["0"])
    one.flush()
    assert len(files(tmp_path)) in (3, 4)  # one of the four others is in host memory alone, or below too
    del fork
    gc.collect()
    one.flush()
    assert files(tmp_path) == []
    assert len(one.host) == 0


def test_a_closed_stack_leaves_what_a_saved_session_names(stack, tmp_path):
    one = stack(host=1, disk=9)
    kept, dropped = SpanArchive(one), SpanArchive(one)
    for seed in range(3):
        kept.put(record(str(seed), seed=seed))
        dropped.put(record(str(seed), seed=seed))
    one.flush()
    keys, records = kept.describe()
    assert set(keys) | {each.span for each in records} == {"0", "1", "2"}
    one.close()
    assert len(files(tmp_path)) == len(keys)
    again = stack(host=1, disk=9)
    archive = SpanArchive(again)
    archive.adopt(keys)
    assert all(same(archive.get(span), record(span, seed=int(span))) for span in keys)
    archive.put(record("2", seed=7))
    assert same(archive.get("2"), record("2", seed=7))


def held(monkeypatch, tier):
    """Hold writes of a tier back. Returns what says that one has begun, and what lets them go on."""
    begun, go = threading.Event(), threading.Event()
    real = tier.write

    def write(key, blob):
        begun.set()
        go.wait(5)
        real(key, blob)

    monkeypatch.setattr(tier, "write", write)
    return begun, go


def test_what_a_saved_session_names_stays_when_it_is_forgotten_on_its_way(stack, monkeypatch):
    one = stack(host=1, disk=1, valkey=True)
    archive = SpanArchive(one)
    archive.put(record("a", seed=1))
    archive.put(record("b", seed=2))
    one.flush()
    moving, go = held(monkeypatch, one.stores[1].tier)
    keys, _ = archive.describe()
    assert set(keys) == {"a"}
    archive.put(record("c", seed=3))  # b goes to disk, a has to leave it
    assert moving.wait(5)
    archive.forget(["a"])
    go.set()
    one.flush()
    again = SpanArchive(one)
    again.adopt(keys)
    assert same(again.get("a"), record("a", seed=1))


def test_many_threads(stack):
    one = stack(host=3, disk=6, valkey=True)
    wrong = []

    def work(number):
        archive = SpanArchive(one)
        for seed in range(12):
            archive.put(record(str(seed), seed=100 * number + seed))
            for other in range(seed + 1):
                got = archive.get(str(other))
                if got is not None and not same(got, record(str(other), seed=100 * number + other)):
                    wrong.append((number, other))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert one.get("nothing") is None


class Collecting:
    """A lock inside of which the garbage collector always runs."""

    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        self._lock.acquire()
        gc.collect()

    def __exit__(self, *error):
        self._lock.release()


def test_an_archive_that_ends_in_the_middle_of_a_call_holds_nothing_up(stack):
    """Garbage collection runs a finalizer at any line, inside a lock too: it may wait for none."""
    one = stack(host=2)
    keep, done = SpanArchive(one), threading.Event()
    one._lock, one.host._lock = Collecting(one._lock), Collecting(one.host._lock)

    def work():
        for call in (lambda: keep.put(record("y")), lambda: keep.get("y"), one.stats, lambda: one.get("z")):
            ended = SpanArchive(one)
            ended.put(record("x"))
            cycle = [ended]
            cycle.append(cycle)
            del ended, cycle
            call()
        done.set()

    gc.freeze()  # what was there before need not be looked at each time
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60)
    finally:
        gc.unfreeze()
    assert one.stats()["tiers"][0]["entries"] == 1, "those that have ended are released by the next call"


def test_an_engine_that_ends_in_the_middle_of_a_call_holds_nothing_up(stack, tmp_path):
    """As in the queue of another pool of threads: all of them share one lock."""
    one, archives, owner = stack(host=1, disk=9), [], Collecting(threading.Lock())
    archives.append(SpanArchive(one))
    for seed in range(3):
        archives[0].put(record(str(seed), seed=seed))
    one.flush()
    weakref.finalize(owner, one.abandon)
    owner.itself = owner
    done = threading.Event()

    def work():
        with _global_shutdown_lock:
            gc.collect()
        done.set()

    del owner
    archives.clear()
    threading.Thread(target=work, daemon=True).start()
    assert done.wait(20)
    for _ in range(500):
        if not files(tmp_path):
            break
        time.sleep(0.01)
    assert files(tmp_path) == []


def test_what_is_forgotten_while_others_move_down_is_left_nowhere(stack, monkeypatch):
    one = stack(host=1, disk=3, valkey=True)
    archive = SpanArchive(one)
    for number in range(4):
        archive.put(record(str(number), seed=number))
    one.flush()
    below = one.stores[1].tier
    moving, go = held(monkeypatch, below)
    one.stores[0].tier.spec = replace(one.stores[0].tier.spec, capacity=1)
    one.make_room()
    assert moving.wait(5)  # the first of three is on its way
    archive.forget(["0", "1", "2", "3"])
    go.set()
    one.flush()
    assert below.entries() == []
    assert one.stores[0].tier.entries() == []


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_what_is_forgotten_right_before_the_end_leaves_no_file(stack, tmp_path, monkeypatch, when):
    one = stack(host=1, disk=9)
    archive = SpanArchive(one)
    archive.put(record("a", seed=1))
    archive.put(record("b", seed=2))
    one.flush()
    writing, go = held(monkeypatch, one.stores[0].tier)
    archive.put(record("c", seed=3))
    assert writing.wait(5)
    if when == "before":
        archive.forget(["a", "b", "c"])  # the writing thread is busy
    closing = threading.Thread(target=one.close)
    closing.start()
    time.sleep(0.1)
    go.set()
    closing.join(10)
    assert files(tmp_path) == []


def test_a_read_that_a_closed_stack_drops_is_a_miss(stack, monkeypatch):
    one = stack(host=1, disk=99, timeout=20)
    for number in range(9):
        one.put(str(number), record(seed=number))
    one.flush()
    go = threading.Event()
    real = one.stores[0].tier.read
    monkeypatch.setattr(one.stores[0].tier, "read", lambda key: (go.wait(5), real(key))[1])
    with ThreadPoolExecutor(8) as callers:  # more than there are reading threads
        found = callers.map(one.get, map(str, range(8)))
        while len(one._coming) < 8:
            time.sleep(0.01)
        closing = threading.Thread(target=one.close)
        closing.start()
        time.sleep(0.1)
        go.set()
        closing.join(10)
        assert [record is None for record in found].count(True) == 4


def test_what_is_put_after_the_end_does_not_pile_up(stack):
    one = stack(host=1, disk=9)
    one.close()
    for number in range(5):
        one.put(str(number), record(seed=number))
    assert counts(one)["lost"] == 4
    assert [one.get(str(number)) is None for number in range(5)] == [True] * 4 + [False]


def test_what_is_too_large_for_a_tier_empties_none(stack, tmp_path):
    one = stack(host=3, disk=4)
    for seed in range(6):
        one.put(str(seed), record(seed=seed))
        one.flush()
    held, below = len(one.host), files(tmp_path)
    one.put("huge", record(tokens=900))
    one.flush()
    assert (len(one.host), files(tmp_path)) == (held, below)
    assert all(one.get(str(seed)) is not None for seed in range(6))
    assert (counts(one)["lost"], counts(one, 1)["too large"]) == (1, 1)
    assert one.get("huge") is None
    one.put("next", record(seed=9))
    one.flush()
    assert counts(one)["lost"] == 1, "the disk takes what fits"


def test_what_a_server_has_forgotten_is_written_again(valkey_server):
    server = valkey_server()
    one = TierStack([TierSpec(kind="host", capacity=SIZE), at(server)], "f")
    archive = SpanArchive(one)
    records = {name: record(name, seed=number) for number, name in enumerate("abc")}
    for each in records.values():
        archive.put(each)
    one.flush()
    assert same(archive.get("a"), records["a"])  # in host memory now, and below
    one.flush()
    one.stores[0].tier.client.flushall()
    keys, rest = archive.describe()
    assert (set(keys), [each.span for each in rest]) == (set(), ["a"]), "the server is asked, not believed"
    archive.put(record("d", seed=9))
    one.flush()
    assert same(archive.get("a"), records["a"])
    assert archive.get("b") is None
    one.flush()
    assert set(archive.describe()[0]) == {"a", "d"}
    one.close()


def test_an_entry_that_is_about_to_expire_is_not_relied_on(valkey_server):
    server = valkey_server()
    one = TierStack([TierSpec(kind="host", capacity=SIZE), at(server, ttl=1000)], "f")
    one.put("a", record())
    one.put("b", record(seed=1))
    one.flush()
    client = one.stores[0].tier.client
    assert one.durable("a")
    client.pexpire("tenure:a", 90_000)
    assert not one.durable("a")
    assert one.get("a") is not None
    one.put("c", record(seed=2))  # "a" leaves host memory again
    one.flush()
    assert client.pttl("tenure:a") > 900_000
    one.close()


def test_a_store_that_rests_does_not_hide_the_one_below(stack, tmp_path):
    one = stack(host=1, disk=9, valkey=True)
    kept = record()
    one.stores[1].write("a", encode("a", kept, "fingerprint", "raw"))
    one.expect(["a"])
    one.stores[0].tier._sizes["a"] = 1  # as if it might be there, too
    one.stores[0].breaker.failed("a test")
    assert same(one.get("a"), kept)


def test_a_folder_that_is_emptied_by_others_is_written_again(stack, tmp_path):
    one = stack(host=1, disk=9)
    for seed in range(2):
        one.put(str(seed), record(seed=seed))
        one.flush()
    assert one.get("0") is not None
    one.flush()
    for path in (tmp_path / "spans").iterdir():
        path.unlink()
    one.put("2", record(seed=2))
    one.flush()
    assert "0.tier" in files(tmp_path)
