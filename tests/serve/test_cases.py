"""Cases that servers get wrong: ends of streams, characters, templates, sizes. The numbers are those of cases.md."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from tests.chats import assistant, encode, joint, system, tokenizer, tool, user
from tests.oracles import Script, check_ledger
from tests.serve.live import SMALL, say, serving, tiny_engine

FOX = user("The quick brown fox jumps over the lazy dog.")


@pytest.fixture(scope="module")
def live():
    with serving(resident=6) as live:
        yield live


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=60) as http:
        yield http


def post(http, messages, **fields):
    return http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 60, **fields}
    )


def streamed(http, messages, **fields):
    body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 60, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        return reply.read()


def events_of(raw):
    blocks = [block for block in raw.decode().split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    for block in blocks:
        assert len(block.splitlines()) == 1, "one line for every splitter"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def content(events):
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event.get("choices", [])
    )


def ids_of(live, reply):
    name = reply.json()["tenure"]["session_id"]
    return next(held for held in live.sessions() if held.id == name).session.memory.ids.tolist()


# -- C27: characters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "안녕하세요 세계",
        "a 👨‍👩‍👧 b",
        "e\u0301 e\u0301",
        " leading and  double",
        "x != y .",
        "one\u2028two\u0085three",
        "\x00\x01 end",
    ],
)
def test_pieces_join_to_the_text(http, monkeypatch, text):
    say(monkeypatch, text)
    whole = post(http, [FOX], max_tokens=200).json()["choices"][0]["message"]["content"]
    assert whole == text
    assert content(events_of(streamed(http, [FOX], max_tokens=200))) == text


def test_a_cut_emoji_is_the_same_in_both_modes(http, monkeypatch):
    say(monkeypatch, "ok 👨‍👩‍👧 done")
    for most in range(1, 12):
        whole = post(http, [FOX], max_tokens=most).json()["choices"][0]
        events = events_of(streamed(http, [FOX], max_tokens=most))
        assert content(events) == whole["message"]["content"]
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole["message"]["content"]


# -- C33: counts and ends -------------------------------------------------------------------------------


def test_counts_add_up_in_all_four_ways(http):
    for messages in ([FOX], [FOX, assistant("Yes."), user("And?")]):
        counts = []
        for stream in (False, True):
            for wanted in (False, True):
                if stream:
                    options = {"stream_options": {"include_usage": True}} if wanted else {}
                    events = events_of(streamed(http, messages, seed=1, **options))
                    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
                    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
                    assert len([reason for reason in reasons if reason]) == 1
                    usages = [event for event in events if "usage" in event]
                    assert len(usages) == int(wanted)
                    if wanted:
                        assert usages == [events[-1]]
                        assert events[-1]["choices"] == []
                        counts.append(events[-1]["usage"])
                else:
                    counts.append(post(http, messages, seed=1).json()["usage"])
        for usage in counts:
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
            assert usage["prompt_tokens"] == len(joint("tools", messages, True))
        assert len({usage["completion_tokens"] for usage in counts}) == 1


def test_an_error_inside_a_stream_is_told_and_ends_it(http, monkeypatch):
    words = encode("tools", "one two three four five six seven eight")

    class Failing(Script):
        def __call__(self, logits):
            if len(self.logits) == 4:
                raise ValueError("a secret of the inside")
            return super().__call__(logits)

    monkeypatch.setattr("tenure.turn.Sampler", lambda options, stop_ids: Failing(words))
    begun = time.monotonic()
    events = events_of(streamed(http, [FOX], session_id="failing"))
    assert time.monotonic() - begun < 2 + 3
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(events)
    monkeypatch.undo()
    reply = post(http, [FOX], session_id="failing")
    assert reply.status_code == 200, "the session goes on"


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"temperature": "hot"}, {"max_tokens": 0}, {"stop": [""]}, {"top_logprobs": 2}]
)
def test_a_wrong_value_is_refused_before_a_stream_begins(http, wrong):
    reply = post(http, [FOX], stream=True, **wrong)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"


# -- C03: turn ends -------------------------------------------------------------------------------------


def test_the_history_is_whole_however_a_turn_ended(live, http, monkeypatch):
    for how in ("stop", "length", "stop string"):
        say(monkeypatch, "one two three")
        options = {"length": {"max_tokens": 2}, "stop string": {"stop": "three"}}.get(how, {})
        first = post(http, [FOX, user(how)], **options)
        text = first.json()["choices"][0]["message"]["content"]
        messages = [FOX, user(how), assistant(text), user("Next.")]
        second = post(http, messages, max_tokens=2)
        want = joint("tools", messages, True)
        assert ids_of(live, second)[: len(want)] == want
        assert (
            second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            >= first.json()["usage"]["prompt_tokens"]
        )


# -- C12: limits count tokens ---------------------------------------------------------------------------


def test_six_hundred_tokens_over_many_evictions(http):
    reply = post(http, [user("pin this", pin=True), FOX], max_tokens=600, ignore_eos=True)
    assert reply.json()["usage"]["completion_tokens"] == 600
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert reply.json()["usage"]["tenure"]["evicted"] > 0


# -- C31: nothing is cut away in silence ----------------------------------------------------------------


def test_too_long_is_told_with_numbers_and_the_session_recovers(live, http):
    with (
        serving(max_prompt=512, session=SMALL) as small,
        httpx.Client(base_url=small.url, timeout=60) as http,
    ):
        start = [system("Always say yes. " * 8), user("Read it.")]
        first = post(http, start, session_id="s", max_tokens=4)
        more = [*start, assistant(first.json()["choices"][0]["message"]["content"]), tool("x" * 3000)]
        before = http.get("/v1/sessions/s").json()
        reply = post(http, more, session_id="s", max_tokens=4)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "512" in reply.json()["error"]["message"]
        after = http.get("/v1/sessions/s").json()
        assert (after["tokens"], after["turns"]) == (before["tokens"], before["turns"])
        more[-1] = tool("short")
        good = post(http, more, session_id="s", max_tokens=4)
        assert good.status_code == 200
        assert good.json()["usage"]["prompt_tokens"] == len(joint("tools", more, True))


def test_a_prompt_beyond_the_budget_is_read_whole_and_what_went_is_told(live, http):
    messages = [user("fox " * 600)]
    reply = post(http, messages, max_tokens=2).json()
    assert reply["usage"]["prompt_tokens"] == len(joint("tools", messages, True)) > 256
    assert reply["usage"]["tenure"]["evicted"] > 0
    assert reply["usage"]["tenure"]["resident"] <= 256 + 16


# -- C36: huge runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [96 << 10, pytest.param(512 << 10, marks=pytest.mark.slow)])
def test_huge_texts_stop_neither_health_nor_streams(size):
    with serving(resident=4, max_prompt=20_000) as live:
        gaps, slow, done = [], [], threading.Event()

        def health():
            with httpx.Client(base_url=live.url, timeout=10) as http:
                while not done.is_set():
                    begun = time.monotonic()
                    assert http.get("/healthz").status_code == 200
                    slow.append(time.monotonic() - begun)
                    time.sleep(0.05)

        def stream():
            body = {
                "model": "tiny",
                "messages": [FOX],
                "stream": True,
                "max_tokens": 4000,
                "ignore_eos": True,
            }
            with (
                httpx.Client(base_url=live.url, timeout=30) as http,
                http.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                last = time.monotonic()
                for _ in reply.iter_lines():
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                    if done.is_set():
                        return

        threads = [threading.Thread(target=work) for work in (health, stream)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=live.url, timeout=60) as http:
            for text in ("a" * size, "-" * size, '{"a": [' + "1," * size + "1]}"):
                reply = post(http, [user(text)])
                assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        done.set()
        for thread in threads:
            thread.join()
        assert max(slow) < 1
        assert max(gaps) < 2


# -- C37: roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "roles",
    [
        ["system", "user", "assistant", "system", "user"],
        ["system", "system", "user"],
        ["user", "user"],
        ["assistant", "user"],
        ["developer", "user"],
        ["system"],
        ["tool", "user"],
    ],
)
@pytest.mark.parametrize("template", ["chatml", "strict", "moving", "headers"])
def test_roles_are_rendered_in_order_or_refused_by_number(served, roles, template):
    http = served(template)
    messages = [{"role": role, "content": f"text {place} of it"} for place, role in enumerate(roles)]
    reply = post(http[1], messages, max_tokens=1)
    if reply.status_code != 200:
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("messages[")
        return
    text = tokenizer(template).decode(ids_of(http[0], reply))
    places = [text.index(message["content"]) for message in messages]
    assert places == sorted(places)
    assert all(text.count(message["content"]) == 1 for message in messages)
    again = post(http[1], messages, max_tokens=1, cache_salt="apart")
    assert again.json()["usage"]["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def served():
    from contextlib import ExitStack

    with ExitStack() as stack:
        made = {}

        def get(template):
            if template not in made:
                live = stack.enter_context(serving(tiny_engine(template)))
                made[template] = live, stack.enter_context(httpx.Client(base_url=live.url, timeout=30))
            return made[template]

        yield get


# -- C22: reasoning that the client drops -------------------------------------------------------------


def test_reuse_ends_where_a_template_writes_older_turns_in_another_way(served, monkeypatch):
    live, http = served("reasoning")
    messages = [user("Think about foxes.")]
    ids = []
    for turn in range(4):
        say(monkeypatch, f"<think>\nI think {turn}.\n</think>\n\nAnswer {turn}.", template="reasoning")
        reply = post(http, messages, session_id="r").json()
        want = joint("reasoning", messages, True)
        same = next(
            (place for place, (a, b) in enumerate(zip(ids, want, strict=False)) if a != b),
            min(len(ids), len(want)),
        )
        assert reply["usage"]["prompt_tokens"] == len(want)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] in (same, same - 1)
        held = next(held for held in live.sessions() if held.id == "r")
        assert held.session.memory.ids.tolist()[: len(want)] == want
        check_ledger(held.session)
        ids = held.session.memory.ids.tolist()
        said = reply["choices"][0]["message"]["content"]
        messages += [assistant(said.split("</think>")[-1].strip()), user(f"And {turn}?")]
