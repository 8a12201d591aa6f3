"""Results of ``tenure bench regions`` on the page of ``tenure bench report``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tenure.bench import regions_summary
from tenure.bench.longsession.series import ENOUGH
from tenure.bench.regions import RegionsConfig
from tenure.bench.regions_summary import BASE
from tenure.regions import Region

Found = Mapping[str, Any]


def is_summary(found: Found) -> bool:
    """Whether a result is that of all seeds of a setting, not of one, nor the pooled test."""
    return "seeds" in found and "arms" in found


def draw(folder: Path, settings: Iterable[Found], images: Path) -> dict[str, Path]:
    """Pictures by title: facts found by region and arm, a panel a budget.

    Args:
        folder: of the summaries.
        settings: the summaries.
        images: where the pictures go.
    """
    budgets: dict[tuple[str, int], set[float]] = {}
    for one in settings:
        config = one["config"]
        budgets.setdefault((config["model"], config["length"]), set()).add(config["budget"])
    pictures: dict[str, Path] = {}
    for (model, length), shares in sorted(budgets.items()):
        drawn: list[str] = []
        played = RegionsConfig(models=(model,), lengths=(length,), budgets=tuple(sorted(shares)))
        regions_summary.draw(folder, played, images, drawn.append)
        pictures |= {f"Facts found by region, {model}, {length:,} tokens": Path(path) for path in drawn}
    return pictures


def section(settings: Iterable[Found], pooled: Found | None, machine: Callable[[Found], str]) -> str:
    """Tables of all settings and of the pooled test, in Markdown.

    Args:
        settings: the summaries.
        pooled: ``pooled.json``, or None.
        machine: says what a result was measured on.
    """
    lines = []
    for one in sorted(settings, key=_order):
        lines += [*_setting(one), "", machine(one) + _commits(one), ""]
    if pooled is not None:
        for model, arms in pooled["pooled"].items():
            lines += [f"### {model}, all lengths and budgets together, over {BASE}", ""]
            lines += ["| arm | transcripts | facts more, mean | better | worse | p |", "|---" * 6 + "|"]
            lines += [
                f"| {name} | {test['pairs']} | {test['mean']:+.1f} | {test['better']} | {test['worse']} "
                f"| {'' if test['p'] is None else test['p']} |"
                for name, test in arms.items()
            ]
            lines.append("")
    return "\n".join(lines)


def _order(one: Found) -> tuple[str, int, float]:
    config = one["config"]
    return config["model"], config["length"], config["budget"]


def _setting(one: Found) -> list[str]:
    model, length, budget = _order(one)
    lines = [
        f"### {model}, {length:,} tokens, budget {budget:.1%}, {len(one['seeds'])} transcripts",
        "",
        f"| arm | all facts | system | elsewhere | of these, 95 % | better and worse than {BASE} elsewhere, p |",
        "|---" * 6 + "|",
    ]
    for name, arm in one["arms"].items():
        facts = arm["facts"]
        system = facts[str(Region.SYSTEM)]
        found, asked = (sum(pair[part] for pair in facts.values()) for part in (0, 1))
        ends = arm["interval"] if len(one["seeds"]) >= ENOUGH else None
        test = arm.get(f"against_{BASE}")
        lines.append(
            f"| {name} | {found} of {asked} | {system[0]} of {system[1]} "
            f"| {found - system[0]} of {asked - system[1]} "
            f"| {'' if ends is None else f'{ends[0]:.1%} to {ends[1]:.1%}'} "
            f"| {'' if test is None else _test(test)} |"
        )
    return lines


def _commits(one: Found) -> str:
    """Arms that another commit has played than the summary's."""
    others: dict[tuple[str, ...], list[str]] = {}
    for name, arm in one["arms"].items():
        if (commits := tuple(arm.get("commits", ()))) not in ((), (one["commit"],)):
            others.setdefault(commits, []).append(name)
    return "".join(f" {', '.join(arms)}: commit {', '.join(commits)}." for commits, arms in others.items())


def _test(test: Found) -> str:
    p = "" if test["p"] is None else f", {test['p']}"
    return f"{test['better']} and {test['worse']} of {test['pairs']}{p}"
