"""What ``tenure demo`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tenure.commands.demo import Arm
    from tenure.sessionfile import Probe, SessionFile

_ABOUT = {
    "h2o": "attention scores decide",
    "foresight": "the plan decides",
    "pace": "the plan decides, positions stay bounded",
    "full": "keeps everything",
}


_WIDE = 110
"""Columns from which answers fit side by side."""


def introduce(file: SessionFile, budget: int, tokens: int, model: str) -> None:
    """What is about to happen."""
    about = (
        f" reads {len(file.messages)} messages, about {tokens:,} tokens: three definitions, "
        f"then source files.\nThe cache keeps {budget:,} slots. At the end come {len(file.probes)} questions "
        "about the definitions."
    )
    Console(highlight=False).print(Text.assemble((model, "bold"), about))


def show(arms: list[Arm], probes: list[Probe], reading: float, seconds: float) -> None:
    """Every answer of every arm, then what each arm kept and cost."""
    console = Console(highlight=False)
    console.print(_side_by_side(arms, probes) if console.width >= _WIDE else _stacked(arms, probes))
    console.print(_sums(arms))
    tokens = sum(len(arm.session) for arm in arms)
    answered = sum(arm.answered for arm in arms)
    console.print(
        f"{seconds:,.0f} s for all arms: {tokens:,} tokens read in {reading:,.0f} s "
        f"({tokens / reading:,.0f}/s), {answered:,} answered in {seconds - reading:,.0f} s "
        f"({answered / (seconds - reading):,.0f}/s)."
    )


def _side_by_side(arms: list[Arm], probes: list[Probe]) -> Table:
    """A row for each question, a column for each arm."""
    table = Table(title="What each arm answers", show_lines=True, expand=True)
    table.add_column("question", ratio=1, overflow="fold")
    for arm in arms:
        table.add_column(f"{arm.name}\n[dim]{_ABOUT[arm.name]}[/]", ratio=1, overflow="fold")
    for number, probe in enumerate(probes):
        cells = [Text.assemble(_mark(arm, number), " ", _one_line(arm.answers[number])) for arm in arms]
        table.add_row(Text.assemble(probe.question, ("\n" + ", ".join(probe.expect), "bold")), *cells)
    return table


def _stacked(arms: list[Arm], probes: list[Probe]) -> Table:
    """The arms below each question, for narrow terminals."""
    table = Table(title="What each arm answers", box=None, show_header=False, expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for number, probe in enumerate(probes):
        table.add_row("", "", Text.assemble("\n" + probe.question, (f"  {', '.join(probe.expect)}", "bold")))
        for arm in arms:
            table.add_row(arm.name, _mark(arm, number), Text(_one_line(arm.answers[number])))
    return table


def _mark(arm: Arm, number: int) -> Text:
    found = arm.found[number]
    if all(found):
        return Text("found", style="bold green")
    return Text(f"{sum(found)} of {len(found)}" if any(found) else "lost", style="bold red")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _sums(arms: list[Arm]) -> Table:
    table = Table("arm", title="\nWhat each arm kept")
    for name in ("facts found", "needed, resident", "rotary gap", "cache", "all keys, values", "share"):
        table.add_column(name, justify="right")
    for arm in arms:
        stats = arm.session.stats()
        table.add_row(
            arm.name,
            "{} of {}".format(*arm.facts),
            f"{arm.resident:.0%}",
            f"{sum(arm.gaps) / len(arm.gaps):,.0f}" if arm.gaps else "-",
            f"{stats.kv_bytes / 1e6:,.1f} MB",
            f"{stats.full_kv_bytes / 1e6:,.1f} MB",
            f"{stats.kv_bytes / stats.full_kv_bytes:.0%}",
        )
    return table
