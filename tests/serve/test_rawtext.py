"""Raw texts: sessions that grow with them, log-probabilities of their tokens."""

from __future__ import annotations

from tests.serve.live import say

START = "The quick brown fox jumps over the lazy dog and again. " * 3


def complete(http, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, **fields}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_text_that_grows_stays_in_its_session(http, monkeypatch):
    say(monkeypatch, "Then it sleeps.")
    prompt, sessions, sent = START, set(), 0
    for turn in range(4):
        reply = complete(http, prompt)
        about, usage = reply["tenure"], reply["usage"]
        assert about["how"] == ("continued" if turn else "new")
        assert usage["prompt_tokens_details"]["cached_tokens"] >= sent
        sessions.add(about["session_id"])
        sent = usage["prompt_tokens"]
        prompt += reply["choices"][0]["text"] + " More of the fox."
    assert len(sessions) == 1
    other = complete(http, prompt[: len(START) + 8] + "Something else comes here.")
    assert other["tenure"]["how"] == "branched", "what does not go on leaves the session alone"


def test_a_raw_text_does_not_take_a_chat_over(live, http, monkeypatch):
    say(monkeypatch, "Yes.")
    body = {"model": "tiny", "messages": [{"role": "user", "content": START}], "max_tokens": 12}
    name = http.post("/v1/chat/completions", json=body).json()["tenure"]["session_id"]
    chat = next(held for held in live.sessions() if held.id == name)
    reply = complete(http, [*chat.tokens, *chat.tokens[-5:]])
    assert reply["tenure"]["how"] == "branched"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(chat.tokens)
