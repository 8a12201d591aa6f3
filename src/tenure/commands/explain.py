"""``tenure explain``: where each span of a session is, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tenure import sessionfile
from tenure.commands.options import MemoryOptions, ModelOptions, load_engine
from tenure.commands.view import RunView
from tenure.errors import PlanError

if TYPE_CHECKING:
    from rich.table import Table

    from tenure.report import SpanReport

_REASONS = {
    "budget": "budget: others scored higher",
    "plan": "plan: nearer readers filled the budget",
    "expired": "expired: no step reads it any more",
    "rollback": "rollback: layers were cut to one length",
}


def run(
    path: Path, model: ModelOptions, memory: MemoryOptions, *, span: str | None, upto: str | None, as_json: bool
) -> None:
    """Play the file without asking its probes, and print a row for each span; see ``tenure explain --help``."""
    file = sessionfile.load(path)
    config = memory.session_config()
    if upto is not None and upto not in file.plan():
        steps = ", ".join(step.id for step in file.plan().steps) or "none"
        raise PlanError(f"the file has no step {upto!r}", option="upto", way_out=f"Its steps: {steps}")
    from rich.console import Console

    from tenure.commands.play import Player

    engine = load_engine(model, memory.config)
    with RunView(f"{path.name}: {model.model}, {config.policy}", quiet=as_json) as view:
        player = Player(engine, file, config, tick=lambda: view.tick(player))
        for _ in player.play(upto=upto, ask=False):
            pass
    session = player.session
    reports = [session.explain(name) for name in ([span] if span else [one.id for one in session.memory.ledger.spans])]
    if as_json:
        stats = session.stats().to_json()
        typer.echo(json.dumps({"model": model.model, "spans": [one.to_json() for one in reports], "stats": stats}))
        return
    console = Console()
    console.print(spans_table(reports))
    if span:
        console.print(reports[0].text, markup=False, highlight=False)
        layers = " ".join(f"{share:.0%}" for share in reports[0].resident_by_layer)
        console.print(f"resident by layer: {layers}", style="dim", highlight=False)


def spans_table(reports: Iterable[SpanReport]) -> Table:
    """A row for each span."""
    from rich.table import Table

    table = Table("span", "region", box=None, pad_edge=False)
    for name in ("tokens", "resident", "positions", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("read next by")
    table.add_column("lost to")
    for one in reports:
        style = "dim" if one.resident == 0 else ""
        table.add_row(
            one.id,
            one.region + (f", {one.pin} pin" if one.pin else ""),
            f"{one.tokens:,}",
            f"{one.resident:.0%}",
            "-" if one.positions is None else f"{one.positions[0]:,}-{one.positions[1]:,}",
            "-" if one.rotary_gap is None else f"{one.rotary_gap:,.0f}",
            ", ".join(one.readers[:3]) + (", ..." if len(one.readers) > 3 else "") or "-",
            "; ".join(_REASONS.get(reason, reason) for reason in one.evicted) or "-",
            style=style,
        )
    return table
