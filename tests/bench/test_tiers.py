"""``tenure bench tiers`` on a small span: every number is there and means what its name says."""

from __future__ import annotations

import pytest

from tenure.bench import tiers
from tests.commands.conftest import tiny_folder

__all__ = ["tiny_folder"]


@pytest.fixture(scope="module")
def result(tiny_folder):
    config = tiers.TiersConfig(tokens=96, layers=3, head_dim=16, repeats=3, decode_ms=20.0, model=tiny_folder)
    return tiers.run(config)


def test_restore_and_stall(result):
    assert result["span_bytes"] == 2 * 3 * 2 * 96 * 16 * 2
    assert set(result["restore"]) == {"host", "disk", "valkey"}
    for row in result["restore"].values():
        assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"])
        assert row["mb_per_s"] == pytest.approx(result["span_bytes"] / 1e3 / row["ms"])
        assert 0 < row["best_ms"] <= row["ms"]
    for row in result["stall"].values():
        assert row["spans"] == 4
        assert 0 < row["with_prefetch_ms"] <= row["with_prefetch_most_ms"]
        assert row["without_ms"] > 0


def test_codecs_on_random_numbers_and_on_a_model(result):
    for codecs in (result["codecs"], result["model"]):
        for exact in ("raw", "zstd"):
            assert codecs[exact]["key_error"] == codecs[exact]["value_error"] == 0
        for lossy in ("int8", "int8+zstd"):
            assert 0 < codecs[lossy]["key_error"] < 0.03
            assert 0 < codecs[lossy]["value_error"] < 0.03
        assert codecs["raw"]["share"] > codecs["int8"]["share"]
    for exact in ("raw", "zstd"):
        assert result["model"][exact]["kl"] == pytest.approx(0, abs=1e-6)
        assert result["model"][exact]["same_top"] == 1
    assert result["model"]["int8"]["kl"] < 0.1
