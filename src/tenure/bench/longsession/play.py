"""Plays one session under several arms: as one batch, or turn about for times that can be told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tenure.bench.longsession.arms import Arm
from tenure.bench.longsession.checkpoint import Checkpoint
from tenure.bench.longsession.score import Answer, State, measure
from tenure.bench.longsession.task import Probe, Task
from tenure.bench.longsession.truncate import newest
from tenure.config import SessionConfig
from tenure.errors import TenureError
from tenure.plan import Plan, Step
from tenure.planners.keys import KeyArchive
from tenure.sampling import SamplingOptions
from tenure.tiers.archive import SpanArchive
from tenure.tiers.spec import TierSpec
from tenure.tiers.stack import TierStack
from tenure.timing import now

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
        self.tiers: TierStack | None = None
        if self.arm.host:
            # Given here: one that planners make for themselves is smaller on a machine with less free memory.
            host = TierSpec(kind="host", capacity=self.arm.host)
            self.tiers = TierStack([host], self.engine.fingerprint.digest)
        self.session: Session = self.engine.session(
            self.config,
            plan=_told(self.arm, self.plan),
            archive=None if self.tiers is None else SpanArchive(self.tiers),
        )
        messages = [message for turn in self.task.turns for message in turn]
        self._ids = {
            message.span: message.span if self.arm.named else f"message-{number}"
            for number, message in enumerate(messages, 1)
            if message.span is not None
        }
        self.answers: list[Answer] = []
        self.turn_s: list[float] = []
        self.answer_s = 0.0
        self.kv_bytes = 0
        self.archive_bytes = 0
        self.archive_lost = 0

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

    def state(self, asked: Session, probe: Probe) -> State:
        """Where the spans of a probe are, with the task's names. ``asked`` is a session of :meth:`ask` that was read."""
        found = measure(asked, {self._ids[span]: self.task.sizes[span] for span in probe.reads})
        proposed = found.proposed
        if self.arm.told in ("steps", "text"):  # what its steps read, a planner has found
            proposed += asked.plan[probe.name].spans
        names = {span: name for name, span in self._ids.items()}
        return found._replace(proposed=tuple(dict.fromkeys(names.get(span, span) for span in proposed)))

    def weigh(self) -> None:
        """Note what the arm keeps beside its slab, and what of it did not fit. Call it before any fork adds to it."""
        if self.tiers is not None:
            archive = self.session.memory.archive
            keys = archive.keys.values() if isinstance(archive, KeyArchive) else ()
            self.archive_bytes = self.tiers.host.nbytes + sum(key.nbytes for key in keys)
            self.archive_lost = self.tiers.counters.to_json().get("lost", 0)

    def _told(self, messages: Sequence[Message]) -> list[Message]:
        told = [
            message if message.span is None else replace(message, span=self._ids[message.span])
            for message in messages
        ]
        if self.arm.told != "nothing":
            return told
        return [replace(message, step=None, reads=()) for message in told]


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
            try:
                checkpoint.save(players, number + 1)
            except (TenureError, OSError) as error:  # a full disk; hours may have been played
                note(f"no checkpoint: {error}")
        note(f"turn {number + 1:,} of {turns:,}, {max(len(player.session) for player in players):,} tokens")
    for player in players:
        player.weigh()
    for group in groups:
        for batch in _batches(group):
            note(f"{len(batch)} answers")
            _answer(batch)
        for player in group:
            if player.arm.kind != "text":
                player.kv_bytes = player.session.stats().kv_bytes


def _read(group: Sequence[Player], number: int) -> None:
    engine = group[0].engine
    device = engine.layout.device
    started = now(device)
    reading = [player for player in group if player.read(number)]
    if reading:
        engine.drain([player.session for player in reading])
        seconds = now(device) - started
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
    engine = batch[0][0].engine
    device = engine.layout.device
    started = now(device)
    forks = [player.ask(probe) for player, probe in batch]
    turns: list[Turn] = []
    try:
        engine.drain(forks)
        states = [player.state(fork, probe) for fork, (player, probe) in zip(forks, batch, strict=True)]
        for fork, (_, probe) in zip(forks, batch, strict=True):
            turns.append(fork.start_turn(SamplingOptions(max_tokens=probe.max_tokens)))
        while waiting := [turn.session for turn in turns if not turn.done]:
            engine.step(waiting)
    finally:
        for turn in turns:
            turn.close()
        for fork in forks:
            fork.close()
    seconds = now(device) - started
    for turn, state, (player, probe) in zip(turns, states, batch, strict=True):
        player.answers.append(
            Answer.score(probe, player.task, turn.text, state, len(turn.ids), str(turn.reason))
        )
        if player.arm.kind == "text":
            player.kv_bytes = max(player.kv_bytes, state.kv_bytes)
    for player in {id(player): player for player, _ in batch}.values():
        player.answer_s += seconds
