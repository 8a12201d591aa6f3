"""Streams of the Responses interface."""

from __future__ import annotations

import json
import threading

import httpx

from tests.serve.live import say, serving


def test_a_piece_comes_as_soon_as_its_token_is_there(monkeypatch):
    say(monkeypatch, "one two three four")
    with serving(resident=2) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        engine, seen, early = live.state.engine, threading.Event(), []
        step = engine.step

        def waiting(sessions, **options):
            if not early and any(run.turn.text for run in live.state.worker._runs):
                early.append(seen.wait(5))
            return step(sessions, **options)

        engine.step = waiting
        body = {"model": "tiny", "input": "x", "max_output_tokens": 30, "stream": True}
        with http.stream("POST", "/v1/responses", json=body) as reply:
            for line in reply.iter_lines():
                if line == "event: response.output_text.delta":
                    seen.set()
                if line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
                    if last["type"] == "response.completed":
                        given = httpx.get(f"{live.url}/v1/responses/{last['response']['id']}")
                        assert given.json() == last["response"], "it can be named as soon as it has come"
        assert last["type"] == "response.completed"
        assert early == [True]
