"""Chat over HTTP: the wire (O4), counts, reuse. What a turn says is scripted (O5) where it matters."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.chats import joint, user
from tests.serve.live import serving


@pytest.fixture(scope="module")
def live():
    with serving() as live:
        yield live


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=30) as http:
        yield http


def ask(http, messages, **fields):
    reply = http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(http, messages, **fields):
    body = {"model": "tiny", "messages": messages, "stream": True, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        text = reply.read().decode()
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_conversation_that_is_sent_again_continues_its_session(live, http):
    messages = [user("Tell me about brown foxes, please.")]
    first = ask(http, messages, max_tokens=8)
    assert first["usage"]["prompt_tokens"] == len(joint("tools", messages, True))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, user("And?")]
    second = ask(http, messages, max_tokens=8)
    assert second["usage"]["tenure"]["session_id"] == first["usage"]["tenure"]["session_id"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    held = next(one for one in live.sessions() if one.id == first["usage"]["tenure"]["session_id"])
    ids = held.session.memory.ids.tolist()
    assert ids[: second["usage"]["prompt_tokens"]] == joint("tools", messages, True)


def test_a_stream_says_what_the_whole_reply_says(http):
    messages = [user("What jumps over the lazy dog?")]
    whole = ask(http, messages, max_tokens=10, temperature=1.0, seed=5)
    chunks = stream(
        http, messages, max_tokens=10, temperature=1.0, seed=5, stream_options={"include_usage": True}
    )
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    counts = chunks[-1]["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert counts["completion_tokens"] == whole["usage"]["completion_tokens"]
