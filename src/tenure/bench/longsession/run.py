"""A run: several sessions under several arms, stored one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tenure.bench.longsession.arms import Arm
from tenure.bench.longsession.noise import disturb
from tenure.bench.longsession.play import Player, play
from tenure.bench.longsession.store import Store
from tenure.bench.longsession.summary import summarise
from tenure.bench.longsession.task import VERSION, Task, build

if TYPE_CHECKING:
    from tenure.engine import Engine

CONTROL = 7500
"""Tokens of the control's session, so that with probe and answer it stays below 8K."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all sessions of a run share.

    Args:
        model: by name.
        tokens: length of a session before its probes.
        distance: tokens between the last definition and the probes; None puts the definitions first.
        budget: slots of a session; tokens of the truncated text.
        limit: of bounded positions.
        chunk: tokens a forward.
        dtype: of weights and cache.
        weights: ``auto`` or ``int8``.
        device: a torch device.
        noise: what is wrong with the plan.
        noise_rate: with which share of its edges.
    """

    model: str
    tokens: int
    distance: int | None = None
    budget: int = 2048
    limit: int | None = 8192
    chunk: int = 2048
    dtype: str = "auto"
    weights: str = "auto"
    device: str = "cpu"
    noise: str = "none"
    noise_rate: float = 0.0

    @property
    def config(self) -> dict[str, Any]:
        """Plain values for result files."""
        return {"task_version": VERSION, **asdict(self)}

    @property
    def name(self) -> str:
        """A name for the run's folder."""
        model = self.model.rstrip("/").rsplit("/", 1)[-1]
        at = "" if self.distance is None else f"-d{self.distance}"
        noise = "" if self.noise == "none" else f"-{self.noise}{self.noise_rate:g}"
        return f"{model}-{self.tokens}{at}-b{self.budget}{noise}"


def run(
    engine: Engine,
    settings: Settings,
    store: Store,
    *,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    resume: bool,
    separate: bool,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Play the sessions that are missing and sum up all that is stored.

    Args:
        engine: the model.
        settings: of the run.
        store: where sessions go.
        arms: which to play.
        seeds: of the sessions.
        resume: pass over what is stored already.
        separate: see :func:`~tenure.bench.longsession.play.play`.
        note: told of the progress.
    """
    for count, seed in enumerate(seeds, 1):
        done = store.done(seed) if resume else set()
        left = [arm for arm in arms if arm.name not in done]
        if left:

            def tell(text: str, seed: int = seed, count: int = count) -> None:
                note(f"session {count} of {len(seeds)} (seed {seed}): {text}")

            tell("building")
            store.write(seed, _session(engine, settings, left, seed, tell, separate), separate=separate)
    return summarise(store.load())


def _session(
    engine: Engine,
    settings: Settings,
    arms: Sequence[Arm],
    seed: int,
    note: Callable[[str], None],
    separate: bool,
) -> dict[str, Any]:
    tokenizer = engine.tokenizer
    task = build(tokenizer, tokens=settings.tokens, distance=settings.distance, seed=seed)
    players = []
    for arm in arms:
        played = task
        if arm.kind == "control" and task.tokens > CONTROL:
            near = (
                None
                if settings.distance is None
                else min(settings.distance, CONTROL - sum(task.sizes.values()) - 500)
            )
            played = build(tokenizer, tokens=CONTROL, distance=near, seed=seed)
        config = arm.config(budget=settings.budget, chunk=settings.chunk, limit=settings.limit, seed=seed)
        players.append(Player(engine, arm, played, config, told_plan(task, settings), settings.budget))
    play(players, note, separate=separate)
    return {player.arm.name: _result(player, 1 if separate else len(players)) for player in players}


def told_plan(task: Task, settings: Settings) -> Any:
    """The plan that planned arms are given: the right one, or one with noise."""
    rng = random.Random(f"noise {settings.noise} {task.seed}")
    # Spans of filler have the names that sessions give to unnamed messages.
    unneeded = [f"tool-{number}" for number in range(1, max(2, len(task.turns)))]
    return disturb(task.plan(), settings.noise, settings.noise_rate, rng, unneeded)


def _result(player: Player, shared: int) -> dict[str, Any]:
    stats = player.session.stats()
    read = sum(player.turn_s)
    return {
        "about": player.arm.about,
        "tokens": player.task.tokens,
        "kv_bytes": player.kv_bytes,
        "wall_s": round(read + player.answer_s, 3),
        "answer_s": round(player.answer_s, 3),
        "turn_s": [round(seconds, 4) for seconds in player.turn_s],
        "time_shared_by": shared,
        "renumbers": stats.renumbers,
        "resident": stats.resident,
        "answers": [answer.to_json() for answer in player.answers],
    }
