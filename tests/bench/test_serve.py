"""The server bench on a tiny model: it runs, and its numbers hang together."""

from __future__ import annotations

import pytest

from tenure.bench import serve
from tenure.errors import ConfigError
from tests.serve.live import tiny_engine


class Tiny:
    """Stands where the bench loads a model."""

    @staticmethod
    def load(name, **options):
        return tiny_engine()


def test_all_three_measurements(monkeypatch):
    monkeypatch.setattr(serve, "Engine", Tiny)
    bench = serve.ServeBench(
        model="tiny",
        sessions=3,
        budget=192,
        chunk=96,
        decode=150,
        prefill=900,
        tokens=1_500,
        result=60,
        repeats=2,
    )
    got = serve.run(bench, lambda text: None)
    assert got["concurrency_ratio"] == pytest.approx(
        got["decode_tokens_per_s"]["3"] / got["decode_tokens_per_s"]["1"], rel=0.02
    )
    assert got["busy_gaps"] > 5
    assert got["inter_token_ratio"] > 0
    assert got["session_tokens"] >= 1_500
    assert got["turn_ratio"] == got["turn_ratios"][0]
    assert len(got["turn_ratios"]) == 2
    assert got["cached_from_the_turn_before"] == 1
    assert got["computed_tokens"]["last"] < 150
    assert got["resident_slots"] <= 192 + 128


def test_too_short_a_stream_is_told(monkeypatch):
    monkeypatch.setattr(serve, "Engine", Tiny)
    with pytest.raises(ConfigError, match="decode"):
        serve.run(serve.ServeBench(sessions=8, budget=64, chunk=32, decode=1), lambda text: None, ("decode",))
