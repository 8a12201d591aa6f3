"""Sums over the sessions of a run, intervals, and paired tests between arms."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Sessions = Mapping[int, Mapping[str, Any]]
"""By seed, then by arm: what was stored of it."""


def by_seed(stored: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Join the files of each seed; later ones win."""
    joined: dict[int, dict[str, Any]] = {}
    for found in stored:
        joined.setdefault(found["seed"], {}).update(found["arms"])
    return joined


def summarise(stored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a run in one object.

    Args:
        stored: its sessions, as the store loads them; at least one.
    """
    sessions = by_seed(stored)
    names = _in_table_order({name for arms in sessions.values() for name in arms})
    commits = dict.fromkeys(found["commit"] for found in stored)
    newest = max(stored, key=lambda found: str(found["date"]))
    return {
        "bench": "longsession",
        "date": newest["date"],
        "model": newest["config"]["model"],
        "machine": newest["machine"],
        "commit": ", ".join(str(commit) for commit in commits),
        "config": newest["config"],
        "seeds": sorted(sessions),
        "arms": {name: _arm(sessions, name) for name in names},
        "paired": {
            f"{second}>{first}": test
            for first, second in combinations(names, 2)
            if (test := paired(sessions, second, first)) is not None
        },
    }


def _in_table_order(names: set[str]) -> list[str]:
    from tenure.bench.longsession.arms import ARMS

    return [name for name in ARMS if name in names] + sorted(names - set(ARMS))


def passed(arm: Mapping[str, Any]) -> int:
    """Hidden tests that an arm passed in one session."""
    return sum(sum(answer["checks"]) for answer in arm["answers"])


def recall(arm: Mapping[str, Any]) -> float:
    """Share of the session's facts that stand in any of its answers."""
    wanted = {name for answer in arm["answers"] for name in answer["wanted"]}
    found = {name for answer in arm["answers"] for name in answer["facts"]}
    return len(found) / len(wanted)


def _arm(sessions: Sessions, name: str) -> dict[str, Any]:
    from scipy.stats import binomtest

    mine = {seed: arms[name] for seed, arms in sessions.items() if name in arms}
    played = list(mine.values())
    answers = [answer for arm in played for answer in arm["answers"]]
    total = sum(len(answer["checks"]) for answer in answers)
    right = sum(map(passed, played))
    gaps = [answer["rotary_gap"] for answer in answers if answer["rotary_gap"] is not None]
    recalls = [recall(arm) for arm in played]
    turns = max(len(arm["turn_s"]) for arm in played)
    wilson = binomtest(right, total).proportion_ci(method="wilson")
    shared = [(seed, arm) for seed, arm in mine.items() if "none" in sessions[seed]]
    control = sum(passed(sessions[seed]["none"]) for seed, _ in shared)
    return {
        "sessions": len(played),
        "tokens": max(arm["tokens"] for arm in played),
        "checks_passed": right,
        "checks_total": total,
        "checks_wilson95": [round(wilson.low, 4), round(wilson.high, 4)],
        "checks_bootstrap95": _bootstrap([passed(arm) / _checks(arm) for arm in played]),
        "of_control": round(sum(passed(arm) for _, arm in shared) / control, 4) if control else None,
        "probes_full": sum(all(answer["checks"]) for answer in answers),
        "probes_total": len(answers),
        "by_probe": _by_probe(answers),
        "recall": round(statistics.mean(recalls), 4),
        "recall_by_seed": {str(seed): round(recall(arm), 4) for seed, arm in mine.items()},
        "recall_bootstrap95": _bootstrap(recalls),
        "residency": round(statistics.mean(answer["residency"] for answer in answers), 4),
        "rotary_gap": round(statistics.mean(gaps), 1) if gaps else None,
        "proposed": _proposed(answers),
        "noise": _noise(played),
        "kv_bytes": max(arm["kv_bytes"] for arm in played),
        **_archive(played),
        "wall_s": round(statistics.mean(arm["wall_s"] for arm in played), 2),
        "answer_s": round(statistics.mean(arm["answer_s"] for arm in played), 2),
        "turn_s": [
            round(statistics.median(arm["turn_s"][turn] for arm in played if len(arm["turn_s"]) > turn), 4)
            for turn in range(turns)
        ],
        "time_shared_by": max(arm["time_shared_by"] for arm in played),
    }


def _checks(arm: Mapping[str, Any]) -> int:
    return sum(len(answer["checks"]) for answer in arm["answers"])


def _by_probe(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    sums: dict[str, list[int]] = {}
    for answer in answers:
        one = sums.setdefault(answer["probe"], [0, 0])
        one[0] += sum(answer["checks"])
        one[1] += len(answer["checks"])
    return sums


def _proposed(answers: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Of the spans that planners found for the probes: how many, how many of them needed, how many there were to find.

    None where nobody proposed any.
    """
    proposed = [set(answer.get("proposed", ())) for answer in answers]
    needed = [set(answer.get("needed", ())) for answer in answers]
    if not any(proposed):
        return None
    return {
        "spans": sum(map(len, proposed)),
        "right": sum(len(some & wanted) for some, wanted in zip(proposed, needed, strict=True)),
        "needed": sum(map(len, needed)),
    }


def _noise(played: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Of the definitions that the plans name: how many, how many were spoilt, how many are read by no step that needs
    them. None where plans were right or not told, or noise was of the first kind."""
    found = [arm["noise"] for arm in played if "noise" in arm]
    if not found:
        return None
    return {key: sum(len(one[key]) for one in found) for key in ("spans", "spoilt", "lost")}


def _archive(played: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """The most that an arm held beside its slab, and spans that did not fit. None where it was not measured."""
    known = [arm for arm in played if "archive_bytes" in arm]
    return {
        "archive_bytes": max((arm["archive_bytes"] for arm in known), default=None),
        "archive_lost": sum(arm["archive_lost"] for arm in known) if known else None,
    }


def _bootstrap(values: Sequence[float]) -> list[float] | None:
    """95 % of the mean over sessions, which are drawn anew: the checks of one session hang together.

    None for a single session.
    """
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2:
        return None
    found = bootstrap(
        (np.array(values),), np.mean, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return [round(float(found.low), 4), round(float(found.high), 4)]


def paired(sessions: Sessions, first: str, second: str) -> dict[str, Any] | None:
    """Sign test over pairs of the same seed and probe: in how many the first arm passes more checks.

    Returns:
        Pairs in which it was better, worse and tied, and the two-sided p; None where no seed has both arms.
    """
    from scipy.stats import binomtest

    better = worse = tied = 0
    for arms in sessions.values():
        if first not in arms or second not in arms:
            continue
        other = {answer["probe"]: sum(answer["checks"]) for answer in arms[second]["answers"]}
        for answer in arms[first]["answers"]:
            difference = sum(answer["checks"]) - other[answer["probe"]]
            better += difference > 0
            worse += difference < 0
            tied += difference == 0
    if not better + worse + tied:
        return None
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    return {"better": better, "worse": worse, "tied": tied, "p": float(f"{p:.3g}")}
