"""``tenure bench report``: what lies in ``results/`` as one page with tables and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tenure.bench.longsession.plots import draw
from tenure.bench.longsession.series import Result
from tenure.errors import ConfigError

_HEAD = """# Results

Made from the files in `results/` by `tenure bench report`; do not edit by hand. Every number was measured by the
commit and on the machine that are named beside it.
"""
_TOLD = ("pace", "bounded", "foresight", "h2o", "none")
"""Paired tests are told between these, and of planners against `pace`."""


def load(folder: Path) -> tuple[list[Result], list[dict[str, Any]], list[tuple[Path, dict[str, Any]]]]:
    """Read a folder of results.

    Returns:
        Summaries of long sessions, each with the ``name`` of its run; their stored sessions; other results by path.

    Raises:
        ConfigError: there is nothing, or a file is no JSON object.
    """
    runs: list[Result] = []
    sessions: list[dict[str, Any]] = []
    others: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(folder.rglob("*.json")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # checkpoints of a run that is under way
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"not JSON: {error}", option=str(path), way_out="Remove it or make it anew"
            ) from error
        if not isinstance(found, dict) or "bench" not in found:
            raise ConfigError("no result of a benchmark", option=str(path), way_out="Remove it")
        if found["bench"] != "longsession":
            others.append((path.relative_to(folder), found))
        elif "seeds" in found:
            runs.append({**found, "name": path.stem})
        else:
            sessions.append(found)
    if not runs and not others:
        raise ConfigError(
            f"{folder} holds no results", option="results", way_out="Run a benchmark with --record"
        )
    runs.sort(key=lambda run: (run["model"], run["config"]["tokens"], run["name"]))
    return runs, sessions, others


def write(results: Path, page: Path, images: Path) -> list[Path]:
    """Write the page and its pictures.

    Args:
        results: folder to read.
        page: Markdown file.
        images: folder of the pictures.

    Returns:
        Files that were written.
    """
    runs, sessions, others = load(results)
    pictures = draw(runs, sessions, images) if runs else {}
    text = [_HEAD]
    if runs:
        text.append("## Long sessions\n")
        text += [f"![{title}]({_link(picture, page)})\n" for title, picture in pictures.items()]
        text += [_run(run) for run in runs]
    for name in sorted({found["bench"] for _, found in others}):
        text.append(f"## {name.capitalize()}\n")
        text += [_other(path, found) for path, found in others if found["bench"] == name]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(text), encoding="utf-8")
    return [page, *pictures.values()]


def _link(picture: Path, page: Path) -> str:
    return Path(*picture.resolve().relative_to(page.resolve().parent).parts).as_posix()


def _machine(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('bf16')}"
    return f"Commit {found['commit']}, {where}, torch {machine.get('torch')}, {found['date'][:10]}."


def _config(config: Mapping[str, Any]) -> str:
    told = {key: value for key, value in config.items() if value is not None}
    if told.get("noise") == "none":
        told = {key: value for key, value in told.items() if not key.startswith("noise")}
    return ", ".join(
        f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in told.items()
    )


def _run(run: Result) -> str:
    seeds = run["seeds"]
    lines = [
        f"### {run['model']}, {run['config']['tokens']:,} tokens: `{run['name']}`\n",
        f"{len(seeds)} sessions, seeds {_ranges(seeds)}; {_config(run['config'])}. {_machine(run)}\n",
        "| arm | checks passed | 95 % | of the control | recall | needed tokens resident | rotary gap | K/V "
        "| s a session |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in run["arms"].items():
        low, high = arm["checks_bootstrap95"] or arm["checks_wilson95"]
        control, gap = arm["of_control"], arm["rotary_gap"]
        shared = f" (shared by {arm['time_shared_by']})" if arm["time_shared_by"] > 1 else ""
        lines.append(
            f"| {name} | {arm['checks_passed']} of {arm['checks_total']} | {low:.0%} to {high:.0%} "
            f"| {'' if control is None else f'{control:.0%}'} | {arm['recall']:.1%} | {arm['residency']:.0%} "
            f"| {'' if gap is None else f'{gap:,.0f}'} | {arm['kv_bytes'] / 1e6:,.1f} MB "
            f"| {arm['wall_s']:,.0f}{shared} |"
        )
    tests = {pair: test for pair, test in run["paired"].items() if _is_told(pair)}
    if tests:
        lines += [
            "",
            "| pairs of seed and probe | better | worse | tied | p (sign test) |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {pair.replace('>', ' over ')} | {test['better']} | {test['worse']} | {test['tied']} | {test['p']:.2g} |"
            for pair, test in tests.items()
        ]
    lines += _times(run["arms"])
    return "\n".join([*lines, ""])


def _is_told(pair: str) -> bool:
    first, second = pair.split(">")
    return "pace" in (first, second) and ((first in _TOLD and second in _TOLD) or first.startswith("pace-"))


def _times(arms: Mapping[str, Any]) -> list[str]:
    """What separate timing says: reading of PACE over H2O, and late turns over early ones."""
    lines = []
    alone = {name: arm for name, arm in arms.items() if arm["time_shared_by"] == 1}
    if {"pace", "h2o"} <= set(alone):
        ratio = sum(alone["pace"]["turn_s"]) / sum(alone["h2o"]["turn_s"])
        lines.append(
            f"\nReading took PACE {ratio:.3f} times what it took H2O, turn about on the same machine."
        )
    return lines


def _ranges(numbers: Iterable[int]) -> str:
    """`0-4, 7` for 0, 1, 2, 3, 4, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _other(path: Path, found: Mapping[str, Any]) -> str:
    config = found.get("config") or {}
    lines = [f"### `{path.with_suffix('').as_posix()}`\n", f"{_config(config)}. {_machine(found)}\n"]
    values = found.get("result", {})
    arms = values.get("arms") if isinstance(values, dict) else None
    if isinstance(arms, dict) and arms and all(isinstance(arm, dict) for arm in arms.values()):
        columns = list(dict.fromkeys(key for arm in arms.values() for key in arm))
        lines += [f"| arm | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | {' | '.join(_value(arm.get(key, '')) for key in columns)} |"
            for name, arm in arms.items()
        ]
    else:
        lines += ["| what | value |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in _flat(values)]
    return "\n".join([*lines, ""])


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(prefix, _value(value))]
    return [
        row
        for key, inner in value.items()
        for row in _flat(inner, f"{prefix}, {key}" if prefix else str(key))
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    text = text if len(text) <= 120 else text[:117] + "..."
    return text.replace("|", "\\|").replace("\n", " ")
