"""``tenure demo``: one coding session under three settings, and what each still knows at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tenure.commands.options import ModelOptions, load_engine
from tenure.config import SessionConfig

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.session import Session
    from tenure.sessionfile import Probe, SessionFile

ARMS: dict[str, dict[str, str]] = {
    "h2o": {"policy": "h2o", "positions": "logical"},
    "foresight": {"policy": "foresight", "positions": "logical"},
    "pace": {"policy": "foresight", "positions": "bounded"},
}
"""What is compared: scores alone, the plan's retention, and both halves of PACE."""

_ABOUT = {
    "h2o": "attention scores decide",
    "foresight": "the plan decides",
    "pace": "the plan decides, positions stay bounded",
    "full": "keeps everything",
}


@dataclass
class Arm:
    """One setting and what came of it."""

    name: str
    session: Session
    answers: list[str]
    found: list[bool]
    residency: list[float]
    gaps: list[float]
    answered: int = 0

    def to_json(self, seconds: float) -> dict[str, Any]:
        """The values of the demo's last line; ``seconds`` are the batch's, which all arms share."""
        stats = self.session.stats()
        return {
            "facts_found": sum(self.found),
            "facts_total": len(self.found),
            "residency": round(sum(self.residency) / max(1, len(self.residency)), 4),
            "kv_bytes": stats.kv_bytes,
            "full_kv_bytes": stats.full_kv_bytes,
            "tokens": stats.tokens,
            "seconds": round(seconds, 2),
        }


def run(
    model: ModelOptions,
    *,
    budget: int,
    tokens: int,
    limit: int | None,
    chunk: int,
    seed: int,
    max_tokens: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Play the demo; see ``tenure demo --help``."""
    configs = {name: SessionConfig(budget=budget, chunk=chunk, limit=_limit(arm, limit), **arm) for name, arm in ARMS.items()}  # type: ignore[arg-type]
    if full:
        configs["full"] = SessionConfig(policy="full", budget=None, positions="logical", chunk=chunk)
    from tenure.bench.demo_session import build_demo

    engine = load_engine(model)
    file = build_demo(engine.tokenizer, tokens, seed)
    console = Console(stderr=True)
    if not as_json:
        _introduce(Console(), file, budget, tokens, model.model)
    with _bars(console) as bars:
        started = perf_counter()
        arms = [Arm(name, engine.session(config, plan=file.plan()), [], [], [], []) for name, config in configs.items()]
        _read(engine, arms, file, bars)
        reading = perf_counter() - started
        _ask(engine, arms, file.probes, bars, max_tokens)
    seconds = perf_counter() - started
    if not as_json:
        _show(arms, file.probes, reading, seconds)
    typer.echo(json.dumps({"arms": {arm.name: arm.to_json(seconds) for arm in arms}}))


def _limit(arm: dict[str, str], limit: int | None) -> int | None:
    return limit if arm["positions"] == "bounded" else None


def _read(engine: Engine, arms: list[Arm], file: SessionFile, bars: Progress) -> None:
    """The same messages in all arms, each step of the engine a chunk of every arm."""
    sessions = [arm.session for arm in arms]
    groups = _by_step(file)
    total, task = 0, bars.add_task(f"reading, {len(arms)} arms at once", total=None)
    for group in groups:
        for session in sessions:
            session.queue(group)
        total = max(total, sum(len(s) + s.memory.waiting for s in sessions))
        while engine.step(sessions):
            bars.update(task, completed=sum(map(len, sessions)), total=total)


def _by_step(file: SessionFile) -> list[list[Any]]:
    """Messages up to each change of step: what the plan says must hold while they are read."""
    groups: list[list[Any]] = [[]]
    step = None
    for message in file.messages:
        if message.step is not None and step not in (None, message.step):
            groups.append([])
        step = message.step or step
        groups[-1].append(message)
    return groups


def _ask(engine: Engine, arms: list[Arm], probes: list[Probe], bars: Progress, max_tokens: int | None) -> None:
    """Every probe in a fork of every arm, all of them in one batch."""
    from tenure.bench.demo_session import facts_found
    from tenure.commands.play import MAX_TOKENS, read_state
    from tenure.sampling import SamplingOptions

    asked = []
    for arm in arms:
        for probe in probes:
            fork = arm.session.fork()
            fork.queue(probe.message, reply=True)  # begins the probe's step in the fork's plan
            asked.append((arm, probe, fork))
    forks = [fork for _, _, fork in asked]
    limits = [max_tokens or probe.max_tokens or MAX_TOKENS for _, probe, _ in asked]
    task = bars.add_task(f"answering {len(asked)} questions at once", total=sum(limits))
    engine.drain(forks)
    for arm, probe, fork in asked:
        residency, gap = read_state(fork, probe.reads)
        arm.residency += [] if residency is None else [residency]
        arm.gaps += [] if gap is None else [gap]
    turns = [fork.start_turn(SamplingOptions(max_tokens=limit)) for fork, limit in zip(forks, limits, strict=True)]
    try:
        while open_turns := [turn for turn in turns if not turn.done]:
            engine.step([turn.session for turn in open_turns])
            bars.update(task, completed=sum(limit if t.done else len(t.ids) for t, limit in zip(turns, limits, strict=True)))
    finally:
        for turn in turns:
            turn.close()
    bars.update(task, completed=sum(limits))
    for (arm, probe, _), turn in zip(asked, turns, strict=True):
        arm.answers.append(turn.text.strip())
        arm.found += facts_found(turn.text, probe.expect)
        arm.answered += len(turn.ids)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )


def _introduce(console: Console, file: SessionFile, budget: int, tokens: int, model: str) -> None:
    console.print(
        f"[bold]{model}[/] reads {len(file.messages)} messages, about {tokens:,} tokens: three definitions, then source "
        f"files.\nThe cache keeps {budget:,} slots. Then it is asked {len(file.probes)} questions about the definitions.",
        highlight=False,
    )


def _show(arms: list[Arm], probes: list[Probe], reading: float, seconds: float) -> None:
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
        f"{seconds:,.0f} s for all arms: {tokens:,} tokens read in {reading:,.0f} s ({tokens / reading:,.0f}/s), "
        f"{answered:,} answered in {seconds - reading:,.0f} s ({answered / (seconds - reading):,.0f}/s).",
        highlight=False,
    )
