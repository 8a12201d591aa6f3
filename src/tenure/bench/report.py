"""``tenure bench report``: what lies in ``results/`` as one page with tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenure.bench import regions_page as regions
from tenure.bench.calibration import page as calibration
from tenure.bench.longsession.page import length_table, planner_table, pooled_tables, run_section
from tenure.bench.longsession.plots import draw
from tenure.bench.longsession.series import Result
from tenure.bench.peers import page as peers
from tenure.bench.ruler import page as ruler
from tenure.errors import ConfigError

_HEAD = """# Results

Made from the files in `results/` by `tenure bench report`; do not edit by hand. Every number was measured by the
commit and on the machine that are named beside it.
"""


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
        if found["bench"] == "ruler" and not ruler.is_summary(found):
            continue  # a single prompt
        if found["bench"] == "regions" and not (regions.is_summary(found) or "pooled" in found):
            continue  # a single transcript
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
        tables = (pooled_tables(sessions), length_table(runs), planner_table(runs))
        text += [table for table in tables if table]
        text += [run_section(run, _machine(run), _config(run["config"])) for run in runs]
    models = ruler.by_model(found for _, found in others if found["bench"] == "ruler")
    if models:
        drawn = ruler.draw(models, images)
        pictures |= drawn
        text.append("## RULER under compression\n")
        text += [f"![{title}]({_link(picture, page)})\n" for title, picture in drawn.items()]
        text += [f"`{path.stem}`: {_machine(found)}\n" for path, found in others if found["bench"] == "ruler"]
        text.append(ruler.section(models))
    settings = [
        (path, found) for path, found in others if found["bench"] == "regions" and regions.is_summary(found)
    ]
    if settings:
        drawn = regions.draw(results / settings[0][0].parent, [found for _, found in settings], images)
        pictures |= drawn
        pooled = next(
            (found for _, found in others if found["bench"] == "regions" and "pooled" in found), None
        )
        text.append("## Facts by region\n")
        text += [f"![{title}]({_link(picture, page)})\n" for title, picture in drawn.items()]
        text.append(regions.section([found for _, found in settings], pooled, _machine))
    alone = {"calibration": calibration, "peers": peers}  # a picture and a section for each file
    for path, found in others:
        if (part := alone.get(found["bench"])) is not None:
            picture = images / f"{part.PICTURE}-{path.stem}.png"
            part.draw(found, picture)
            pictures[f"{part.TITLE}, {path.stem}"] = picture
            text += [
                f"## {part.heading(path.stem, found)}\n",
                f"{_config(found['config'])}. {_machine(found)}\n",
                f"![{part.CAPTION}]({_link(picture, page)})\n",
                part.section(found),
            ]
    shown = ("ruler", "regions", *alone)
    others = [(path, found) for path, found in others if found["bench"] not in shown]
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
