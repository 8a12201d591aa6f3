"""Sessions over time: parked and brought back, restarted, killed, left by their clients, asked for at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tenure.config import SessionConfig
from tests.chats import assistant, user
from tests.oracles import check_ledger
from tests.serve.live import SMALL, serving

TINY = SessionConfig(budget=96, chunk=32, slack=8)


def ask(http, messages, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(reply):
    return reply["choices"][0]["message"]["content"]


def played(url, names, rounds):
    """Several conversations in turn, each round one turn of each; the answers."""
    said = {name: [] for name in names}
    history = {name: [] for name in names}
    with httpx.Client(base_url=url, timeout=60) as http:
        for turn in range(rounds):
            for name in names:
                history[name].append(user(f"{name} asks question {turn} about foxes and dogs and foxes."))
                reply = ask(http, history[name], session_id=name)
                said[name].append(
                    (text_of(reply), reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
                )
                history[name].append(assistant(text_of(reply)))
    return said


def test_many_sessions_in_the_memory_of_a_few(tmp_path):
    names = [f"s{number}" for number in range(12)]
    with serving(resident=3, state=tmp_path, session=TINY) as live:
        few = played(live.url, names, 3)
        assert live.call(lambda: live.state.store.resident) <= 3
        assert {held.id for held in live.sessions()} == set(names)
    with serving(resident=12, session=TINY) as live:
        many = played(live.url, names, 3)
        assert live.call(lambda: live.state.store.resident) == 12
        for held in live.sessions():
            check_ledger(held.session)
    assert few == many, "parked and never parked answer the same, and reuse as much"


@pytest.mark.slow
def test_five_hundred_sessions_in_the_memory_of_eight(tmp_path):
    names = [f"s{number}" for number in range(500)]
    with serving(resident=8, state=tmp_path, session=TINY) as live:
        few = played(live.url, names, 3)
        assert len(live.sessions()) == 500
    with serving(resident=500, session=TINY) as live:
        assert few == played(live.url, names, 3)


def test_a_restart_brings_sessions_and_responses_back(tmp_path):
    messages = [user("Remember the brown fox, it is quick.")]
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        first = ask(http, messages, session_id="kept", max_tokens=6)
        given = http.post(
            "/v1/responses", json={"model": "tiny", "input": "One.", "max_output_tokens": 4}
        ).json()
        before = http.get("/v1/sessions/kept").json()
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        after = http.get("/v1/sessions/kept").json()
        assert (after["tokens"], after["turns"]) == (before["tokens"], before["turns"])
        messages += [assistant(text_of(first)), user("What was it?")]
        second = ask(http, messages, max_tokens=6)
        assert second["tenure"]["session_id"] == "kept", "found by its tokens"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
        body = {"model": "tiny", "input": "Two.", "max_output_tokens": 4, "previous_response_id": given["id"]}
        reply = http.post("/v1/responses", json=body)
        assert reply.status_code == 200
        assert (
            reply.json()["usage"]["input_tokens_details"]["cached_tokens"]
            >= given["usage"]["input_tokens"] - 1
        )
    with serving() as live, httpx.Client(base_url=live.url, timeout=30) as http:
        fresh = ask(http, messages, max_tokens=6)
    assert text_of(fresh) == text_of(second)


def test_a_response_that_cannot_be_stored_is_answered_and_goes_on(tmp_path, caplog):
    body = {"model": "tiny", "input": "One.", "max_output_tokens": 4}
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        (tmp_path / "responses").rmdir()
        given = http.post("/v1/responses", json=body)
        assert given.status_code == 200
        assert f"{given.json()['id']} is kept in memory only: No such file" in caplog.text
        again = http.post("/v1/responses", json={**body, "previous_response_id": given.json()["id"]})
        assert again.status_code == 200
        assert http.delete(f"/v1/responses/{given.json()['id']}").status_code == 200


def test_a_broken_file_costs_only_time(tmp_path):
    messages = [user("Remember the brown fox, it is quick.")]
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        first = ask(http, messages, session_id="kept")
    for file in (tmp_path / "sessions").glob("*.session"):
        file.write_bytes(file.read_bytes()[:-50])
    (tmp_path / "sessions" / "junk.json").write_text("{")
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        for call, body in (("restore", {}), ("fork", {"session_id": "other"})):
            refused = http.post(f"/v1/sessions/kept/{call}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_broken")
        kept = http.get("/v1/sessions/kept").json()
        assert kept["state"] == "parked", "nothing empty takes its place"
        again = ask(http, messages, session_id="kept")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "told as it is"
        assert text_of(again) == text_of(first)


def test_nothing_is_left_outside_the_folder(tmp_path):
    state = tmp_path / "a" / "state"
    with serving(state=state) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        for name in ("..", "a/../../b", "/etc/x", "%2e%2e", "con", "a" * 256, "ü\u202e"):
            http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": [user("x")], "max_tokens": 1, "session_id": name},
            )
    assert [file for file in tmp_path.rglob("*") if file.is_file() and state not in file.parents] == []
    assert all(len(file.stem) == 32 for file in (state / "sessions").iterdir())


def test_clients_that_leave_lock_nothing():
    generator = random.Random(0)
    with serving(resident=4, session=SMALL, streams_per_key=64, waiting=256) as live:
        lock = threading.Lock()

        def leave(number):
            with lock:
                wait, name = generator.random() * 0.02, f"s{generator.randrange(6)}"
                streamed = generator.random() < 0.7
            body = {
                "model": "tiny",
                "messages": [user(f"Number {number}: " + "fox " * 20)],
                "max_tokens": 80,
                "stream": streamed,
                "session_id": name,
                "n": 1 + number % 2,
            }
            with (
                httpx.Client(base_url=live.url, timeout=0.01 + wait) as http,
                pytest.MonkeyPatch.context(),
            ):
                try:
                    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                        for _ in reply.iter_bytes():
                            if wait < 0.01:
                                break
                except httpx.TransportError:
                    pass

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(200)))
        until = time.monotonic() + 20
        while live.state.worker.running or live.state.worker.waiting:
            assert time.monotonic() < until, "answers go on for nobody"
            time.sleep(0.05)
        assert not any(held.busy or held.temporary for held in live.sessions())
        assert live.call(lambda: live.state.store.resident) <= 4
        with httpx.Client(base_url=live.url, timeout=30) as http:
            for number in range(6):
                assert text_of(ask(http, [user("Still there?")], session_id=f"s{number}")) is not None
        for held in live.sessions():
            if held.session is not None:
                check_ledger(held.session)


def test_requests_at_once_on_one_session_and_on_one_history(tmp_path):
    history = [user("The quick brown fox jumps over the lazy dog, again and again and again.")]
    with serving(resident=4, streams_per_key=32) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        alone = text_of(ask(http, history, max_tokens=8))

        def one(number):
            named = {"session_id": "same"} if number % 2 else {}
            return text_of(ask(http, history, max_tokens=8, **named))

        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(one, range(24))) == {alone}
        assert not any(held.busy for held in live.sessions())


def test_an_edited_history_forks_and_the_old_one_stays():
    start = [user("Tell me about the quick brown fox that jumps over the lazy dog. " * 3)]
    with serving(resident=4) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        first = ask(http, start)
        left = ask(http, [*start, assistant(text_of(first)), user("And the dog?")])
        right = ask(http, [*start, assistant("Another answer."), user("And the dog?")])
        assert left["tenure"]["session_id"] == first["tenure"]["session_id"]
        assert right["tenure"]["how"] == "branched"
        assert right["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
        more = [
            *start,
            assistant(text_of(first)),
            user("And the dog?"),
            assistant(text_of(left)),
            user("So?"),
        ]
        again = ask(http, more)
        assert again["tenure"]["session_id"] == first["tenure"]["session_id"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= left["usage"]["prompt_tokens"]


def test_sessions_are_stored_between_turns_only_where_they_outlive_the_server(tmp_path):
    for state, stored in ((None, False), (tmp_path, True)):
        with serving(resident=3, state=state) as live, httpx.Client(base_url=live.url, timeout=30) as http:
            ask(http, [user("The brown fox.")], session_id="a")
            until = time.monotonic() + 5
            while http.get("/v1/sessions/a").json()["saved"] != stored:
                assert time.monotonic() < until
            time.sleep(0.2)
            assert http.get("/v1/sessions/a").json()["saved"] is stored
            assert http.post("/v1/sessions/a/park").json()["state"] == "parked"
            assert http.post("/v1/sessions/a/restore").json()["state"] == "idle"


def test_forks_and_deletes_over_http():
    with serving(resident=3) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        ask(http, [user("The brown fox. " * 10)], session_id="a")
        tokens = http.get("/v1/sessions/a").json()["tokens"]
        fork = http.post("/v1/sessions/a/fork", json={"session_id": "b", "tokens": 20}).json()
        assert (fork["id"], fork["tokens"]) == ("b", 20)
        assert http.post("/v1/sessions/a/fork", json={"session_id": "b"}).status_code == 409
        assert http.post("/v1/sessions/a/fork", json={"tokens": tokens + 1}).status_code == 400
        assert http.post("/v1/sessions/a/fork").json()["tokens"] == tokens
        assert http.post("/v1/sessions/a/save").json()["saved"] is True
        assert http.post("/v1/sessions/a/park").json()["state"] == "parked"
        assert http.post("/v1/sessions/a/restore").json()["state"] == "idle"
        assert http.delete("/v1/sessions/a").json()["deleted"] is True
        assert http.get("/v1/sessions/a").status_code == 404
        assert http.delete("/v1/sessions/a").status_code == 404
        assert len(http.get("/v1/sessions").json()["data"]) == 2


def test_a_full_server_refuses_with_a_time_to_come_back():
    with serving(resident=1, streams=1, waiting=2, wait=0.3, streams_per_key=3) as live:
        statuses = []

        def one(number):
            with httpx.Client(base_url=live.url, timeout=60) as http:
                body = {"model": "tiny", "messages": [user(f"{number}")], "max_tokens": 1000}
                reply = http.post("/v1/chat/completions", json=body)
                statuses.append(reply.status_code)
                if reply.status_code != 200:
                    assert int(reply.headers["retry-after"]) >= 1
                    assert reply.json()["error"]["code"] in ("too_many_requests", "overloaded")

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(one, range(6)))
        assert statuses.count(200) >= 1
        assert {429, 503} & set(statuses)


SERVER = """
import sys
from pathlib import Path
from tenure.serve.config import ServeConfig
from tenure.serve.run import serve
from tests.serve.live import SMALL, tiny_engine
serve(tiny_engine(), ServeConfig(port=0, state=Path(sys.argv[1]), session=SMALL, grace=20, max_tokens=100000))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, state):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(state)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TENURE_POISON": "0"},
        )
        for line in self.process.stderr:
            if " at http" in line:
                self.url = line.split(" at ")[1].split("/v1")[0]
                return
        raise RuntimeError("no server")

    def end(self, number):
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process.stderr.close()
        return code


def test_sigterm_finishes_streams_and_kill_loses_nothing_that_was_answered(tmp_path):
    messages = [user("The quick brown fox jumps over the lazy dog.")]
    server = Process(tmp_path)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        first = ask(http, messages, session_id="kept", max_tokens=8)
        body = {
            "model": "tiny",
            "messages": [user("Go on.")],
            "max_tokens": 1500,
            "stream": True,
            "temperature": 1.0,
        }
        body |= {"session_id": "long", "seed": 3, "stop": ["\x01\x02\x03"]}
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] in ("stop", "length")
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)

    server = Process(tmp_path)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert {one["id"] for one in http.get("/v1/sessions").json()["data"]} == {"kept", "long"}
        messages += [assistant(text_of(first)), user("And then?")]
        second = ask(http, messages, max_tokens=8)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
        until = time.monotonic() + 10
        while not http.get("/v1/sessions/kept").json()["saved"]:
            assert time.monotonic() < until
            time.sleep(0.02)
    server.end(signal.SIGKILL)

    messages += [assistant(text_of(second)), user("At last?")]
    with serving(state=tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        third = ask(http, messages, max_tokens=8)
        assert third["tenure"]["session_id"] == "kept"
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= second["usage"]["prompt_tokens"]
    with serving() as live, httpx.Client(base_url=live.url, timeout=30) as http:
        assert text_of(ask(http, messages, max_tokens=8)) == text_of(third)
