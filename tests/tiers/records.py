"""Records of random numbers, and a comparison by value."""

from __future__ import annotations

import torch

from tenure.tiers.record import SpanRecord
from tests.conftest import random_ids


def record(
    span="a", *, tokens=9, layers=3, heads=2, dim=8, groups=None, dtype=torch.float32, seed=0, start=7
):
    """A span's record; one seed gives one set of numbers."""
    draw = torch.Generator().manual_seed(seed)
    shape = (layers, heads, tokens, dim)
    keys = torch.randn(shape, generator=draw).to(dtype)
    values = torch.randn(shape, generator=draw).to(dtype)
    score = torch.rand(groups or layers, tokens, generator=draw)
    return SpanRecord(span, start, random_ids(tokens, seed), keys, values, score)


def same(one, other):
    """Whether two records hold the same, to the bit."""
    return (
        (one.span, one.start, list(one.ids)) == (other.span, other.start, list(other.ids))
        and one.keys.dtype == other.keys.dtype
        and torch.equal(one.keys, other.keys)
        and torch.equal(one.values, other.values)
        and torch.equal(one.score, other.score)
    )
