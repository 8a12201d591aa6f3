"""Freed memory goes back to the system."""

from __future__ import annotations

import psutil
import pytest

from tenure.heap import Heap, _trim


def test_it_is_time_every_so_many_tokens():
    heap = Heap(every=100)
    assert [heap.computed(tokens) for tokens in (60, 39, 1, 99, 250, 1)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.skipif(_trim() is None, reason="no GNU C library")
def test_freed_blocks_between_living_ones_go_back():
    process = psutil.Process()
    blocks = [
        bytearray(100_000) for _ in range(600)
    ]  # below the size from which each has a mapping of its own
    kept = blocks[::6]
    before = process.memory_info().rss
    del blocks
    assert process.memory_info().rss > before - 20e6, "holes are kept"
    assert Heap(every=1).computed(1)
    assert process.memory_info().rss < before - 40e6
    assert len(kept) == 100
