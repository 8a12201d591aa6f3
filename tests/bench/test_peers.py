"""``tenure bench peers`` with real workers: Tenure and transformers on a tiny model, and one that breaks."""

from __future__ import annotations

import json

import pytest

from tenure.bench.peers import drive

BROKEN = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
sys.exit("no more cache")
"""


@pytest.fixture
def peers(tenure, tiny_folder):
    def run(*options, names: str = "tenure,transformers") -> dict:
        shape = ("--turns", 3, "--tokens", 1500, "--write", 4, "--budget", 2048, "--threads", 1)
        said = tenure("bench", "peers", "--model", tiny_folder, "--peers", names, *shape, *options, "--json")
        return json.loads(said.stdout.splitlines()[-1])

    return run


def test_each_peer_plays_the_session(peers):
    result = peers()
    assert result["failed"] == {}
    first, second = result["peers"].values()
    for one in (first, second):
        assert one["turns"] == result["turns"] == len(one["turn_seconds"])
        assert one["total_seconds"] == pytest.approx(sum(one["turn_seconds"]))
        assert one["facts_total"] > 0
    assert first["session_ratio"] == 1
    assert second["session_ratio"] == pytest.approx(first["total_seconds"] / second["total_seconds"])


def test_a_peer_leaves_when_its_minutes_are_used_up(peers):
    result = peers("--minutes", 1e-6)
    assert [one["turns"] for one in result["peers"].values()] == [1, 1]
    assert all(one["facts_total"] > 0 for one in result["peers"].values())


def test_a_peer_that_breaks_leaves_the_others_alone(peers, tmp_path, monkeypatch):
    worker = tmp_path / "broken_worker.py"
    worker.write_text(BROKEN)
    known = drive.peers()
    monkeypatch.setattr(drive, "peers", lambda: {**known, "broken": drive.Peer("broken", str(worker))})
    result = peers(names="broken,tenure")
    assert list(result["peers"]) == ["tenure"]
    assert result["peers"]["tenure"]["session_ratio"] == 1  # over the first that is left
    assert "ended with 1: no more cache" in result["failed"]["broken"]
