"""Tokens that wait and tokens that were computed: one stream, whatever has come of them."""

from __future__ import annotations

import pytest
import torch

from tenure.ledger import Ledger
from tenure.regions import Region
from tenure.spans import Span
from tenure.stream import TokenStream


@pytest.fixture
def stream() -> TokenStream:
    return TokenStream(Ledger(1, 64, torch.device("cpu")), chunk=8)


def span(name, region=Region.USER, role="user"):
    return Span(name, 0, 0, region, role)


def enter(stream, count):
    turns = stream._enter(count)
    stream.ledger.commit(count)
    return turns


def cut(stream, count):
    stream.drop_backlog()
    stream.ledger.spans.truncate(count)
    stream.ledger.length = count
    del stream.ids[count:]


def test_an_empty_stream_and_empty_parts(stream) -> None:
    stream.queue([], span("a"))
    assert (stream.waiting, stream.last_span, stream.last_region, stream.last_id) == (0, None, None, None)
    assert not stream.backlog
    assert stream.take() == []


def test_a_step_takes_what_is_left_of_a_chunk(stream) -> None:
    a, b = span("a"), span("b")
    stream.queue([1, 2, 3, 4, 5], a)
    stream.queue([6, 7, 8, 9, 10], b)
    assert stream.take() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stream.take(7) == [1, 2, 3, 4, 5, 6, 7]
    stream._chunk_left = 3
    assert stream.take(7) == [1, 2, 3]
    assert enter(stream, 7) == 2
    assert (a.start, a.stop, b.start, b.stop) == (0, 5, 5, 7)
    assert stream.backlog == [(b, [8, 9, 10], Region.USER)]
    assert stream.waiting == 3
    assert enter(stream, 3) == 0
    stream.queue([11], span("c", role="assistant"))
    assert enter(stream, 1) == 0, "an answer begins no turn"
    stream._chunk_left = 3
    stream.drop_backlog()
    stream.queue([1] * 9, span("d"))
    assert len(stream.take()) == 8, "a chunk begins with what comes next"


def test_the_newest_tokens_wait_or_not(stream) -> None:
    stream.queue([1, 2, 3, 4], span("a"))
    enter(stream, 4)
    stream.queue([5, 6, 7], span("b"))
    assert stream.newest(0, 5) == [3, 4, 5, 6, 7]
    assert stream.newest(3, 5) == [4, 5, 6, 7]
    assert stream.newest(5, 5) == [6, 7]
    assert stream.newest(5, 1) == [7]
    enter(stream, 1)
    assert stream.newest(3, 9) == [4, 5, 6, 7]
    assert stream.newest(6, 9) == [7]


def test_the_region_of_the_last_token_is_that_of_the_last_part(stream) -> None:
    a = span("a", Region.ASSISTANT, "assistant")
    stream.queue([1, 2], a)
    stream.queue([3], a, Region.SCRATCHPAD)
    stream.queue([4, 5], a, Region.TOOL_OUTPUT)
    assert stream.last_region == Region.TOOL_OUTPUT
    enter(stream, 3)
    enter(stream, 2)
    assert a.parts == [(2, Region.SCRATCHPAD), (3, Region.TOOL_OUTPUT)]
    assert stream.last_region == Region.TOOL_OUTPUT
    stream.queue([6], a)
    enter(stream, 1)
    assert a.parts[2:] == [(5, Region.ASSISTANT)]


def test_a_span_that_was_taken_back_as_a_whole_begins_anew(stream) -> None:
    stream.queue([1, 2], span("a"))
    b = span("b", Region.ASSISTANT, "assistant")
    stream.queue([3, 4], b, Region.SCRATCHPAD)
    enter(stream, 4)
    b.evicted["budget"] = 2
    cut(stream, 2)
    stream.queue([5], b)
    enter(stream, 1)
    assert (b.start, b.stop, b.parts, dict(b.evicted)) == (2, 3, [], {})
    assert stream.ledger.spans.get("b") is b


def test_what_waits_in_a_fork_is_its_own(stream) -> None:
    a, b = span("a"), span("b")
    stream.queue([1, 2, 3], a)
    enter(stream, 1)
    stream.queue([4, 5], b)
    twin = TokenStream(stream.ledger.clone(), 8)
    twin.ids.extend(stream.ids)
    twin._backlog = stream._fork_backlog(twin.ledger.spans)
    assert [(one.id, [*ids]) for one, ids, _ in twin.backlog] == [("a", [2, 3]), ("b", [4, 5])]
    enter(twin, 4)
    assert (stream.waiting, a.stop, b.stop) == (4, 1, 0)
    assert [(one.start, one.stop) for one in twin.ledger.spans] == [(0, 3), (3, 5)]
    enter(stream, 4)
    assert [(one.start, one.stop) for one in stream.ledger.spans] == [(0, 3), (3, 5)]
