"""The long sessions' part of the results page: a table a run, and tables across runs."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tenure.bench.longsession.arms import ARMS
from tenure.bench.longsession.series import (
    Result,
    Stored,
    interval,
    model_of,
    of_edges,
    plain,
    pooled,
    weights_of,
)
from tenure.bench.longsession.summary import summarise

_TOLD = ("pace", "bounded", "foresight", "h2o", "none")
"""Paired tests are told between PACE and these, and between planners and PACE."""

_EDGES = (
    "spoilt single edges of the plan, most of which another reader of the same definition made up for: its rate says "
    "little of what was taken away"
)
"""Of runs that :func:`~tenure.bench.longsession.series.of_edges` finds."""

EARLY = 100_000
"""Tokens up to which turns count as early, from half of it on."""


def run_section(run: Result, origin: str, config: str) -> str:
    """One run.

    Args:
        run: its summary, with its ``name``.
        origin: commit and machine in words.
        config: options in words.
    """
    seeds = run["seeds"]
    lines = [
        f"### {model_of(run)}, {run['config']['tokens']:,} tokens: `{run['name']}`\n",
        f"{_sessions(seeds)} {ranges(seeds)}; {config}. {origin}\n",
        "| arm | checks passed | 95 % | of the control | recall | needed tokens resident | rotary gap | K/V "
        "| archive | s a session |",
        "|---" * 10 + "|",
    ]
    for name, arm in run["arms"].items():
        low, high = interval(arm)
        control, gap = arm["of_control"], arm["rotary_gap"]
        shared = f" (shared by {arm['time_shared_by']})" if arm["time_shared_by"] > 1 else ""
        lines.append(
            f"| {name} | {arm['checks_passed']} of {arm['checks_total']} | {low:.0%} to {high:.0%} "
            f"| {'' if control is None else f'{control:.0%}'} | {arm['recall']:.1%} | {arm['residency']:.0%} "
            f"| {'' if gap is None else f'{gap:,.0f}'} | {arm['kv_bytes'] / 1e6:,.1f} MB | {_archive(name, arm)} "
            f"| {arm['wall_s']:,.0f}{shared} |"
        )
    if of_edges(run):
        lines.append(f"\nIts noise {_EDGES}.")
    noise = dict.fromkeys(words for arm in run["arms"].values() if (words := noise_words(arm)))
    lines += [f"\nNoise: {words}." for words in noise]
    lines += _pairs(run)
    alone = {name: arm for name, arm in run["arms"].items() if arm["time_shared_by"] == 1}
    if {"pace", "h2o"} <= set(alone):
        ratio = sum(alone["pace"]["turn_s"]) / sum(alone["h2o"]["turn_s"])
        lines.append(
            f"\nReading took PACE {ratio:.3f} times what it took H2O, turn about on the same machine."
        )
    return "\n".join([*lines, ""])


def _pairs(run: Result) -> list[str]:
    """The paired tests that are told, as a table with an empty line before it."""
    tests = {pair: test for pair, test in run["paired"].items() if _is_told(pair)}
    if not tests:
        return []
    rows = [
        f"| {pair.replace('>', ' over ')} | {test['better']} | {test['worse']} | {test['tied']} | {test['p']:.2g} |"
        for pair, test in tests.items()
    ]
    return [
        "",
        "| pairs of seed and probe | better | worse | tied | p (sign test) |",
        "|---" * 5 + "|",
        *rows,
    ]


def pooled_tables(stored: Stored) -> str:
    """For each of :func:`~tenure.bench.longsession.series.pooled` what its arms passed, and the paired tests."""
    lines = []
    for sessions in pooled(stored):
        run = summarise(sessions)
        seeds: dict[str, set[int]] = {}
        for found in sessions:
            seeds.setdefault(weights_of(found), set()).add(found["seed"])
        words = [
            f"{_sessions(of)} {ranges(of)}, {'the usual' if form == 'auto' else form} weights"
            for form, of in sorted(seeds.items())
        ]
        lines += [
            f"### {run['model']}, {run['config']['tokens']:,} tokens, all sessions\n",
            f"{'; '.join(words)}.\n",
            "| arm | sessions | checks passed | 95 % | recall |",
            "|---" * 5 + "|",
        ]
        for name, arm in run["arms"].items():
            low, high = interval(arm)
            lines.append(
                f"| {name} | {arm['sessions']} | {arm['checks_passed']} of {arm['checks_total']} "
                f"| {low:.0%} to {high:.0%} | {arm['recall']:.1%} |"
            )
        lines += [*_pairs(run), ""]
    return "\n".join(lines)


def _sessions(seeds: Collection[int]) -> str:
    return "1 session, seed" if len(seeds) == 1 else f"{len(seeds)} sessions, seeds"


def _archive(name: str, arm: Mapping[str, Any]) -> str:
    """What an arm holds in host memory beside its slab; empty where there is no such thing."""
    if name in ARMS and not ARMS[name].host:
        return ""
    held, lost = arm.get("archive_bytes"), arm.get("archive_lost")
    if held is None:
        return "not measured"
    return f"{held / 1e6:,.1f} MB" + (f", {lost:,} spans lost" if lost else "")


def noise_words(arm: Mapping[str, Any]) -> str:
    """What noise did to the plans that an arm was told, empty where they were right."""
    noise = arm.get("noise")
    if not noise:
        return ""
    return f"{noise['spoilt']} of {noise['spans']} definitions spoilt, {noise['lost']} without a reader that needs them"


def _is_told(pair: str) -> bool:
    first, second = pair.split(">")
    between = first in _TOLD and second in _TOLD
    return "pace" in (first, second) and (between or first.startswith("pace-"))


def ranges(numbers: Iterable[int]) -> str:
    """`0-4, 7` for 0, 1, 2, 3, 4, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def length_table(runs: Sequence[Result]) -> str:
    """PACE over lengths: recall, time a turn late over early, bytes. Empty with one length only."""
    rows = []
    lengths = set()
    for run in sorted(plain(runs), key=lambda run: (model_of(run), int(run["config"]["tokens"]))):
        arm = run["arms"].get("pace")
        if arm is None or run["config"]["distance"] is not None:
            continue
        lengths.add((model_of(run), run["config"]["tokens"]))
        late = late_over_early(arm)
        rows.append(
            f"| {model_of(run)} | {arm['tokens']:,} | {arm['sessions']} | {arm['recall']:.1%} "
            f"| {arm['checks_passed']} of {arm['checks_total']} | {'' if late is None else f'{late:.3f}'} "
            f"| {arm['kv_bytes']:,} |"
        )
    if len(lengths) < 2:
        return ""
    head = (
        "### PACE by length\n\nTime: a turn at the session's end over one at 50,000 to 100,000 tokens, medians, of "
        "arms that ran by themselves.\n\n"
        "| model | tokens | sessions | recall | checks | time, late over early | K/V bytes |\n"
        + "|---" * 7
        + "|"
    )
    return "\n".join([head, *rows, ""])


def late_over_early(arm: Mapping[str, Any]) -> float | None:
    """Median of the last tenth of the turns over the median of those up to ``EARLY`` tokens, the first half left out.

    None where the arm shared its time, or where the session is not at least twice as long as ``EARLY``.
    """
    turns = arm["turn_s"]
    if arm["time_shared_by"] > 1 or arm["tokens"] < 2 * EARLY or not turns:
        return None
    edge = round(len(turns) * EARLY / arm["tokens"])
    early, late = turns[edge // 2 : edge], turns[-max(1, len(turns) // 10) :]
    return statistics.median(late) / statistics.median(early) if early else None


def planner_table(runs: Sequence[Result]) -> str:
    """Planners and plan noise, against the same sessions under the right plan (the oracle). Empty without any.

    Runs whose noise spoilt single edges are named and left out.
    """
    rows = []
    for run in runs:
        if of_edges(run):
            continue
        config = run["config"]
        noise = "" if config["noise"] == "none" else f"{config['noise']}, {config['noise_rate']:.0%}"
        for name, arm in run["arms"].items():
            if not (name.startswith("pace-") or (noise and name == "pace")):
                continue
            of = _of_oracle(runs, run, arm)
            found = arm.get("proposed")
            right = "" if not found else f"{found['right']} of {found['needed']}, {found['spans']} proposed"
            done = arm.get("noise")
            spoilt = "" if not done else f"{done['spoilt']} of {done['spans']}, {done['lost']}"
            rows.append(
                f"| {model_of(run)}, {config['tokens']:,} tokens | {name} | {noise} | {spoilt} | {arm['sessions']} "
                f"| {arm['checks_passed']} of {arm['checks_total']} | {arm['recall']:.1%} "
                f"| {'' if of is None else f'{of:.1%}'} | {right} | {_archive(name, arm)} |"
            )
    old = [f"`{run['name']}`" for run in runs if of_edges(run)]
    if not rows and not old:
        return ""
    lines = ["### Planners and plan noise\n"]
    if rows:
        lines += [
            "The oracle is `pace` with the right plan in the same sessions. Spoilt: definitions, of how many in all "
            "sessions, and how many of them have no reader left that needs them.\n",
            "| session | arm | noise of the plan | spoilt | sessions | checks | recall | of the oracle's "
            "| needed spans found | archive |",
            "|---" * 10 + "|",
            *rows,
            "",
        ]
    if old:
        lines.append(f"Left out: {', '.join(old)}, whose noise {_EDGES}.\n")
    return "\n".join(lines)


def _of_oracle(runs: Sequence[Result], run: Result, arm: Mapping[str, Any]) -> float | None:
    """Recall of an arm over the oracle's, in the seeds that both have."""
    same = ("tokens", "distance", "budget", "limit", "task_version")
    for other in [run, *runs]:
        clean = other["config"]["noise"] == "none" and "pace" in other["arms"]
        alike = model_of(other) == model_of(run)
        if clean and alike and all(other["config"][key] == run["config"][key] for key in same):
            oracle = other["arms"]["pace"]["recall_by_seed"]
            seeds = [seed for seed in arm["recall_by_seed"] if seed in oracle]
            known = sum(oracle[seed] for seed in seeds)
            if known:
                return float(sum(arm["recall_by_seed"][seed] for seed in seeds) / known)
    return None
