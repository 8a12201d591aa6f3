"""Plays one session under several arms: as one batch, or turn about for times that can be told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from tenure.bench.longsession.arms import Arm
from tenure.bench.longsession.checkpoint import Checkpoint
from tenure.bench.longsession.score import Answer, measure
from tenure.bench.longsession.task import Probe, Task
from tenure.bench.longsession.truncate import newest
from tenure.config import SessionConfig
from tenure.plan import Plan, Step
from tenure.sampling import SamplingOptions

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.messages import Message
    from tenure.session import Session
    from tenure.turn import Turn

FORK_BYTES = 3 << 30
"""Memory for the forks in which probes are answered at once."""


@dataclass
class Player:
    """One arm of one session.

    Args:
        arm: the setting.
        task: what it plays; the control's is shorter than the others'.
        config: of its session.
        plan: what it is told of the plan; ignored by arms without one.
        budget: tokens of the truncated text.
    """

    engine: Engine
    arm: Arm
    task: Task
    config: SessionConfig
    plan: Plan
    budget: int

    def __post_init__(self) -> None:
        self.session: Session = self.engine.session(self.config, plan=_told(self.arm, self.plan))
        self.answers: list[Answer] = []
        self.turn_s: list[float] = []
        self.answer_s = 0.0
        self.kv_bytes = 0

    def read(self, number: int) -> bool:
        """Queue a turn; False where this arm has nothing to read."""
        if self.arm.kind == "text" or number >= len(self.task.turns):
            return False
        turn = self._told(self.task.turns[number])
        if self.arm.told == "text" and number == self.task.first("survey"):
            written = f"My plan: <plan>{json.dumps(self.plan.to_json()['steps'])}</plan>\n"
            turn[0] = replace(turn[0], content=written + turn[0].content)
        self.session.queue(turn)
        return True

    def ask(self, probe: Probe) -> Session:
        """A session with the probe queued. It is freed with the session it was forked from."""
        if self.arm.kind == "text":
            tokenizer = self.engine.tokenizer
            fresh = self.engine.session(self.config, plan=Plan())
            fresh.queue(
                self._told(newest(tokenizer, self.task.turns, probe.message, self.budget)), reply=True
            )
            return fresh
        fork = self.session.fork()
        fork.queue(self._told([probe.message]), reply=True)
        return fork

    def _told(self, messages: Sequence[Message]) -> list[Message]:
        if self.arm.told != "nothing":
            return list(messages)
        return [replace(message, step=None, reads=()) for message in messages]


def _told(arm: Arm, plan: Plan) -> Plan:
    if arm.told == "plan":
        return plan.copy()
    return Plan(Step(step.id) for step in plan.steps) if arm.told == "steps" else Plan()


def play(
    players: Sequence[Player],
    note: Callable[[str], None],
    *,
    separate: bool,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Read all turns, then answer all probes.

    Args:
        players: arms of one session.
        note: told of the progress.
        separate: run each arm by itself, turn about, so that a slow minute of the machine hits all of them; else all
            arms share every forward, and with it the time.
        checkpoint: where to begin, and to save now and then; None does neither.
    """
    first = 0 if checkpoint is None else checkpoint.load(players)
    groups = [[player] for player in players] if separate else [list(players)]
    turns = max(len(player.task.turns) for player in players)
    for number in range(first, turns):
        turned = groups[number % len(groups) :] + groups[: number % len(groups)]
        for group in turned:
            _read(group, number)
        if checkpoint is not None and checkpoint.due(players):
            checkpoint.save(players, number + 1)
        note(f"turn {number + 1:,} of {turns:,}, {max(len(player.session) for player in players):,} tokens")
    for group in groups:
        for batch in _batches(group):
            note(f"{len(batch)} answers")
            _answer(batch)
        for player in group:
            if player.arm.kind != "text":
                player.kv_bytes = player.session.stats().kv_bytes


def _read(group: Sequence[Player], number: int) -> None:
    started = perf_counter()
    reading = [player for player in group if player.read(number)]
    if reading:
        reading[0].engine.drain([player.session for player in reading])
        seconds = perf_counter() - started
        for player in reading:
            player.turn_s.append(seconds)


def _batches(group: Sequence[Player]) -> Iterator[list[tuple[Player, Probe]]]:
    """Probes of all arms, as many at once as a few GB of forks allow."""
    each = max(player.session.memory.rows.nbytes for player in group)
    pairs = [(player, probe) for player in group for probe in player.task.probes]
    size = max(1, FORK_BYTES // max(1, each))
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _answer(batch: Sequence[tuple[Player, Probe]]) -> None:
    started = perf_counter()
    engine = batch[0][0].engine
    forks = [player.ask(probe) for player, probe in batch]
    turns: list[Turn] = []
    try:
        engine.drain(forks)
        states = [
            measure(fork, probe.reads, player.task.sizes)
            for fork, (player, probe) in zip(forks, batch, strict=True)
        ]
        for fork, (_, probe) in zip(forks, batch, strict=True):
            turns.append(fork.start_turn(SamplingOptions(max_tokens=probe.max_tokens)))
        while waiting := [turn.session for turn in turns if not turn.done]:
            engine.step(waiting)
    finally:
        for turn in turns:
            turn.close()
        for fork in forks:
            fork.close()
    seconds = perf_counter() - started
    for turn, state, (player, probe) in zip(turns, states, batch, strict=True):
        player.answers.append(
            Answer.score(probe, player.task, turn.text, state, len(turn.ids), str(turn.reason))
        )
        if player.arm.kind == "text":
            player.kv_bytes = max(player.kv_bytes, state.kv_bytes)
    for player in {id(player): player for player, _ in batch}.values():
        player.answer_s += seconds
