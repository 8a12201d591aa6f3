"""Who goes first, where a request goes on, and what a forward holds."""

from __future__ import annotations

import threading
import time
from array import array

import httpx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tenure.serve.events import Stepped, TurnStarted
from tenure.serve.reuse import shared
from tests.chats import assistant, user
from tests.serve.live import SMALL, serving


def post(live, messages, **fields):
    with httpx.Client(base_url=live.url, timeout=60) as http:
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, **fields}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_the_common_start(a, b):
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    assert shared(array("I", a), np.asarray(b, dtype=np.uint32)) == same


def test_a_higher_priority_goes_first_and_a_session_at_work_makes_others_wait():
    order = []
    with serving(resident=1, streams=1) as live:
        live.state.bus.listen(
            lambda event: order.append(event.session) if isinstance(event, TurnStarted) else None
        )
        threads = []

        def begin(name, **fields):
            messages = [user(f"I am {name}.")]
            thread = threading.Thread(
                target=post, args=(live, messages), kwargs={"session_id": name, **fields}
            )
            thread.start()
            threads.append(thread)
            until = time.monotonic() + 10
            while len(order) + live.state.worker.waiting < len(threads):
                assert time.monotonic() < until
                time.sleep(0.002)

        begin("first", max_tokens=1500, ignore_eos=True)
        begin("low", priority=-5)
        begin("middle")
        begin("high", priority=5)
        for thread in threads:
            thread.join()
    assert order == ["first", "high", "middle", "low"]


def test_prompts_ride_along_with_streams():
    steps = []
    with serving(resident=3) as live:
        live.state.bus.listen(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
        stream = threading.Thread(
            target=post, args=(live, [user("Go.")]), kwargs={"max_tokens": 800, "ignore_eos": True}
        )
        stream.start()
        while not any(step.decode for step in steps):
            time.sleep(0.002)
        post(live, [user("fox " * 800)])
        stream.join()
    mixed = [step for step in steps if step.prefill and step.decode]
    assert len(mixed) > 2, "in pieces"
    assert sum(step.prefill for step in mixed) > 400
    assert max(step.prefill for step in steps) <= SMALL.chunk


def test_another_conversation_gets_no_start_with_holes():
    rules = "Always answer in one short line and never speak of cats. " * 3
    start = [{"role": "system", "content": rules}, user("One.")]
    with serving(resident=4) as live:
        first = post(live, start)
        long = [*start, assistant(first["choices"][0]["message"]["content"]), user("fox " * 500)]
        post(live, long)
        held = live.sessions()[0]
        ledger = held.session.memory.ledger
        gap = next(
            (place for place, at in enumerate(ledger.logical[0, : ledger.rows].tolist()) if place != at),
            10**9,
        )
        other = post(live, [start[0], user("Two, something else.")])
        cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached <= gap
        fresh = post(live, [start[0], user("Two, something else.")], cache_salt="apart")
        assert other["choices"][0]["message"]["content"] == fresh["choices"][0]["message"]["content"]


def test_a_salt_keeps_conversations_apart():
    messages = [user("The same start of two conversations that must not be shared. " * 2)]
    with serving(resident=4) as live:
        post(live, messages, cache_salt="a")
        assert post(live, messages, cache_salt="b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert post(live, messages, cache_salt="a")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
