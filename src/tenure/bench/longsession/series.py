"""Lines of the plots, from summaries and stored sessions: what was measured over distance, gap, length, noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Result = Mapping[str, Any]
Stored = Sequence[Mapping[str, Any]]

GAPS = (0, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 4_000_000)
"""Edges of the classes of rotary gap."""

WHOLE = 0.99
"""Residency from which on needed tokens count as there, so that only their position can be at fault."""

WINDOW = 9
"""Turns of a running median."""


class Point(NamedTuple):
    """A measured value with the ends of its 95 % interval, where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


Lines = dict[str, list[Point]]


ALIKE = ("foresight", "pace")
"""Arms of one policy that are told the same plan: they differ in positions alone."""


def model_of(found: Mapping[str, Any]) -> str:
    """The model of a run or a session, with the form of its weights where that is not the usual one."""
    weights = weights_of(found)
    return str(found["config"]["model"]) + ("" if weights == "auto" else f", {weights} weights")


def weights_of(found: Mapping[str, Any]) -> str:
    """The form of the weights of a run or a session."""
    return str(found["config"].get("weights", "auto"))


ENOUGH = 5
"""Sessions from which on drawing sessions anew says something; two that agree would have an interval of nothing."""


def interval(arm: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval of an arm's share of checks: over its sessions, or of its checks where those are few or alike."""
    drawn = arm["checks_bootstrap95"] if arm["sessions"] >= ENOUGH else None
    if drawn is None or drawn[0] == drawn[1]:
        drawn = arm["checks_wilson95"]
    return float(drawn[0]), float(drawn[1])


def plain(results: Iterable[Result]) -> list[Result]:
    """Runs under right plans."""
    return [result for result in results if result["config"].get("noise", "none") == "none"]


def pooled(stored: Stored) -> list[list[Mapping[str, Any]]]:
    """Sessions under right plans that differ in their seeds and the form of their weights alone, if they differ in both.

    Of a seed that was played with several forms the usual one counts, or the first by name: one session is no two draws.
    """
    groups: dict[tuple[Any, ...], dict[int, list[Mapping[str, Any]]]] = {}
    for found in sorted(plain(stored), key=lambda found: (weights_of(found) != "auto", weights_of(found))):
        if not {"pace", "none"} & found["arms"].keys():
            continue
        config = {**found["config"], "weights": "", "dtype": ""}
        seeds = groups.setdefault(tuple(sorted(config.items())), {})
        same = seeds.setdefault(found["seed"], [])
        if not same or weights_of(same[0]) == weights_of(found):
            same.append(found)
    together = [[found for same in seeds.values() for found in same] for seeds in groups.values()]
    return [sessions for sessions in together if len(set(map(weights_of, sessions))) > 1]


def of_edges(result: Result) -> bool:
    """Whether a run's noise spoilt single edges, as it first did. Most of them had another reader beside them, so that
    its rate says little of what was taken away."""
    config = result["config"]
    return config.get("noise", "none") != "none" and "noise_version" not in config


def by_distance(results: Iterable[Result]) -> Lines:
    """Share of the checks passed, over the tokens between the last definition and the probes.

    Where runs set a distance, only these count: they differ in nothing else.
    """
    runs = plain(results)
    swept = [run for run in runs if run["config"]["distance"] is not None]
    return _lines(swept or runs, lambda config: config["distance"] or config["tokens"], _checks)


def by_length(results: Iterable[Result], value: str) -> Lines:
    """Recall, or the share of the checks passed, over the length of sessions that begin with the definitions."""
    from_start = [result for result in plain(results) if result["config"]["distance"] is None]
    return _lines(from_start, lambda config: config["tokens"], _checks if value == "checks" else _recall)


def by_noise(results: Iterable[Result], kind: str) -> Lines:
    """Recall over the share of definitions that were spoilt, as it came about; right plans count as the share 0."""
    noisy = [result for result in results if result["config"]["noise"] == kind and not of_edges(result)]
    settings = {_setting(result) for result in noisy}
    clean = [result for result in plain(results) if _setting(result) in settings]
    planned = {name for result in noisy for name, arm in result["arms"].items() if arm["noise"]}
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for result in [*clean, *noisy]:
        for name, arm in result["arms"].items():
            if name in planned:
                noise = arm.get("noise")
                share = noise["spoilt"] / noise["spans"] if noise else 0.0
                groups.setdefault((name, share), []).append(arm)
    lines: Lines = {}
    for (name, share), arms in sorted(groups.items(), key=lambda group: group[0][1]):
        lines.setdefault(name, []).append(_recall(share, together(arms)))
    return lines


def _setting(run: Result) -> tuple[Any, ...]:
    return tuple(run["config"][key] for key in ("tokens", "distance", "budget", "limit"))


def by_gap(stored: Stored) -> Lines:
    """Share of the checks passed in classes of rotary gap, of answers whose needed tokens were all there.

    Of the arms in ``ALIKE`` under right plans. Others differ in more than the gap: the control has all of a shorter
    session at hand, other policies keep other things beside what is needed, and what is fetched stands among the newest.
    """
    classes: dict[int, list[tuple[float, int, int]]] = {}
    for found in plain(stored):
        for name in ALIKE:
            for answer in found["arms"].get(name, {"answers": ()})["answers"]:
                gap = answer["rotary_gap"]
                if gap is not None and answer["residency"] >= WHOLE:
                    place = max(number for number, edge in enumerate(GAPS) if edge <= gap)
                    classes.setdefault(place, []).append((gap, sum(answer["checks"]), len(answer["checks"])))
    points = []
    for _, answers in sorted(classes.items()):
        right, total = sum(a[1] for a in answers), sum(a[2] for a in answers)
        middle = statistics.mean(a[0] for a in answers)
        points.append(Point(middle, right / total, *_wilson(right, total)))
    return {f"{' and '.join(ALIKE)},\nall needed tokens resident": points} if points else {}


def time_by_length(results: Iterable[Result]) -> Lines:
    """Seconds a turn, a running median, over the tokens of the session; only of arms that ran by themselves.

    Of several runs the longest is taken for each arm.
    """
    lines: Lines = {}
    for result in sorted(plain(results), key=lambda result: int(result["config"]["tokens"])):
        for name, arm in result["arms"].items():
            turns = arm["turn_s"]
            if arm["time_shared_by"] == 1 and len(turns) >= 2 * WINDOW:
                step = arm["tokens"] / len(turns)
                lines[name] = [
                    Point((end - WINDOW / 2) * step, statistics.median(turns[end - WINDOW : end]))
                    for end in range(WINDOW, len(turns) + 1)
                ]
    return lines


def _lines(
    results: Iterable[Result],
    x: Callable[[Mapping[str, Any]], float],
    point: Callable[[float, Mapping[str, Any]], Point],
) -> Lines:
    """A line for each arm, and for each budget and limit where runs have several. Runs that are alike are one point."""
    runs = list(results)
    several = len({_room(run) for run in runs}) > 1
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: x(run["config"])):
        budget, limit = _room(run)
        for name, arm in run["arms"].items():
            if name != "none":  # the control has a length of its own
                line = f"{name}, {budget:,} slots\nbelow {limit:,}" if several else name
                groups.setdefault((line, x(run["config"])), []).append(arm)
    lines: Lines = {}
    for (line, place), arms in groups.items():
        lines.setdefault(line, []).append(point(place, together(arms)))
    return lines


def _room(run: Result) -> tuple[int, int]:
    return int(run["config"]["budget"]), int(run["config"]["limit"] or 0)


def together(arms: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What an arm reached in runs that differ in their sessions alone. Of runs that share some the largest counts.

    Sessions of one run can be drawn anew, those of several only counted: their interval is that of the checks.
    """
    apart: list[Mapping[str, Any]] = []
    seeds: dict[str, float] = {}
    for arm in sorted(arms, key=lambda arm: -arm["sessions"]):
        if not seeds.keys() & arm["recall_by_seed"].keys():
            apart.append(arm)
            seeds |= arm["recall_by_seed"]
    if len(apart) == 1:
        return apart[0]
    right, total = (sum(arm[key] for arm in apart) for key in ("checks_passed", "checks_total"))
    return {
        "sessions": len(seeds),
        "checks_passed": right,
        "checks_total": total,
        "checks_wilson95": _wilson(right, total),
        "checks_bootstrap95": None,
        "recall": statistics.mean(seeds.values()),
        "recall_bootstrap95": None,
    }


def _wilson(right: int, total: int) -> tuple[float, float]:
    from scipy.stats import binomtest

    ends = binomtest(right, total).proportion_ci(method="wilson")
    return float(ends.low), float(ends.high)


def _checks(x: float, arm: Mapping[str, Any]) -> Point:
    low, high = interval(arm)
    return Point(x, arm["checks_passed"] / arm["checks_total"], low, high)


def _recall(x: float, arm: Mapping[str, Any]) -> Point:
    low, high = (arm["recall_bootstrap95"] if arm["sessions"] >= ENOUGH else None) or (None, None)
    return Point(x, arm["recall"], low, high)
