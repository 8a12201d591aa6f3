"""Hints: read from messages and from beside them, answered one by one, without effect on the prompt (C35, C39)."""

from __future__ import annotations

import httpx
import pytest

from tenure.config import EngineConfig, SessionConfig
from tests.chats import assistant, system, tokenizer, user
from tests.serve.live import serving, tiny_engine


def ask(http, messages, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
    return http.post("/v1/chat/completions", json=body)


def held_of(live, reply):
    name = reply.json()["tenure"]["session_id"]
    return next(held for held in live.sessions() if held.id == name)


PLAIN = [system("Rules."), user("Read this."), assistant("I did."), user("Read this.")]
MARKS = [
    {"pin": True},
    {"region": "retrieved", "span": "doc"},
    {"pin": "soft", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"step": "s1", "reads": ["doc", "later"]},
]


def test_marks_change_no_id_and_their_ranges_hold_the_message(live, http):
    bare = held_of(live, ask(http, PLAIN)).session.memory.ids.tolist()
    marked = [{**message, **marks} for message, marks in zip(PLAIN, MARKS, strict=True)]
    reply = ask(http, marked, cache_salt="marked")
    held = held_of(live, reply)
    prompt = reply.json()["usage"]["prompt_tokens"]
    ids = held.session.memory.ids.tolist()
    assert ids[:prompt] == bare[:prompt]
    hints = {
        (one["message"], one["hint"]): one
        for one in reply.json()["tenure"]["hints"]
        if one["message"] is not None
    }
    assert set(hints) == {(place, name) for place, marks in enumerate(MARKS) for name in marks}
    for (place, name), one in hints.items():
        assert one["outcome"] == ("deferred" if name in ("step", "reads") else "accepted"), one
        start, stop = one["tokens"]
        assert tokenizer("tools").decode(ids[start:stop]) == PLAIN[place]["content"]
    spans = {span.id: span for span in held.session.memory.ledger.spans}
    assert spans["doc"].region == "retrieved"
    assert spans["system-1"].pin == "hard"
    assert held.session.plan["s1"].reads == ("doc", "later")
    assert held.keep_until > 0


def test_the_second_way_gives_the_same_ranges(http):
    marked = [{**message, **marks} for message, marks in zip(PLAIN, MARKS, strict=True)]
    first = ask(http, marked, cache_salt="one").json()["tenure"]["hints"]
    beside = [{"message": place, **marks} for place, marks in enumerate(MARKS)]
    second = ask(http, PLAIN, hints=beside, cache_salt="two").json()["tenure"]["hints"]
    assert first == second
    relayed = ask(http, PLAIN, cache_salt="three").json()["tenure"]["hints"]
    assert [one for one in relayed if one["message"] is not None] == [], (
        "through a relay that drops marks, none came"
    )


@pytest.mark.parametrize(
    ("message", "outcomes"),
    [
        (user("", pin=True), {"pin": "clipped"}),
        (user("  \n", pin=True, region="user"), {"pin": "clipped", "region": "clipped"}),
        (user([{"type": "text", "text": ""}], pin="soft"), {"pin": "clipped"}),
        (
            user([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], pin="soft"),
            {"pin": "accepted"},
        ),
        (
            user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
            {"cache_control": "accepted"},
        ),
        (user("x", pin="very"), {"pin": "rejected"}),
        (user("x", pin=7), {"pin": "rejected"}),
        (user("x", pin=[True]), {"pin": "rejected"}),
        (user("x", pin=False), {"pin": "accepted"}),
        (user("x", region="attic"), {"region": "rejected"}),
        (user("x", region={"a": 1}), {"region": "rejected"}),
        (user("x", span=3), {"span": "rejected"}),
        (user("x", span=""), {"span": "rejected"}),
        (user("x", reads=["a"]), {"reads": "rejected"}),
        (user("x", step="s", reads="a"), {"step": "deferred", "reads": "rejected"}),
        (user("x", cache_control="yes"), {"cache_control": "rejected"}),
        (user("x", cache_control={"type": "ephemeral", "ttl": "soon"}), {"cache_control": "rejected"}),
        (user("x", cache_control={"type": "ephemeral", "ttl": "90h"}), {"cache_control": "clipped"}),
        (user("x", frobnicate=1), {}),
    ],
)
def test_odd_marks_are_told_and_harm_nothing(http, message, outcomes):
    bare = {name: message[name] for name in ("role", "content")}
    plain = ask(http, [bare], cache_salt="odd")
    reply = ask(http, [message], cache_salt="odd")
    assert plain.status_code == reply.status_code == 200, reply.text
    told = {one["hint"]: one["outcome"] for one in reply.json()["tenure"]["hints"] if one["message"] == 0}
    assert told == outcomes
    assert reply.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "outcomes"),
    [
        ({"priority": 5}, {"priority": "accepted"}),
        ({"priority": 1e9}, {"priority": "clipped"}),
        ({"priority": "high"}, {"priority": "rejected"}),
        ({"cache_salt": 5}, {"cache_salt": "rejected"}),
        ({"prompt_cache_key": "k"}, {"prompt_cache_key": "accepted"}),
        ({"cache_control": {"ttl": 60}}, {"cache_control": "accepted"}),
        (
            {"nvext": {"agent_hints": {"priority": 2, "osl": 100, "latency_sensitivity": 0.5}}},
            {
                "nvext.agent_hints.priority": "accepted",
                "nvext.agent_hints.osl": "rejected",
                "nvext.agent_hints.latency_sensitivity": "accepted",
            },
        ),
        ({"nvext": []}, {"nvext": "rejected"}),
        ({"hints": "pin all"}, {"hints": "rejected"}),
        (
            {"hints": [{"message": 9, "pin": True}, {"message": 0, "colour": "red"}]},
            {"hints": "rejected", "colour": "rejected"},
        ),
        ({"hints": [{"message": True, "pin": True}]}, {"hints": "rejected"}),
    ],
)
def test_hints_of_a_request(http, fields, outcomes):
    reply = ask(http, [user("x")], **fields)
    assert reply.status_code == 200, reply.text
    assert {one["hint"]: one["outcome"] for one in reply.json()["tenure"]["hints"]} == outcomes


def test_a_rejected_hint_says_which_one_and_why(http):
    hints = [{"message": 0, "pin": True}, {"message": 99, "pin": True}, {"pin": True}]
    told = ask(http, [user("x")], hints=hints).json()["tenure"]["hints"]
    reasons = [one["reason"] for one in told if one["hint"] == "hints"]
    assert reasons[0] == "entry 1: this request has no message 99, it has 1"
    assert reasons[1].startswith("entry 2: expected {'message': number")


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "a\0b"},
        {"session_id": ""},
        {"session_id": "../x"},
        {"session_id": ".."},
        {"session_id": 5},
        {"session_id": "x" * 300},
        {"session_id": "team "},
        {"session_id": " team"},
        {"messages": [user("x", span="a\0b")]},
        {"messages": [user("x", step="s", reads=["a\0"])]},
    ],
)
def test_names_that_cannot_be_are_refused(http, fields):
    reply = ask(http, fields.pop("messages", [user("x")]), **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_name"


def test_pins_beyond_the_budget_become_soft_ones(live, http):
    messages = [user("brown fox " * 12, pin=True) for _ in range(6)]
    reply = ask(http, messages, session_id="pins")
    told = [one["outcome"] for one in reply.json()["tenure"]["hints"] if one["hint"] == "pin"]
    assert "accepted" in told
    assert "clipped" in told
    again = ask(http, [*messages, assistant("ok"), user("go on")], session_id="pins", max_tokens=40)
    assert again.status_code == 200
    assert (
        again.json()["usage"]["completion_tokens"] == 40
        or again.json()["choices"][0]["finish_reason"] == "stop"
    )


def test_a_nul_in_a_tool_result_is_content(live, http):
    text = "\0" + "data " * 40 + "\0 more \0codeword-4711"
    messages = [user("Read."), {"role": "tool", "content": text, "tool_call_id": "c"}]
    reply = ask(http, messages, session_id="nul")
    assert reply.status_code == 200
    held = held_of(live, reply)
    assert text in tokenizer("tools").decode(held.session.memory.ids.tolist())
    assert http.post("/v1/sessions/nul/park").json()["state"] == "parked"
    more = [*messages, assistant(reply.json()["choices"][0]["message"]["content"]), user("And the word?")]
    after = ask(http, more, session_id="nul")
    assert (
        after.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= reply.json()["usage"]["prompt_tokens"] - 1
    )


def test_reads_that_do_not_fit_are_rejected_and_the_request_goes_on():
    with (
        serving(tiny_engine(), session=SessionConfig(budget=160, chunk=32, slack=8)) as live,
        httpx.Client(base_url=live.url, timeout=30) as http,
    ):
        messages = [
            user("fox " * 70, span="a"),
            assistant("ok"),
            user("dog " * 70, span="b"),
            assistant("ok"),
        ]
        reply = ask(http, [*messages, user("Which?", step="s", reads=["a", "b"], span="a-and-b")])
        assert reply.status_code == 200, reply.text
        found = {one["hint"]: one for one in reply.json()["tenure"]["hints"] if one["message"] == 4}
        assert found["step"]["outcome"] == found["reads"]["outcome"] == "rejected"
        assert "step 's' reads" in found["reads"]["reason"]
        assert found["span"]["outcome"] == "accepted"
        assert "s" not in held_of(live, reply).session.plan


def test_a_step_brings_back_what_it_reads():
    engine = tiny_engine(config=EngineConfig(tiers=("host:64MiB",)))
    with (
        serving(engine, session=SessionConfig(budget=160, chunk=32, slack=8)) as live,
        httpx.Client(base_url=live.url, timeout=30) as http,
    ):
        messages = [user("Read.")]
        for number in range(6):
            reply = ask(http, messages)
            text = "fox " * 60 if number != 2 else "MAX_PARALLEL_SHARDS is 42. " * 3
            named = {"span": "doc"} if number == 2 else {}
            messages += [assistant(reply.json()["choices"][0]["message"]["content"]), user(text, **named)]
        ask(http, messages)
        said = http.get("/v1/sessions").json()["data"][0]["id"]
        before = http.get(f"/v1/sessions/{said}/explain", params={"span": "doc"}).json()["resident"]
        assert before < 1
        messages[-1] |= {"step": "s2", "reads": ["doc"]}
        reply = ask(http, [*messages, assistant("ok"), user("What is it?", step="s3", reads=["doc"])])
        assert reply.json()["usage"]["tenure"]["restored"] == 1
        after = http.get(
            f"/v1/sessions/{reply.json()['tenure']['session_id']}/explain", params={"span": "doc"}
        )
        assert after.json()["resident"] == 1
