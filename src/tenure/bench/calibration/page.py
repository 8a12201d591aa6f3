"""Results of ``tenure calibrate`` on the page of ``tenure bench report``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenure.bench.calibration.survival import LIMITS

Found = Mapping[str, Any]

PICTURE, TITLE, CAPTION = "half-lives", "Half-lives", "Half-lives by region"
"""Of the picture: how its file's name begins, its title, and what it shows."""


def heading(stem: str, found: Found) -> str:
    """Over the section of a file of this name."""
    return f"Attention lifetimes, {stem}"


def section(found: Found) -> str:
    """The half-lives of one calibration as a table, in Markdown."""
    most = LIMITS[found["config"]["clock"]][1]
    lines = ["| region | half-life | 95 % | tokens | ended | from |", "|---" * 6 + "|"]
    for name, one in (*found["regions"].items(), ("all", found["all"])):
        value = f"over {most:,.0f}" if one["half_life"] >= most else f"{one['half_life']:,.1f}"
        span = "" if one["low"] >= most else f"{one['low']:,.1f} to {one['high']:,.1f}"
        ended = f"{one['deaths'] / max(1, one['n']):.0%}"
        lines.append(f"| {name} | {value} | {span} | {one['n']:,} | {ended} | {one['method']} |")
    return "\n".join([*lines, ""])


def draw(found: Found, path: Path) -> None:
    """The half-lives with their intervals as a picture."""
    from matplotlib.figure import Figure

    clock = found["config"]["clock"]
    rows = sorted(found["regions"].items(), key=lambda row: row[1]["half_life"])
    figure = Figure(figsize=(7, 0.8 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, one) in enumerate(rows):
        value = one["half_life"]
        ends = [[value - min(one["low"], value)], [max(one["high"], value) - value]]
        beyond = value >= LIMITS[clock][1]
        axes.errorbar([value], [place], xerr=None if beyond else ends, fmt=">" if beyond else "o", color="C0")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xlabel(f"half-life in {clock}; an arrow: longer than can be told")
    axes.set_title(f"attention lifetimes, {found['config']['model']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
