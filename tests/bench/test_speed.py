"""``tenure bench speed`` on a small model: what it tells, and how it takes turns."""

from __future__ import annotations

import json
import statistics

import pytest

from tenure.bench.speed import Bench, SpeedConfig, _over
from tenure.errors import ConfigError

SMALL = ("--budget", "64", "--chunk", "32", "--repeats", "5", "--json")


def speed(tenure, *options):
    return json.loads(tenure("bench", "speed", *SMALL, *options).stdout.splitlines()[-1])


def test_ratios_are_of_rounds():
    told = _over("x", [2.0, 30.0, 4.0], [1.0, 10.0, 1.0])
    assert told["x"] == 3
    assert told["x_low"] == 2
    assert told["x_high"] == 4


def test_a_long_session_is_held_against_a_young_one(tenure, tiny_folder, monkeypatch):
    turns = []
    took = Bench.time

    def time(self, call, *arguments):
        turns.append(len(call.__self__))
        return took(self, call, *arguments)

    monkeypatch.setattr(Bench, "time", time)
    told = speed(tenure, "--model", tiny_folder, "--parts", "long", "--tokens", "24000")
    assert told["long_tokens"] == 24_000
    assert told["kv_bytes_constant"]
    assert told["kv_bytes"] * 10 < told["full_kv_bytes"]
    assert told["flatness_low"] <= told["flatness"] <= told["flatness_high"]
    assert told["peak_bytes_end"] >= told["peak_bytes_20k"] > 0
    late = [24_000 + 32 * turn for turn in range(5)]
    early = [311 * 32 + 32 * turn for turn in range(5)]
    assert turns == [count for pair in zip(early, late, strict=True) for count in pair]


def test_policies_take_turns_to_begin(tenure, tiny_folder, monkeypatch):
    begun = []
    took = Bench.time

    def time(self, call, session, turn, ids):
        begun.append(session.memory.policy.name)
        spent = took(self, call, session, turn, ids)
        if session.memory.policy.name == "foresight":
            ledger = session.memory.ledger
            assert (ledger.inside(ledger.spans.get("first")).sum(1) == 16).all()  # a quarter of the budget
            assert session.plan.current.id == f"round-{turn}"
        return spent

    monkeypatch.setattr(Bench, "time", time)
    chosen = ("recency", "h2o", "foresight")
    told = speed(tenure, "--model", tiny_folder, "--parts", "policies", "--policies", ",".join(chosen))
    arms = [*chosen, "foresight"]  # with bounded positions at the end
    assert begun == [arms[(turn + place) % 4] for turn in range(5) for place in range(4)]
    overhead = told["policy_overhead"]
    assert set(overhead) == {*chosen, "pace_over_h2o", "pace_over_h2o_low", "pace_over_h2o_high"}
    assert overhead["recency"] == 1
    assert statistics.median(overhead.values()) > 0


def test_int8_weights_are_measured(tenure, tiny_folder):
    told = speed(tenure, "--model", tiny_folder, "--parts", "fill", "--weights", "int8")
    assert told["fill_tokens_s"] > 0
    assert told["fill_ratio"] == told["fill_tokens_s"] / told["fill_transformers_tokens_s"]


@pytest.mark.parametrize(
    ("policies", "named"), [(("recency", "nosuch"), "'nosuch' is not known"), (("h2o",), "against recency")]
)
def test_refused_policies(policies, named):
    with pytest.raises(ConfigError, match=named):
        SpeedConfig(model="none", policies=policies)
