"""Sums, intervals and paired tests, against numbers worked out by hand."""

from __future__ import annotations

import math

from tenure.bench.longsession.summary import paired, summarise


def answer(probe: str, right: int, facts: tuple[str, ...] = (), gap: float | None = None) -> dict:
    return {
        "probe": probe,
        "checks": [number < right for number in range(5)],
        "facts": list(facts),
        "wanted": ["a", "b", "c", "d"],
        "residency": 0.5,
        "rotary_gap": gap,
    }


def arm(*answers: dict, turns: tuple[float, ...] = (1.0, 2.0)) -> dict:
    return {
        "answers": list(answers),
        "tokens": 100,
        "kv_bytes": 10,
        "wall_s": 4.0,
        "answer_s": 1.0,
        "turn_s": list(turns),
        "time_shared_by": 2,
    }


def stored(seed: int, date: str = "1", **arms: dict) -> dict:
    config = {"model": "m", "tokens": 100}
    return {"seed": seed, "arms": arms, "config": config, "commit": "c", "machine": {}, "date": date}


def test_sums():
    found = summarise(
        [
            stored(0, none=arm(answer("x", 5)), pace=arm(answer("x", 4, ("a", "b"), 10.0), turns=(1.0, 3.0))),
            stored(1, none=arm(answer("x", 5)), pace=arm(answer("x", 5, ("a", "b", "c", "d"), 30.0))),
        ]
    )
    pace = found["arms"]["pace"]
    assert (pace["checks_passed"], pace["checks_total"], pace["probes_full"]) == (9, 10, 1)
    assert pace["recall"] == 0.75
    assert pace["rotary_gap"] == 20.0
    assert pace["of_control"] == 0.9
    assert pace["turn_s"] == [1.0, 2.5]
    assert pace["by_probe"] == {"x": [9, 10]}
    # Wilson's interval of 9 in 10 from its closed form.
    z, p, n = 1.959964, 0.9, 10
    middle, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    for bound, sign in zip(pace["checks_wilson95"], (-1, 1), strict=True):
        assert abs(bound - (middle + sign * half) / (1 + z * z / n)) < 1e-4
    assert pace["checks_bootstrap95"] == [0.8, 1.0]
    assert found["arms"]["none"]["checks_bootstrap95"] == [1.0, 1.0]


def test_recall_joins_the_answers_of_a_session():
    found = summarise([stored(0, pace=arm(answer("x", 0, ("a",)), answer("y", 0, ("a", "b"))))])
    assert found["arms"]["pace"]["recall"] == 0.5
    assert found["arms"]["pace"]["checks_bootstrap95"] is None
    assert found["arms"]["pace"]["rotary_gap"] is None


def test_a_later_result_replaces_an_earlier_one():
    twice = [stored(0, "2", pace=arm(answer("x", 5))), stored(0, "1", pace=arm(answer("x", 0)))]
    twice.sort(key=lambda one: one["date"])
    assert summarise(twice)["arms"]["pace"]["checks_passed"] == 5


def test_sign_test():
    def session(first: tuple[int, ...], second: tuple[int, ...]) -> dict:
        probes = "abcdefghij"
        return {
            "pace": arm(*map(answer, probes, first)),
            "h2o": arm(*map(answer, probes, second)),
        }

    eight = {0: session((5,) * 8 + (0, 3), (0,) * 8 + (1, 3))}
    # 8 better, 1 worse, 1 tied: 2 * (1 + 9) / 2^9.
    assert paired(eight, "pace", "h2o") == {"better": 8, "worse": 1, "tied": 1, "p": 0.0391}
    assert paired(eight, "h2o", "pace") == {"better": 1, "worse": 8, "tied": 1, "p": 0.0391}
    equal = {0: session((1, 2), (1, 2))}
    assert paired(equal, "pace", "h2o") == {"better": 0, "worse": 0, "tied": 2, "p": 1.0}
    assert paired({0: {"pace": arm(answer("a", 1))}}, "pace", "h2o") is None


def test_what_planners_found():
    one = answer("x", 5) | {"needed": ["a", "b"], "proposed": ["b", "c", "d"]}
    two = answer("y", 5) | {"needed": ["a"], "proposed": []}
    found = summarise([stored(0, pace=arm(one, two), h2o=arm(answer("x", 0), answer("y", 0)))])["arms"]
    assert found["pace"]["proposed"] == {"spans": 3, "right": 1, "needed": 3}
    assert found["h2o"]["proposed"] is None


def test_noise_and_archives_are_summed():
    noise = {"spans": ["a", "b", "c"], "spoilt": ["a", "b"], "lost": ["b"]}
    one = arm(answer("x", 5)) | {"noise": noise, "archive_bytes": 100, "archive_lost": 2}
    two = arm(answer("x", 5)) | {
        "noise": noise | {"spoilt": [], "lost": []},
        "archive_bytes": 70,
        "archive_lost": 1,
    }
    found = summarise([stored(0, pace=one, h2o=arm(answer("x", 0))), stored(1, pace=two)])["arms"]
    assert found["pace"]["noise"] == {"spans": 6, "spoilt": 2, "lost": 1}
    assert (found["pace"]["archive_bytes"], found["pace"]["archive_lost"]) == (100, 3)
    assert (found["h2o"]["noise"], found["h2o"]["archive_bytes"], found["h2o"]["archive_lost"]) == (None,) * 3


def test_only_common_seeds_are_paired():
    sessions = {
        0: {"pace": arm(answer("a", 1)), "h2o": arm(answer("a", 0))},
        1: {"pace": arm(answer("a", 1))},
    }
    assert paired(sessions, "pace", "h2o") == {"better": 1, "worse": 0, "tied": 0, "p": 1.0}
