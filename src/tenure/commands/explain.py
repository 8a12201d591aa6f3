"""``tenure explain``: where each span of a session is, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from tenure import sessionfile
from tenure.commands.explain_regions import draw, timeline_table
from tenure.commands.options import MemoryOptions, ModelOptions, load_engine
from tenure.commands.places import check_plot, writing
from tenure.commands.view import RunView
from tenure.errors import PlanError
from tenure.report import REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Group

    from tenure.report import SpanReport


def run(
    path: Path,
    model: ModelOptions,
    memory: MemoryOptions,
    *,
    span: str | None,
    upto: str | None,
    as_json: bool,
    timeline: bool = False,
    plot: Path | None = None,
) -> None:
    """Play the file without asking its probes, and print a row for each span."""
    file = sessionfile.load(path)
    config = memory.session_config()
    if upto is not None and upto not in file.plan():
        steps = ", ".join(step.id for step in file.plan().steps) or "none"
        raise PlanError(f"the file has no step {upto!r}", option="upto", way_out=f"Its steps: {steps}")
    check_plot(plot)
    from rich.console import Console
    from rich.text import Text

    from tenure.commands.play import Player

    engine = load_engine(model, memory.config)
    with RunView(f"{path.name}: {model.model}, {config.policy}", quiet=as_json) as view:
        player = Player(engine, file, config, tick=lambda: view.tick(player))
        for _ in player.play(upto=upto, ask=False):
            pass
    session = player.session
    reports = [
        session.explain(name)
        for name in ([span] if span else [one.id for one in session.memory.ledger.spans])
    ]
    pages = session.evictions()
    points = session.memory.evictions.timeline(session.memory)
    if as_json:
        stats = session.stats().to_json()
        typer.echo(
            json.dumps(
                {
                    "model": model.model,
                    "spans": [one.to_json() for one in reports],
                    "stats": stats,
                    "evictions": [one.to_json() for one in pages],
                    "timeline": [{"tokens": at, "slots": slots} for at, slots in points],
                }
            )
        )
    else:
        console = Console()
        console.print(spans_table(reports))
        if timeline:
            console.print()
            console.print(timeline_table(points, pages))
        if span:
            console.print(Text(reports[0].text))
            layers = " ".join(f"{share:.0%}" for share in reports[0].resident_by_layer)
            console.print(f"resident by layer: {layers}", style="dim", highlight=False)
    if plot is not None:
        with writing("plot"):
            draw(points, pages, plot)


def spans_table(reports: Sequence[SpanReport]) -> Group:
    """A row for each span, and below what the reasons mean."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("span", overflow="fold")
    table.add_column("region", overflow="fold")
    squeezed = any(one.compressed for one in reports)
    for name in ("tokens", "resident", *(["compressed"] if squeezed else []), "positions", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("read by", overflow="fold")
    table.add_column("lost to", overflow="fold")
    for one in reports:
        # Losses are counted in every layer that keeps its own set.
        slots = max(1, one.tokens * len(one.resident_by_layer))
        lost = (f"{reason} {count / slots:.0%}" for reason, count in one.evicted.items())
        more = f" +{len(one.readers) - 1}" if len(one.readers) > 1 else ""
        table.add_row(
            Text(one.id),  # names are a user's: as plain strings, brackets in them would be markup
            Text(one.region + (f" ({one.pin} pin)" if one.pin else "")),
            f"{one.tokens:,}",
            f"{one.resident:.0%}",
            *([f"{one.compressed:,.1f}"] if squeezed else []),
            "-" if one.positions is None else "{:,}-{:,}".format(*one.positions),
            "-" if one.rotary_gap is None else f"{one.rotary_gap:,.0f}",
            Text(one.readers[0] + more if one.readers else "-"),
            ", ".join(lost) or "-",
            style="dim" if one.resident == 0 and not one.compressed else "",
        )
    met = [reason for reason in REASONS if any(reason in one.evicted for one in reports)]
    legend = [Text(f"{reason:<10} {REASONS[reason]}", style="dim") for reason in met]
    return Group(table, *([Text(), *legend] if legend else []))
