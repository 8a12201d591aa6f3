"""What is stored stays: saves that fail, sessions that cannot come back, limits, a server with little room."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time

import httpx
import pytest

from tenure.config import SessionConfig
from tenure.serve.events import Traffic
from tenure.serve.held import Held
from tenure.serve.parking import _name
from tests.chats import assistant, system, user
from tests.serve.live import serving, tiny_engine

FOX = [user("Remember the brown fox, it is quick. " * 3)]
RULES = system("Always answer in one short line and never speak of cats at all. " * 3)
OTHER = SessionConfig(budget=96, chunk=32, slack=8)


def client(live):
    return httpx.Client(base_url=live.url, timeout=30)


def ask(http, messages, **fields):
    return http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 3, **fields}
    )


def going_on(messages, reply, text):
    return [*messages, assistant(reply.json()["choices"][0]["message"]["content"]), user(text)]


def cached(reply):
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def traffic(live):
    """Outcomes of what was stored and read, as they come."""
    seen = []
    live.state.bus.listen(lambda event: seen.append(event) if isinstance(event, Traffic) else None)
    return seen


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def blocked(tmp_path, session):
    """A folder where a session's file goes, so that no file can be put there."""
    place = tmp_path / "sessions" / f"{_name(Held(session, ''))}.session"
    place.mkdir(parents=True)
    (place / "in the way").touch()
    return place


def test_a_failed_save_is_made_up_for_by_parking(tmp_path):
    place = blocked(tmp_path, "kept")
    with serving(resident=2, state=tmp_path) as live, client(live) as http:
        seen = traffic(live)
        first = ask(http, FOX, session_id="kept")
        until(lambda: seen)
        time.sleep(0.3)
        assert [one.outcome for one in seen] == ["error"], "once a turn"
        assert http.get("/v1/sessions/kept").json()["saved"] is False
        reply = http.post("/v1/sessions/kept/park")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_stored")
        assert str(tmp_path) not in reply.text
        shutil.rmtree(place)
        assert http.post("/v1/sessions/kept/park").json()["state"] == "parked"
        assert place.is_file()
        second = ask(http, going_on(FOX, first, "So?"), session_id="kept")
        assert cached(second) >= first.json()["usage"]["prompt_tokens"]


def test_a_failed_save_is_made_up_for_at_the_end(tmp_path):
    place = blocked(tmp_path, "kept")
    with serving(resident=2, state=tmp_path) as live, client(live) as http:
        seen = traffic(live)
        ask(http, FOX, session_id="kept")
        until(lambda: seen)
        shutil.rmtree(place)
    assert place.is_file()


def test_a_session_that_cannot_be_stored_gives_no_room(tmp_path):
    place = blocked(tmp_path, "kept")
    with serving(resident=1, state=tmp_path) as live, client(live) as http:
        first = ask(http, FOX, session_id="kept")
        begun = time.monotonic()
        refused = ask(http, [user("Other.")])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_stored")
        assert time.monotonic() - begun < 10
        assert cached(ask(http, going_on(FOX, first, "So?"), session_id="kept")) > 0, "nothing is lost"
        shutil.rmtree(place)
        assert ask(http, [user("Other.")]).status_code == 200


def test_an_active_session_is_stored_while_others_are_answered(tmp_path):
    with serving(resident=4, state=tmp_path, save_within=0.5) as live, client(live) as http:
        seen = traffic(live)
        body = {"model": "tiny", "messages": [user("Go.")], "max_tokens": 15000, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True, "session_id": "l"}):
            messages, end = [user("An agent.")], time.monotonic() + 8
            with client(live) as other:
                while not any(one.session == "agent" for one in seen):
                    assert time.monotonic() < end
                    reply = ask(other, messages, session_id="agent", max_tokens=1)
                    messages = going_on(messages, reply, "And?")
                    time.sleep(0.2)
                assert live.state.worker.running == 1


def test_a_conversation_that_begins_alike_needs_no_second_place():
    for resident, n in ((1, 1), (2, 2)):
        with serving(resident=resident, wait=20) as live, client(live) as http:
            ask(http, [RULES, user("One.")])
            begun = time.monotonic()
            reply = ask(http, [RULES, user("Two, something else.")], n=n)
            assert reply.status_code == 200
            assert reply.json()["tenure"]["how"] == "new"
            assert time.monotonic() - begun < 10


def test_a_failed_forward_ends_all_answers_and_the_server_goes_on():
    with serving(resident=6) as live, client(live) as http:
        engine, worker, replies = live.state.engine, live.state.worker, []
        step = engine.step

        def failing(sessions, **options):
            if worker.running >= 4:
                raise RuntimeError("out of memory")
            return step(sessions, **options)

        engine.step = failing

        def one(number):
            with client(live) as own:
                messages = [user(f"{number} fox")]
                replies.append(ask(own, messages, n=2, max_tokens=2000, ignore_eos=True).status_code)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: worker.running >= 2 * number or replies)
        for thread in threads:
            thread.join()
        engine.step = step
        assert replies == [500, 500]
        assert worker.is_alive()
        assert ask(http, [user("And now?")]).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_has_stopped_refuses_at_once():
    with serving(resident=2) as live, client(live) as http:
        waiting = threading.Thread(target=lambda: ask(http, [user("Go.")], max_tokens=15000, ignore_eos=True))
        waiting.start()
        until(lambda: live.state.worker.running)
        live.state.worker.call(sys.exit)
        waiting.join(10)
        assert not waiting.is_alive(), "the answer under way ends"
        for reply in (ask(http, FOX), http.get("/v1/sessions")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_stopped")
        assert http.get("/healthz").status_code == 503


def test_the_limit_takes_the_oldest_but_not_what_is_branched_from():
    with serving(resident=4, max_sessions=3) as live, client(live) as http:
        first = ask(http, [RULES, user("One.")]).json()["tenure"]["session_id"]
        ask(http, [user("x")], session_id="named")
        oldest = ask(http, [user("y")]).json()["tenure"]["session_id"]
        branch = ask(http, [RULES, user("Two.")])
        assert branch.json()["tenure"]["how"] == "branched"
        left = {one["id"]: one["tokens"] for one in http.get("/v1/sessions").json()["data"]}
        assert set(left) == {first, "named", branch.json()["tenure"]["session_id"]}
        assert oldest not in left
        assert all(left.values())


def test_at_a_limit_of_one_a_branch_takes_the_place_of_its_source():
    with serving(resident=4, max_sessions=1) as live, client(live) as http:
        ask(http, [RULES, user("One.")])
        branch = ask(http, [RULES, user("Two.")])
        assert branch.status_code == 200
        assert cached(branch) > 0
        names = [one["id"] for one in http.get("/v1/sessions").json()["data"]]
        assert names == [branch.json()["tenure"]["session_id"]]
        refused = http.post(f"/v1/sessions/{names[0]}/fork")
        assert refused.json()["error"]["code"] == "too_many_sessions", (
            "a copy that was asked for takes nothing"
        )
        assert [one["id"] for one in http.get("/v1/sessions").json()["data"]] == names


def test_further_answers_cost_no_session():
    with serving(resident=4, max_sessions=2) as live, client(live) as http:
        ask(http, [user("A fully different talk.")], session_id="a")
        ask(http, FOX, session_id="b")
        assert ask(http, FOX, n=3, session_id="b").status_code == 200
        assert {one["id"] for one in http.get("/v1/sessions").json()["data"]} == {"a", "b"}
        assert not any(held.temporary for held in live.sessions())


def test_a_session_that_finds_no_memory_stays_stored(tmp_path, monkeypatch):
    with serving(resident=2, state=tmp_path) as live, client(live) as http:
        first = ask(http, FOX, session_id="kept")
        http.post("/v1/sessions/kept/park")
        monkeypatch.setattr("tenure.engine._SMALL_SLAB", 0)
        monkeypatch.setattr("tenure.models.folder.free_memory", lambda device: 0)
        for reply in (
            http.post("/v1/sessions/kept/restore"),
            ask(http, going_on(FOX, first, "So?"), session_id="kept"),
            ask(http, [user("A new one.")]),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "out_of_memory")
            assert "budget" in reply.json()["error"]["message"]
        monkeypatch.undo()
        assert cached(ask(http, going_on(FOX, first, "So?"), session_id="kept")) > 0


def test_another_models_sessions_stay_stored(tmp_path):
    with serving(state=tmp_path) as live, client(live) as http:
        first = ask(http, FOX, session_id="kept")
    with serving(tiny_engine(seed=1), state=tmp_path) as live, client(live) as http:
        for reply in (
            ask(http, FOX, session_id="kept"),
            http.post("/v1/sessions/kept/restore"),
            http.post("/v1/sessions/kept/fork"),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_incompatible")
            assert "weights" in reply.json()["error"]["message"]
            assert str(tmp_path) not in reply.text
        again = ask(http, FOX)
        assert again.status_code == 200, "a client that names no session need not know"
        assert again.json()["tenure"]["how"] == "new"
    with serving(state=tmp_path) as live, client(live) as http:
        assert cached(ask(http, going_on(FOX, first, "So?"), session_id="kept")) > 0


def test_a_session_of_another_budget_is_computed_again_in_the_servers(tmp_path):
    with serving(state=tmp_path) as live, client(live) as http:
        first = ask(http, FOX, session_id="kept")
        ask(http, [RULES, user("One.")], session_id="rules")
    with serving(state=tmp_path, session=OTHER) as live, client(live) as http:
        branch = ask(http, [RULES, user("Two.")])
        assert branch.json()["tenure"]["how"] == "new"
        refused = http.post("/v1/sessions/kept/restore")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_incompatible")
        assert http.get("/v1/sessions/kept").json()["tokens"] > 0
        again = ask(http, going_on(FOX, first, "So?"))
        assert again.json()["tenure"]["session_id"] == "kept"
        assert again.json()["usage"]["tenure"]["budget"] == OTHER.budget
        assert cached(again) == 0
        slabs = [held.session.config for held in live.sessions() if held.session is not None]
        assert slabs == [OTHER, OTHER]
    with serving(state=tmp_path, session=OTHER) as live, client(live) as http:
        assert http.post("/v1/sessions/kept/restore").json()["tokens"] > 0


def test_a_folder_of_an_earlier_version_is_read(tmp_path):
    with serving(state=tmp_path) as live, client(live) as http:
        first = ask(http, FOX, session_id="kept")
    index = next((tmp_path / "sessions").glob("*.json"))
    for change in (lambda data: data["options"].pop("compress"), lambda data: data.pop("options")):
        data = json.loads(index.read_text())
        change(data)
        data.pop("raw", None)
        index.write_text(json.dumps(data))
        with serving(state=tmp_path) as live, client(live) as http:
            assert cached(ask(http, going_on(FOX, first, "So?"), session_id="kept")) > 0
