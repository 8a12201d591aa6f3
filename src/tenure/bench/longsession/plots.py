"""Plots of the long sessions, in the manner of the paper's: each only where there is data for it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.bench.longsession.series import (
    Lines,
    Result,
    Stored,
    by_distance,
    by_gap,
    by_length,
    by_noise,
    interval,
    model_of,
    of_edges,
    time_by_length,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SQUARE = ("h2o", "foresight", "bounded", "pace")
_COLOURS = {
    "none": "#555555",
    "h2o": "#c44e52",
    "foresight": "#dd8452",
    "bounded": "#4c72b0",
    "pace": "#2f7d4f",
}
_OTHERS = ("#8172b3", "#937860", "#da8bc3", "#b8a13a", "#64b5cd", "#8c8c8c", "#a05d9f", "#3c3c7a")
Draw = Callable[["Axes"], None]


def draw(results: Sequence[Result], stored: Stored, folder: Path) -> dict[str, Path]:
    """Draw what the data allows, as PNG.

    Args:
        results: summaries of runs.
        stored: their sessions.
        folder: for the pictures; made where it is missing.

    Returns:
        The files that were written, by the title of the plot.
    """
    wanted: dict[str, tuple[str, Draw]] = {}
    for result in results:
        config = result["config"]
        if set(SQUARE) <= set(result["arms"]) and config["noise"] == "none" and config["distance"] is None:
            title = f"Foresight and bounded positions, {model_of(result)}, {_words(result)}"
            wanted[title] = (f"ablation-{slug(result['name'])}", partial(_ablation, result))
    for model in dict.fromkeys(model_of(result) for result in results):
        mine = [result for result in results if model_of(result) == model]
        sessions = [found for found in stored if model_of(found) == model]
        name = slug(model.rstrip("/").rsplit("/", 1)[-1])
        share: dict[str, Any] = {"ylabel": "checks passed", "share": True}
        tokens, seconds = {"xlabel": "tokens"}, {"ylabel": "seconds a turn"}
        recall: dict[str, Any] = {"ylabel": "recall", "share": True}
        plots: list[tuple[str, str, Lines, dict[str, Any]]] = [
            (
                "By distance",
                "distance",
                by_distance(mine),
                {"xlabel": "tokens since the definitions", **share},
            ),
            ("By rotary gap", "gap", by_gap(sessions), {"xlabel": "mean rotary gap", **share}),
            ("By length", "length", by_length(mine, "checks"), {**tokens, **share}),
            ("Recall by length", "recall", by_length(mine, "recall"), {**tokens, **recall}),
            ("Time by length", "time", time_by_length(mine), {**tokens, **seconds}),
        ]
        for kind in sorted({str(r["config"]["noise"]) for r in mine if not of_edges(r)} - {"none"}):
            noisy: dict[str, Any] = {"xlabel": f"share of definitions, {kind}", "linear": True, **recall}
            plots.append((f"Plan noise, {kind}", f"noise-{kind}", by_noise(mine, kind), noisy))
        for title, file, lines, options in plots:
            kept = {arm: points for arm, points in lines.items() if len({point.x for point in points}) > 1}
            if kept:
                wanted[f"{title}, {model}"] = (f"{file}-{name}", partial(_line_plot, kept, **options))
    return {title: _save(folder / f"{file}.png", title, plot) for title, (file, plot) in wanted.items()}


def slug(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()


def _words(result: Result) -> str:
    count = len(result["seeds"])
    return f"{result['config']['tokens']:,} tokens, {count} session{'' if count == 1 else 's'}"


def colour(name: str, names: Sequence[str]) -> str:
    """The colour of an arm: its own, or the next free one in the order of ``names``."""
    rest = [other for other in names if other not in _COLOURS]
    return _COLOURS.get(name) or _OTHERS[rest.index(name) % len(_OTHERS)]


def _ablation(result: Result, axes: Axes) -> None:
    arms: Mapping[str, Any] = result["arms"]
    for place, name in enumerate(SQUARE):
        arm = arms[name]
        share = arm["checks_passed"] / arm["checks_total"]
        low, high = interval(arm)
        error = [[max(0.0, share - low)], [max(0.0, high - share)]]
        axes.bar(place, share, 0.7, color=_COLOURS[name], yerr=error, capsize=4, ecolor="#333333")
        # Beside the bar's foot where the bar is too short for it: the error bar stands in the middle.
        at, side, colour = (
            ((place, 0.02), "center", "white") if share > 0.1 else ((place + 0.06, 0.02), "left", "black")
        )
        axes.annotate(f"{share:.0%}", at, ha=side, color=colour, fontweight="bold")
    if "none" in arms:
        control = arms["none"]["checks_passed"] / arms["none"]["checks_total"]
        axes.axhline(control, color=_COLOURS["none"], linestyle="--", linewidth=1)
        label = f"no eviction, 8K: {control:.0%}"
        axes.annotate(label, (-0.42, control), va="bottom", color=_COLOURS["none"])
    words = ("neither\n(H2O)", "foresight", "bounded\npositions", "both\n(PACE)")
    axes.set_xticks(range(len(SQUARE)), words)
    _shares(axes, "checks passed")


def _line_plot(
    lines: Lines, axes: Axes, *, xlabel: str, ylabel: str, share: bool = False, linear: bool = False
) -> None:
    names = list(lines)
    for name, points in lines.items():
        x, y = [point.x for point in points], [point.y for point in points]
        tone = colour(name, names)
        axes.plot(x, y, color=tone, label=name, marker="o" if len(x) < 20 else None, markersize=4)
        known = [point for point in points if point.low is not None and point.high is not None]
        if known:
            low, high = [p.low or 0.0 for p in known], [p.high or 0.0 for p in known]
            axes.fill_between([p.x for p in known], low, high, color=tone, alpha=0.12, linewidth=0)
    if not linear:
        from matplotlib.ticker import FixedLocator, NullLocator

        measured = sorted({point.x for points in lines.values() for point in points})
        axes.set_xscale("log")
        if len(measured) < 12:
            ticks = [x for x, last in zip(measured, [0.0, *measured], strict=False) if x > 1.25 * last]
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: _tokens(value))
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if share:
        _shares(axes, ylabel)
    else:
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)


def _tokens(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}K" if value >= 1e3 else f"{value:.3g}"


def _shares(axes: Axes, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(label)


def _save(path: Path, title: str, plot: Draw) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window system, no global state.
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title, 70), fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    plot(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path
