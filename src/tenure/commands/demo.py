"""``tenure demo``: one coding session under three settings, and what each still knows at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tenure.bench.demo_session import build_demo, facts_found
from tenure.commands.demo_tables import introduce, show
from tenure.commands.options import ModelOptions, load_engine
from tenure.commands.play import MAX_TOKENS, by_step, read_state
from tenure.config import SessionConfig
from tenure.sampling import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenure.engine import Engine
    from tenure.session import Session
    from tenure.sessionfile import Probe, SessionFile
    from tenure.turn import Turn

ARMS: dict[str, dict[str, Any]] = {
    "h2o": {"policy": "h2o", "positions": "logical"},
    "foresight": {"policy": "foresight", "positions": "logical"},
    "pace": {"policy": "foresight", "positions": "bounded"},
}
"""What is compared: scores alone, the plan's retention, and both halves of PACE."""

_FORK_BYTES = 3 << 30
"""Memory for the forks in which questions are asked at once."""


@dataclass
class Arm:
    """One setting and what came of it.

    Args:
        name: of the setting.
        session: it has read everything; questions are asked in forks.
        answers: in the order of the probes.
        found: for each probe, which of its facts the answer holds.
        residency: for each probe, the resident share of what it reads.
        gaps: rotary gaps of the same, where anything is left.
        answered: tokens of all answers.
    """

    name: str
    session: Session
    answers: list[str] = field(default_factory=list)
    found: list[list[bool]] = field(default_factory=list)
    residency: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    answered: int = 0

    @property
    def facts(self) -> tuple[int, int]:
        """Facts found, and facts asked for."""
        return sum(map(sum, self.found)), sum(map(len, self.found))

    @property
    def resident(self) -> float:
        """Mean resident share of what the probes read."""
        return sum(self.residency) / max(1, len(self.residency))

    def to_json(self, seconds: float) -> dict[str, Any]:
        """The values of the demo's last line; ``seconds`` are the batch's, which all arms share."""
        stats = self.session.stats()
        found, total = self.facts
        return {
            "facts_found": found,
            "facts_total": total,
            "residency": round(self.resident, 4),
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
    shared: dict[str, Any] = {"budget": budget, "chunk": chunk, "limit": limit}
    configs = {name: SessionConfig(**shared, **setting) for name, setting in ARMS.items()}
    if full:
        configs["full"] = SessionConfig(policy="full", budget=None, positions="logical", chunk=chunk)
    engine = load_engine(model)
    file = build_demo(engine.tokenizer, tokens, seed)
    console = Console(stderr=True)
    if not as_json:
        introduce(file, budget, tokens, model.model)
    with _bars(console) as bars:
        started = perf_counter()
        arms = [Arm(name, engine.session(config, plan=file.plan())) for name, config in configs.items()]
        _read(engine, arms, file, bars)
        reading = perf_counter() - started
        _ask(engine, arms, file.probes, bars, max_tokens)
    seconds = perf_counter() - started
    if not as_json:
        show(arms, file.probes, reading, seconds)
    typer.echo(json.dumps({"arms": {arm.name: arm.to_json(seconds) for arm in arms}}))


def _read(engine: Engine, arms: list[Arm], file: SessionFile, bars: Progress) -> None:
    """The same messages in all arms, each step of the engine a chunk of every arm."""
    sessions = [arm.session for arm in arms]
    total, task = 0, bars.add_task(f"reading, {len(arms)} arms at once", total=None)
    for group in by_step(file.messages):
        for session in sessions:
            session.queue(group)
        total = max(total, sum(len(s) + s.memory.waiting for s in sessions))
        while engine.step(sessions):
            bars.update(task, completed=sum(map(len, sessions)), total=total)


def _ask(
    engine: Engine, arms: list[Arm], probes: list[Probe], bars: Progress, max_tokens: int | None
) -> None:
    """Every probe in a fork of every arm; as many at once as a few GB of forks allow."""
    limits = [max_tokens or probe.max_tokens or MAX_TOKENS for probe in probes]
    asked = list(zip(probes, limits, strict=True))
    task = bars.add_task(f"answering {len(arms) * len(probes)} questions", total=len(arms) * sum(limits))
    at_once = max(1, _FORK_BYTES // sum(arm.session.memory.rows.nbytes for arm in arms))
    for start in range(0, len(probes), at_once):
        done = len(arms) * sum(limits[:start])
        _ask_some(engine, arms, asked[start : start + at_once], partial(_move, bars, task, done))


def _move(bars: Progress, task: TaskID, done: int, used: int) -> None:
    bars.update(task, completed=done + used)


def _ask_some(
    engine: Engine, arms: list[Arm], asked: list[tuple[Probe, int]], tell: Callable[[int], None]
) -> None:
    """One batch of forks, which is freed when this returns."""
    pairs = [(arm, probe, limit) for arm in arms for probe, limit in asked]
    forks = [_fork(arm, probe) for arm, probe, _ in pairs]
    engine.drain(forks)
    for (arm, probe, _), fork in zip(pairs, forks, strict=True):
        residency, gap = read_state(fork, probe.reads)
        arm.residency += [] if residency is None else [residency]
        arm.gaps += [] if gap is None else [gap]
    turns = [
        fork.start_turn(SamplingOptions(max_tokens=limit))
        for (*_, limit), fork in zip(pairs, forks, strict=True)
    ]
    try:
        while waiting := [turn.session for turn in turns if not turn.done]:
            engine.step(waiting)
            tell(sum(map(_used, turns)))
    finally:
        for turn in turns:
            turn.close()
    for (arm, probe, _), turn in zip(pairs, turns, strict=True):
        arm.answers.append(turn.text.strip())
        arm.found.append(facts_found(turn.text, probe.expect))
        arm.answered += len(turn.ids)


def _fork(arm: Arm, probe: Probe) -> Session:
    fork = arm.session.fork()
    fork.queue(probe.message, reply=True)  # the probe's step begins in the fork's plan only
    return fork


def _used(turn: Turn) -> int:
    """Tokens of an answer's limit that need not be waited for any more."""
    return turn.options.max_tokens if turn.done else len(turn.ids)


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
