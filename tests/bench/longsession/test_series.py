"""Lines of the plots, from made-up runs."""

from __future__ import annotations

import pytest

from tenure.bench.longsession import series
from tests.bench.longsession.runs import run, stored


def test_by_distance():
    runs = [
        run(stored(0, {"pace": 5, "none": 5}, distance=900)),
        run(stored(0, {"pace": 4, "h2o": 0}, distance=200)),
        run(stored(0, {"pace": 1}, tokens=5000)),
        run(stored(0, {"pace": 0}, distance=500, noise="dropped", noise_rate=0.1)),
    ]
    lines = series.by_distance(runs)
    assert {name: [(p.x, p.y) for p in points] for name, points in lines.items()} == {
        "pace": [(200, 0.8), (900, 1.0)],
        "h2o": [(200, 0.0)],
    }
    assert [(p.x, p.y) for p in series.by_distance(runs[2:])["pace"]] == [(5000, 0.2)]


def test_sessions_that_are_all_alike_say_nothing_of_others():
    arms = run(*(stored(seed, {"pace": seed % 3, "h2o": 0}) for seed in range(6)))["arms"]
    low, high = series.interval(arms["h2o"])
    assert (low, high) == tuple(arms["h2o"]["checks_wilson95"])
    assert low == 0 < 0.05 < high
    assert list(series.interval(arms["pace"])) == arms["pace"]["checks_bootstrap95"]


def test_by_length():
    runs = [
        run(*(stored(seed, {"pace": 4 - 2 * (seed % 2)}, tokens=5000) for seed in range(6))),
        run(stored(0, {"pace": 3}, tokens=2000), stored(1, {"pace": 3}, tokens=2000)),
        run(stored(0, {"pace": 1}, tokens=9000, distance=100)),
    ]
    recall = series.by_length(runs, "recall")["pace"]
    assert [(p.x, p.y) for p in recall] == [(2000, 0.6), (5000, pytest.approx(0.6))]
    assert (recall[0].low, recall[0].high) == (None, None)  # two sessions that agree say nothing of others
    assert 0.4 <= recall[1].low < 0.6 < recall[1].high <= 0.8
    checks = series.by_length(runs, "checks")["pace"]
    assert checks[0].low < 0.6 < checks[0].high
    assert [p.y for p in series.by_length(runs, "checks")["pace"]] == [0.6, 0.6]


def test_runs_of_one_length_are_one_point():
    first = run(stored(0, {"pace": 5, "h2o": 1}), stored(1, {"pace": 5, "h2o": 1}))
    second = run(stored(2, {"pace": 2}))
    (point,) = series.by_length([first, second], "checks")["pace"]
    assert (point.x, point.y) == (1000, 0.8)
    assert 0.5 < point.low < 0.6 < 0.9 < point.high < 1  # Wilson, 12 of 15
    (point,) = series.by_length([first, second], "recall")["pace"]
    assert point.y == pytest.approx((0.8 + 0.8 + 0.4) / 3)
    assert (
        series.by_length([first, run(stored(1, {"pace": 0}))], "checks")["pace"][0].y == 1.0
    )  # seed 1 counts once
    apart = series.by_length([first, run(stored(0, {"pace": 1}, budget=512))], "checks")
    assert {name.split("\n")[0]: points[0].y for name, points in apart.items()} == {
        "pace, 2,048 slots": 1.0,
        "h2o, 2,048 slots": 0.2,
        "pace, 512 slots": 0.2,
    }


def test_by_gap_takes_only_answers_that_had_everything():
    sessions = [
        stored(0, {"pace": 5, "h2o": 0}, gap=3000.0),
        stored(1, {"pace": 3, "h2o": 0}, gap=3500.0),
        stored(2, {"foresight": 1}, gap=40_000.0),
    ]
    (points,) = series.by_gap(sessions).values()
    others = [
        stored(3, {"none": 5, "pace-retrieval": 5, "auto": 5}, gap=3000.0),
        stored(4, {"pace": 0}, gap=3000.0, noise="wrong", noise_rate=0.5, spoilt=0),
    ]
    assert list(series.by_gap([*sessions, *others]).values()) == [points]  # they differ in more than the gap
    assert [(p.x, p.y) for p in points] == [(3250.0, 0.8), (40_000.0, 0.2)]
    assert points[0].low < 0.8 < points[0].high
    assert series.by_gap([stored(0, {"h2o": 1})]) == {}


def test_times_are_taken_only_from_arms_that_ran_alone():
    lines = series.time_by_length(
        [
            run(stored(0, {"pace": 5, "h2o": 5}, shared=2, turns=40, tokens=8000)),
            run(stored(0, {"pace": 5}, turns=20, tokens=4000)),
        ]
    )
    assert list(lines) == ["pace"]
    # Turns of 200 tokens that take 1, 2, 3, ... seconds: the median of nine is the middle one.
    assert [(p.x, p.y) for p in lines["pace"][:2]] == [(900.0, 5.0), (1100.0, 6.0)]
    assert len(lines["pace"]) == 12


def test_noise_starts_at_the_right_plan():
    """At each share that was really spoilt; what spoilt single edges is left out."""
    dropped = {"noise": "dropped", "noise_rate": 0.5}
    runs = [
        run(stored(0, {"pace": 5, "none": 5, "h2o": 1})),
        run(stored(0, {"pace": 5}, tokens=9000)),
        run(
            stored(0, {"pace": 3, "h2o": 1}, spoilt=2, **dropped), stored(1, {"pace": 3}, spoilt=1, **dropped)
        ),
        run(stored(0, {"pace": 2}, **dropped)),
        run(stored(0, {"pace": 1}, spoilt=1, noise="wrong", noise_rate=0.5)),
    ]
    lines = series.by_noise(runs, "dropped")
    assert {name: [(p.x, p.y) for p in points] for name, points in lines.items()} == {
        "pace": [(0.0, 0.8), (0.5, 0.6)]
    }
    assert [series.of_edges(one) for one in runs] == [False, False, False, True, False]
