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


def introduce(file: SessionFile, budget: int, tokens: int, model: str) -> None:
    """What is about to happen."""
    Console(highlight=False).print(
        f"[bold]{model}[/] reads {len(file.messages)} messages, about {tokens:,} tokens: three definitions, "
        f"then source files.\nThe cache keeps {budget:,} slots. At the end come {len(file.probes)} questions "
        "about the definitions."
    )


def show(arms: list[Arm], probes: list[Probe], reading: float, seconds: float) -> None:
    """Answers side by side, then what each arm kept and cost."""
    console = Console()
    table = Table("question", "expected", title="What each arm answers", show_lines=True)
    for arm in arms:
        table.add_column(f"{arm.name}\n[dim]{_ABOUT[arm.name]}[/]", ratio=1)
    place = 0
    for number, probe in enumerate(probes):
        cells = []
        for arm in arms:
            found = arm.found[place : place + len(probe.expect)]
            mark, style = ("found", "green") if all(found) else ("lost", "red")
            cells.append(Text.assemble((f"{mark}: ", f"bold {style}"), " ".join(arm.answers[number].split())))
        table.add_row(probe.question, ", ".join(probe.expect), *cells)
        place += len(probe.expect)
    console.print(table)

    sums = Table("arm", title="What it costs")
    for name in ("facts", "resident of what is asked", "rotary gap", "cache", "all keys and values", "share"):
        sums.add_column(name, justify="right")
    for arm in arms:
        stats = arm.session.stats()
        sums.add_row(
            arm.name,
            f"{sum(arm.found)} of {len(arm.found)}",
            f"{sum(arm.residency) / max(1, len(arm.residency)):.0%}",
            f"{sum(arm.gaps) / len(arm.gaps):,.0f}" if arm.gaps else "-",
            f"{stats.kv_bytes / 1e6:,.1f} MB",
            f"{stats.full_kv_bytes / 1e6:,.1f} MB",
            f"{stats.kv_bytes / stats.full_kv_bytes:.0%}",
        )
    console.print(sums)
    tokens = sum(len(arm.session) for arm in arms)
    answered = sum(arm.answered for arm in arms)
    console.print(
        f"{seconds:,.0f} s for all arms: {tokens:,} tokens read in {reading:,.0f} s "
        f"({tokens / reading:,.0f}/s), {answered:,} answered in {seconds - reading:,.0f} s "
        f"({answered / (seconds - reading):,.0f}/s).",
        highlight=False,
    )
