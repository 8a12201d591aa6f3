"""A run: several sessions under several arms, stored one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tenure.bench.longsession.arms import Arm
from tenure.bench.longsession.checkpoint import Checkpoint
from tenure.bench.longsession.play import Player, play
from tenure.bench.longsession.store import Store
from tenure.bench.longsession.summary import summarise
from tenure.bench.longsession.task import VERSION, Task, build
from tenure.errors import ConfigError
from tenure.plan import Plan
from tenure.planners.noise import KINDS, perturb

if TYPE_CHECKING:
    from tenure.engine import Engine

CONTROL = 7500
"""Tokens of the control's session, so that with probe and answer it stays below 8K."""

_GOLDEN = (math.sqrt(5) - 1) / 2


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
        noise: what is wrong with the plan: ``none``, a kind of :mod:`tenure.planners.noise`, or ``all`` of them.
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
        resume: pass over what is stored already, and go on from a checkpoint inside a session.
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
            checkpoint = Checkpoint(store.folder / f".checkpoint-{seed:04d}")
            if not resume:
                checkpoint.remove()
            players = _players(engine, settings, left, seed)
            play(players, tell, separate=separate, checkpoint=checkpoint)
            shared = 1 if separate else len(players)
            store.write(
                seed, {player.arm.name: _result(player, shared) for player in players}, separate=separate
            )
            checkpoint.remove()
    return summarise(store.load())


def _players(engine: Engine, settings: Settings, arms: Sequence[Arm], seed: int) -> list[Player]:
    tokenizer = engine.tokenizer
    task = build(tokenizer, tokens=settings.tokens, distance=settings.distance, seed=seed)
    players = []
    for arm in arms:
        played = task
        if arm.kind == "control" and task.tokens > CONTROL:
            played = build(tokenizer, tokens=CONTROL, seed=seed)
            if settings.distance is not None and settings.distance < played.distance:
                played = build(tokenizer, tokens=CONTROL, distance=settings.distance, seed=seed)
        config = arm.config(budget=settings.budget, chunk=settings.chunk, limit=settings.limit, seed=seed)
        players.append(Player(engine, arm, played, config, told_plan(task, settings), settings.budget))
    return players


def told_plan(task: Task, settings: Settings) -> Plan:
    """The plan that planned arms are given: the right one, or one with noise.

    A session has few edges, so a rate of 10 % spoils one of them in some sessions and none in the others; over the
    seeds the share is met as closely as whole edges allow.
    """
    plan = task.plan()
    if settings.noise == "none":
        return plan
    edges = sum(len(step.reads) for step in plan.steps)
    # Multiples of the golden ratio modulo 1 lie evenly, however many seeds there are.
    spoilt = math.floor(settings.noise_rate * edges + (0.5 + task.seed * _GOLDEN) % 1)
    kinds = KINDS if settings.noise == "all" else (settings.noise,)
    return perturb(plan, spoilt / edges, seed=task.seed, kinds=kinds, spans=list(task.fillers))[0]


def check_noise(settings: Settings) -> None:
    """Refuse noise that cannot be made, before minutes are spent.

    Raises:
        ConfigError: an unknown kind, or a rate out of range.
    """
    known = ("none", "all", *KINDS)
    if settings.noise not in known:
        raise ConfigError(
            f"{settings.noise!r} is not known", option="noise", way_out="Give one of " + ", ".join(known)
        )
    if not 0 <= settings.noise_rate <= 1 or (settings.noise == "none") != (settings.noise_rate == 0):
        raise ConfigError(
            f"{settings.noise_rate} does not go with noise {settings.noise!r}",
            option="noise-rate",
            way_out="Give a share up to 1 together with a kind of noise",
        )


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
