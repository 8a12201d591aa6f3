"""Noise in the plan: how many definitions, how each kind spoils one, and that it is gone for whoever needs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure.bench.longsession.arms import chosen
from tenure.bench.longsession.noise import damage, noisy, read
from tenure.bench.longsession.play import play
from tenure.bench.longsession.run import check_noise, run, told_plan
from tenure.bench.longsession.store import Store
from tenure.errors import ConfigError
from tests.bench.longsession.tiny import SETTINGS, players, quick

ONE = 3
"""A seed of which a tenth is one definition: that of the fees, which two probes read."""


def edges(plan) -> set[tuple[str, str]]:
    return {(step.id, span) for step in plan.steps for span in step.spans}


@pytest.mark.parametrize("kind", ["dropped", "stale", "contradictory", "wrong", "all"])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_noise_hits_its_share_of_definitions(task, kind, rate):
    """Over ten sessions, although one has only three."""
    found = [
        damage(task.plan(), noisy(replace(task, seed=seed), kind, rate, SETTINGS.budget))
        for seed in range(10)
    ]
    assert sum(len(one["spans"]) for one in found) == 30
    assert sum(len(one["spoilt"]) for one in found) == round(30 * rate)
    assert {span for one in found for span in one["spoilt"]} == set(read(task.plan()))
    lost = sum(len(one["lost"]) for one in found)
    if kind != "all":
        assert lost == (0 if kind == "contradictory" else round(30 * rate))


@pytest.mark.parametrize("kind", ["dropped", "stale", "contradictory", "wrong", "all"])
def test_a_higher_rate_spoils_more_of_the_same(task, kind):
    for seed in range(10):
        told = [noisy(replace(task, seed=seed), kind, rate, SETTINGS.budget) for rate in (0.1, 0.5)]
        less, more = (damage(task.plan(), plan) for plan in told)
        assert set(less["spoilt"]) <= set(more["spoilt"])
        for span in less["spoilt"]:
            readers = [[step.id for step in plan.readers(span)] for plan in told]
            assert readers[0] == readers[1]


def test_how_each_kind_spoils_a_definition(task):
    one, right, budget = replace(task, seed=ONE), edges(task.plan()), 100_000
    fees = {("fee_for", "def-fees"), ("module", "def-fees")}
    filler = min(task.fillers, key=lambda span: task.sizes[span])
    wrong = {("fee_for", filler), ("module", filler)}
    told = {
        kind: edges(noisy(one, kind, 0.1, budget)) for kind in ("dropped", "stale", "contradictory", "wrong")
    }
    assert told["dropped"] == right - fees
    assert told["stale"] == right - fees | {("define-record", "def-fees")}
    assert told["contradictory"] == right | wrong | {("settle", "def-fees")}
    assert told["wrong"] == right - fees | wrong


def test_wrong_spans_fit_the_budget(task):
    """A step that reads more than the budget holds would be refused, and end the run."""
    definitions = read(task.plan())
    short = sorted(task.sizes[span] for span in task.fillers)
    budget = 256 + sum(task.sizes[span] for span in definitions) + short[0]
    named = set(read(noisy(task, "wrong", 1.0, budget)))
    assert sum(span in task.fillers for span in named) == 1
    assert sum(span.endswith(" (gone)") for span in named) == 2
    assert not named & set(definitions)


@pytest.mark.parametrize("kind", ["dropped", "stale", "wrong"])
def test_what_is_spoilt_is_gone(engine, task, kind):
    """For all its readers, and nothing else with it."""
    spoilt = replace(task, seed=ONE)
    (player,) = players(engine, spoilt, "pace", noise=kind, noise_rate=0.1)
    play([player], lambda text: None, separate=False)
    fee_for, settle, module = (answer.residency for answer in player.answers)
    assert fee_for < 0.9
    assert settle == 1.0
    assert module < 1.0


@pytest.mark.parametrize("kind", ["wrong", "contradictory"])
def test_a_plan_that_is_wrong_throughout_can_be_played(engine, task, kind):
    """With what stands in the place of a definition, and the definitions beside it, as far as they are read."""
    (player,) = players(engine, task, "pace", noise=kind, noise_rate=1.0, budget=1600)
    assert set(task.fillers) & set(read(player.plan))
    play([player], lambda text: None, separate=False)
    assert all((answer.residency == 1.0) == (kind == "contradictory") for answer in player.answers)


def test_a_run_tells_what_was_spoilt(engine, tmp_path, monkeypatch):
    quick(monkeypatch)
    settings = replace(SETTINGS, noise="dropped", noise_rate=0.1)
    assert settings.config["noise_version"] == 2
    store = Store(tmp_path / "run", settings.config)
    found = run(
        engine,
        settings,
        store,
        arms=chosen("h2o,pace"),
        seeds=[0, ONE],
        resume=False,
        separate=False,
        note=lambda text: None,
    )
    assert found["arms"]["pace"]["noise"] == {"spans": 6, "spoilt": 1, "lost": 1}
    assert found["arms"]["h2o"]["noise"] is None
    assert found["arms"]["pace"]["residency"] < 1.0


def test_noise_of_two_kinds_is_not_mixed(tmp_path):
    settings = replace(SETTINGS, noise="dropped", noise_rate=0.1)
    of_edges = {key: value for key, value in settings.config.items() if key != "noise_version"}
    Store(tmp_path / "run", of_edges).write(0, {"pace": {}}, separate=False)
    with pytest.raises(ConfigError, match="noise_version"):
        Store(tmp_path / "run", settings.config)


def test_right_plans_have_no_version_of_noise(task):
    """What was stored before there was one can be resumed."""
    assert told_plan(task, SETTINGS) == task.plan()
    assert "noise_version" not in SETTINGS.config
    assert damage(task.plan(), task.plan()) == {"spans": list(read(task.plan())), "spoilt": [], "lost": []}


@pytest.mark.parametrize(("noise", "rate", "named"), [("loud", 0.1, "noise"), ("none", 0.1, "noise-rate")])
def test_refused_noise(noise, rate, named):
    with pytest.raises(ConfigError, match=named):
        check_noise(replace(SETTINGS, noise=noise, noise_rate=rate))
