"""Prompt tokens beside streams: shared out, and so many that a forward stays below its limit."""

from __future__ import annotations

import random

import pytest

from tenure.serve.pace import Pacer


def test_without_streams_a_forward_is_full():
    pacer = Pacer(512, 2.5)
    assert pacer.shares([8000], streams=0) == [512]
    assert pacer.shares([8000, 8000], streams=0) == [256, 256]
    assert pacer.shares([10, 8000, 0], streams=0) == [10, 502, 0]
    assert pacer.shares([], streams=0) == []
    assert sum(pacer.shares([1] * 2000, streams=0)) == 512


@pytest.mark.parametrize(("quiet", "token"), [(0.010, 0.0003), (0.050, 0.002), (0.004, 0.00005)])
def test_forwards_settle_below_the_limit_and_use_it(quiet, token):
    generator = random.Random(0)
    pacer = Pacer(2048, 2.5)
    for _ in range(30):
        pacer.observe(quiet * generator.uniform(0.9, 1.1), prefill=0, streams=1)
    seconds, computed = [], 0
    for _ in range(400):
        (share,) = pacer.shares([10**9], streams=1)
        computed += share
        seconds.append((quiet + share * token) * generator.uniform(0.9, 1.1))
        pacer.observe(seconds[-1], prefill=share, streams=1)
    late = sorted(seconds[50:])
    assert late[int(0.95 * len(late))] < 3 * quiet
    most = (2.5 * quiet - quiet) / token
    assert computed > 0.5 * min(most, 2048) * 400, "no slower than it has to be"


def test_a_machine_that_gets_slower_is_followed():
    pacer = Pacer(2048, 2.5)
    for _ in range(20):
        pacer.observe(0.01, prefill=0, streams=2)
    for _ in range(100):
        pacer.observe(0.01 + 0.0001 * pacer.cap, prefill=pacer.cap, streams=2)
    before = pacer.cap
    for _ in range(20):
        pacer.observe(0.01 + 0.001 * pacer.cap, prefill=pacer.cap, streams=2)
    assert pacer.cap < before / 3
    assert pacer.shares([5, 5], streams=2) == [5, 5]
