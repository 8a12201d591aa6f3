"""Disk and Valkey: whole entries or none, trouble apart from misses."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from tenure.errors import ConfigError, TierError
from tenure.tiers import disk
from tenure.tiers.base import SESSIONS
from tenure.tiers.blob import Blob, BrokenError
from tenure.tiers.disk import DiskTier
from tenure.tiers.spec import TierSpec, parse_tier
from tenure.tiers.store import Store
from tenure.tiers.valkey import ValkeyTier
from tests.tiers.conftest import at


def blob(key, size=10_000, seed=0, parts=3):
    """An entry of random bytes."""
    body = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    lengths = [size // parts] * (parts - 1)
    return Blob.of({"key": key}, body, [*lengths, size - sum(lengths)])


def equal(one, other):
    return (
        one is not None and one.header["key"] == other.header["key"] and np.array_equal(one.body, other.body)
    )


@pytest.fixture
def on_disk(tmp_path):
    def make(**options):
        return DiskTier(
            TierSpec(kind="disk", where=str(tmp_path / "spans"), **{"capacity": 1 << 20, **options})
        )

    return make


# -- both ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "valkey"])
def tier(request, on_disk):
    made = on_disk(capacity=8 << 20) if request.param == "disk" else ValkeyTier(TierSpec(kind="valkey"))
    yield made
    made.close()


def test_write_read_replace_delete(tier):
    one, two = blob("a"), blob("a", seed=1, parts=1)
    assert tier.read("a") is None
    tier.write("a", one)
    tier.write("b c/ü", blob("b c/ü"))
    assert equal(tier.read("a"), one)
    tier.write("a", two)
    assert equal(tier.read("a"), two)
    assert tier.has("a")
    assert {entry.key for entry in tier.entries()} == {"a", "b c/ü"}
    assert all(10_000 <= entry.nbytes < 11_000 and entry.age < 60 for entry in tier.entries())
    tier.delete(["a", "unknown"])
    assert tier.read("a") is None
    assert not tier.has("a")
    assert tier.collect() == 0
    assert equal(tier.read("b c/ü"), blob("b c/ü"))


def test_an_empty_body_and_a_large_one(tier):
    for one in (blob("none", size=0, parts=1), blob("large", size=5 << 20)):
        tier.write(one.header["key"], one)
        assert equal(tier.read(one.header["key"]), one)


# -- disk ---------------------------------------------------------------------------------------------


def test_a_broken_file_is_an_error_once_and_a_miss_then(on_disk):
    tier = on_disk()
    for change in (lambda x: x[:-1], lambda x: x[:30], lambda x: b"", lambda x: x[:-50] + b"?" + x[-49:]):
        tier.write("a", blob("a"))
        path = next(tier.folder.glob("*.tier"))
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(BrokenError):
            tier.read("a")
        assert tier.read("a") is None
        assert not list(tier.folder.iterdir())


@pytest.mark.parametrize("after", [0, 100, 4000, 9000])
def test_a_write_that_fails_after_some_bytes_leaves_the_old_entry(on_disk, monkeypatch, after):
    """C16 on a small disk: the system call fails once so many bytes are written."""
    tier = on_disk()
    old = blob("a")
    tier.write("a", old)
    left = [after]
    real = os.write

    def write(number, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(number, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(disk.os, "write", write)
    with pytest.raises(TierError, match="space"):
        tier.write("a", blob("a", seed=1))
    monkeypatch.undo()
    assert equal(tier.read("a"), old)
    assert [path.suffix for path in tier.folder.iterdir()] == [".tier"]


def test_a_new_process_finds_what_is_there_the_least_recent_first(on_disk):
    tier = on_disk(capacity=25_000)
    for number, key in enumerate("abc"):
        tier.write(key, blob(key))
        os.utime(tier.folder / f"{key}.tier", (number, time.time() - 100 + number))
    tier.read("a")
    (tier.folder / ".x.tenure-part").mkdir()
    again = on_disk(capacity=25_000)
    assert [entry.key for entry in again.entries()] == ["b", "c", "a"]
    assert again.overflow() == ["b"]
    assert {path.name for path in tier.folder.iterdir()} == {"a.tier", "b.tier", "c.tier"}
    assert again.has("c")


def test_age_limit(on_disk):
    tier = on_disk(ttl=50)
    for key in "ab":
        tier.write(key, blob(key))
    os.utime(tier.folder / "a.tier", (0, time.time() - 60))
    assert tier.collect() == 1
    assert [entry.key for entry in tier.entries()] == ["b"]
    assert not tier.has("a")


def test_looking_at_a_folder_removes_nothing_that_another_may_keep_longer(on_disk):
    tier = on_disk(ttl=500)
    tier.write("a", blob("a"))
    os.utime(tier.folder / "a.tier", (0, time.time() - 60))
    assert [entry.key for entry in on_disk(ttl=50).entries()] == ["a"]
    assert equal(tier.read("a"), blob("a"))


def test_what_has_expired_is_a_miss_before_it_is_collected(on_disk):
    tier = on_disk(ttl=50)
    for key in ("a", f"{SESSIONS}a"):
        tier.write(key, blob(key))
        os.utime(tier._path(key), (0, time.time() - 60))
    assert tier.read("a") is None
    assert not tier.has("a")
    assert equal(tier.read(f"{SESSIONS}a"), blob(f"{SESSIONS}a"))


def test_what_is_removed_while_it_is_read_is_read(on_disk, monkeypatch):
    tier, other = on_disk(), on_disk()
    tier.write("a", blob("a"))
    real = disk._read_all
    monkeypatch.setattr(disk, "_read_all", lambda *args: (real(*args), other.delete(["a"])))
    assert equal(tier.read("a"), blob("a"))


def test_sessions_of_other_processes_count(on_disk):
    tier, other = on_disk(capacity=25_000), on_disk(capacity=25_000)
    tier.write(f"{SESSIONS}a", blob("a"))
    other.write(f"{SESSIONS}b", blob("b"))
    with pytest.raises(TierError, match="saved sessions"):
        tier.write(f"{SESSIONS}c", blob("c"))
    other.delete([f"{SESSIONS}a"])
    tier.write(f"{SESSIONS}c", blob("c"))


def test_the_size_is_that_of_the_folder_whoever_fills_it(on_disk, monkeypatch):
    first, second = on_disk(capacity=100_000), on_disk(capacity=100_000)
    for number in range(8):
        first.write(f"a{number}", blob(f"a{number}"))
        os.utime(first.folder / f"a{number}.tier", (number, number))
        second.write(f"b{number}", blob(f"b{number}"))
    assert first.overflow() == second.overflow() == []  # each knows of 80 kB
    soon = time.monotonic() + 6
    monkeypatch.setattr(disk.time, "monotonic", lambda: soon)
    assert second.overflow() == first.overflow() == [f"a{number}" for number in range(7)]
    second.delete(second.overflow())
    assert second.overflow() == []
    assert second.nbytes == sum(entry.nbytes for entry in first.entries()) <= 100_000


def test_what_is_written_while_a_folder_is_listed_stays_known(on_disk, monkeypatch):
    tier = on_disk()
    tier.write("gone", blob("gone"))
    real = tier.entries

    def entries():
        found = real()
        tier.write("new", blob("new"))
        tier.delete(["gone"])
        return found

    monkeypatch.setattr(tier, "entries", entries)
    tier.collect()
    assert (tier.has("new"), tier.has("gone")) == (True, False)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        DiskTier(TierSpec(kind="disk", where=str(tmp_path / "file"), capacity=1))


# -- Valkey -------------------------------------------------------------------------------------------


def test_all_keys_of_an_entry_expire_together_and_without_being_asked(valkey_server):
    server = valkey_server()
    tier = ValkeyTier(at(server, ttl=0.4))
    tier.write("a", blob("a"))
    client = server.client()
    assert len(client.keys("*")) == 4
    assert len({client.pexpiretime(key) for key in client.keys("*")}) == 1
    time.sleep(0.6)
    assert client.keys("*") == []
    assert tier.read("a") is None


def test_parts_that_are_gone_make_a_miss_and_take_the_rest_along(valkey_server):
    server = valkey_server()
    tier, client = ValkeyTier(at(server)), server.client()
    for victim in range(3):
        tier.write("a", blob("a"))
        tier.write("b", blob("b"))
        parts = sorted(key for key in client.keys("*part*"))
        client.delete(parts[victim])
        found = [tier.read(key) for key in "ab"]
        assert sum(one is None for one in found) == 1
        assert all(one is None or equal(one, blob(key)) for key, one in zip("ab", found, strict=True))
        assert len(client.keys("*")) == 4, "nothing of the broken one is left"
        client.flushall()


def before(monkeypatch, client, call, *acts):
    """Have something happen before a client's first call, something else before its second, and so on."""
    real, left = getattr(client, call), list(acts)

    def wrapped(*args, **options):
        if left:
            left.pop(0)()
        return real(*args, **options)

    monkeypatch.setattr(client, call, wrapped)


@pytest.mark.parametrize("call", ["pipeline", "eval"])
def test_an_entry_that_is_replaced_while_it_is_read_stays_and_is_read(valkey_server, monkeypatch, call):
    """Another process writes before the parts are read, or before what is left of a broken entry is removed."""
    server = valkey_server()
    tier, other, client = ValkeyTier(at(server)), ValkeyTier(at(server)), server.client()
    new = blob("a", seed=1)
    for broken in ("part", "header") if call == "eval" else (None,):
        tier.write("a", blob("a"))
        if broken == "part":
            client.delete(sorted(client.keys("*part*"))[1])
        elif broken == "header":
            client.set("tenure:a", b"TENURE-1 or so")
        before(monkeypatch, tier.client, call, partial(other.write, "a", new))
        assert equal(tier.read("a"), new)
        monkeypatch.undo()
        assert equal(other.read("a"), new)
        assert tier.has("a")
        assert "partial" not in tier.counters.to_json()
        client.flushall()


def test_an_entry_that_is_replaced_at_each_try_is_an_error_and_stays(valkey_server, monkeypatch):
    server = valkey_server()
    tier, other = ValkeyTier(at(server)), ValkeyTier(at(server))
    tier.write("a", blob("a"))
    writes = [partial(other.write, "a", blob("a", seed=seed)) for seed in (1, 2)]
    before(monkeypatch, tier.client, "pipeline", *writes)
    with pytest.raises(TierError, match="replaced"):
        tier.read("a")
    assert equal(tier.read("a"), blob("a", seed=2))


def test_an_entry_that_is_removed_while_it_is_read_is_a_miss(valkey_server, monkeypatch):
    server = valkey_server()
    tier, other = ValkeyTier(at(server)), ValkeyTier(at(server))
    tier.write("a", blob("a"))
    before(monkeypatch, tier.client, "pipeline", partial(other.delete, ["a"]))
    assert tier.read("a") is None
    assert not tier.has("a")


def test_replaced_entries_leave_nothing(valkey_server):
    server = valkey_server()
    tier, client = ValkeyTier(at(server)), server.client()
    for seed in range(4):
        tier.write("a", blob("a", seed=seed))
    assert len(client.keys("*")) == 4
    assert equal(tier.read("a"), blob("a", seed=3))


def test_a_changed_value_is_refused(valkey_server):
    server = valkey_server()
    tier, client = ValkeyTier(at(server)), server.client()
    tier.write("a", blob("a"))
    client.setrange(sorted(client.keys("*part*"))[1], 5, b"changed")
    with pytest.raises(BrokenError):
        tier.read("a")
    client.set("tenure:a", b"TENURE-1 or so")
    with pytest.raises(BrokenError):
        tier.read("a")
    assert tier.read("a") is None


def test_parts_without_a_manifest_are_collected(valkey_server):
    server = valkey_server()
    tier, client = ValkeyTier(at(server, ttl=1000)), server.client()
    tier.write("a", blob("a"))
    now = int(time.time())
    client.set(f"tenure:part:{now - 100}.lost:0", b"x", px=900_000)
    client.set(f"tenure:part:{now - 1}.fresh:0", b"x", px=9_000)  # its manifest may still come
    client.set("other", b"x")
    assert tier.collect() == 1
    assert len(client.keys("*")) == 4 + 2
    assert equal(tier.read("a"), blob("a"))


def test_a_dead_server_is_an_error_and_comes_back(valkey_server):
    server = valkey_server()
    tier, port = ValkeyTier(at(server, timeout=0.5)), server.port
    tier.write("a", blob("a"))
    server.terminate()
    for call in (lambda: tier.read("a"), lambda: tier.write("a", blob("a")), lambda: tier.delete(["a"])):
        with pytest.raises(TierError):
            call()
    valkey_server(port=port)
    assert tier.read("a") is None
    tier.write("a", blob("a"))
    assert equal(tier.read("a"), blob("a"))


def test_a_server_that_cannot_be_reached_when_the_tier_is_made():
    tier = ValkeyTier(at(1, timeout=0.2))
    with pytest.raises(TierError):
        tier.read("a")
    with pytest.raises(ConfigError):
        ValkeyTier(TierSpec(kind="valkey", where="valkey://127.0.0.1:notaport/0"))


@pytest.mark.parametrize("answer", [b"$abc\r\n", b"*x\r\n", b":zz\r\n", b"\0\xff\r\n", b"*3\r\n+a\r\n"])
def test_what_is_no_server_is_an_error(answer):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.recv(1 << 16)
                client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    tier = ValkeyTier(at(listener.getsockname()[1], timeout=0.2))
    for call in (lambda: tier.read("a"), lambda: tier.write("a", blob("a")), tier.entries):
        with pytest.raises(TierError):
            call()
    listener.close()


# -- a store that fails -------------------------------------------------------------------------------


def test_one_warning_and_no_further_tries_for_a_while(on_disk, monkeypatch, caplog):
    store = Store(on_disk())
    calls = []

    def fail(key):
        calls.append(key)
        raise TierError("no answer")

    monkeypatch.setattr(store.tier, "read", fail)
    with caplog.at_level(logging.WARNING, "tenure.tiers"):
        assert [store.read("a") for _ in range(20)] == [None] * 20
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert store.tier.counters.to_json() == {"read errors": 1, "skipped": 19}
    monkeypatch.undo()
    store.breaker._until = 0.0  # the rest is over
    assert store.write("a", blob("a"))
    assert equal(store.read("a"), blob("a"))
    store.stop()


def test_a_full_disk_is_read_and_emptied(on_disk, caplog):
    """The kernel refuses files over 3 KB, as a full disk does."""
    store = Store(on_disk())
    assert store.write("a", blob("a"))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "tenure.tiers"):
            assert [store.write(key, blob(key)) for key in "bcd"] == [False] * 3
        assert equal(store.read("a"), blob("a"))
        assert store.delete(["a"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert ["takes nothing more" in entry.message for entry in caplog.records] == [True]
    assert store.tier.counters.to_json()["write errors"] >= 1
    store._room._until = 0.0  # the rest is over
    assert store.write("b", blob("b"))
    store.stop()


def test_a_full_server_is_read(valkey_server):
    server = valkey_server(maxmemory="3mb", maxmemory_policy="noeviction")
    store = Store(ValkeyTier(at(server)))
    assert store.write("a", blob("a"))
    assert not store.write("large", blob("large", size=5 << 20))
    assert equal(store.read("a"), blob("a"))
    store.stop()


def test_rests_grow_and_end(monkeypatch):
    from tenure.tiers import breaker

    now = [0.0]
    monkeypatch.setattr(breaker.time, "monotonic", lambda: now[0])
    one, tries = breaker.Breaker("x"), []
    while now[0] < 200:
        if one.admits():
            tries.append(now[0])
            one.failed("dead")
        now[0] += 0.25
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(gaps) == 30.0
    now[0] += 40
    assert one.admits()
    assert not one.admits(), "one caller at a time tries it"
    one.worked()
    assert one.admits()
    assert one.admits()


def test_a_broken_session_stays_for_who_wants_to_save_what_can_be_saved(on_disk):
    tier = on_disk()
    tier.write(SESSIONS + "a", blob(SESSIONS + "a"))
    path = tier._path(SESSIONS + "a")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(BrokenError):
            tier.read(SESSIONS + "a")
    assert path.read_bytes() == data


def test_a_broken_file_that_cannot_be_removed_is_only_broken(on_disk, monkeypatch):
    tier = on_disk()
    for key in "ab":
        tier.write(key, blob(key))
    path = tier._path("a")
    path.write_bytes(path.read_bytes()[:-1])

    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(type(path), "unlink", refuse)
    with pytest.raises(BrokenError):
        tier.read("a")
    assert equal(tier.read("b"), blob("b"))


@pytest.mark.parametrize("parts", [None, 3, [[-1, "x"]], [[1 << 60, "x"]], [["a", "x"]], [[1]]])
def test_headers_that_tell_no_parts_are_broken(on_disk, parts):
    """Whole by its digest, and yet nothing that this library would write."""
    tier = on_disk()
    header = {"key": "a"} if parts is None else {"key": "a", "parts": parts}
    tier._path("a").write_bytes(Blob(header, np.empty(0, np.uint8)).prefix() + b"12345")
    tier.expect(["a"])
    with pytest.raises(BrokenError):
        tier.read("a")


def test_options_that_the_client_library_does_not_know_are_refused():
    with pytest.raises(ConfigError, match=r"tiers: valkey://h: 'tll' is not known"):
        ValkeyTier(parse_tier("valkey://h?tll=1d"))


@pytest.mark.parametrize(
    "query", ["protocol=9", "protocol=abc", "health_check_interval=x"], ids=lambda query: query
)
def test_options_with_values_that_it_does_not_take_are_refused(query):
    with pytest.raises(ConfigError, match=r"tiers: valkey://h"):
        ValkeyTier(parse_tier(f"valkey://h?{query}"))


@pytest.mark.parametrize("mark", ["#", "/", "?"])
def test_a_part_of_a_password_that_reads_as_a_port_is_not_shown(mark):
    with pytest.raises(ConfigError) as refused:
        ValkeyTier(parse_tier(f"valkey://:sec{mark}ret@host:6379/0"))
    assert "sec" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_what_is_about_to_expire_is_not_relied_on(on_disk):
    tier = on_disk(ttl=1000.0)
    tier.write("a", blob("a"))
    tier.write(f"{SESSIONS}x", blob("x"))
    assert tier.holds("a")
    old = time.time() - 950
    for path in tier.folder.iterdir():
        os.utime(path, (old, old))
    assert not tier.holds("a")
    assert tier.has("a"), "it can still be read"
    assert tier.holds(f"{SESSIONS}x"), "sessions do not expire"


def test_an_entry_without_one_of_its_parts_is_not_relied_on(valkey_server):
    server = valkey_server()
    tier, client = ValkeyTier(at(server)), server.client()
    tier.write("a", blob("a"))
    assert tier.holds("a")
    client.delete(sorted(client.keys("*part*"))[1])
    assert not tier.holds("a")
