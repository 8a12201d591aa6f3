"""A run: several sessions under several arms, stored one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tenure.bench.longsession.arms import Arm
from tenure.bench.longsession.checkpoint import Checkpoint
from tenure.bench.longsession.noise import VERSION as NOISE_VERSION
from tenure.bench.longsession.noise import damage, noisy
from tenure.bench.longsession.play import Player, play
from tenure.bench.longsession.store import Store
from tenure.bench.longsession.summary import summarise
from tenure.bench.longsession.task import VERSION, Task, build
from tenure.errors import ConfigError
from tenure.plan import Plan
from tenure.planners.noise import KINDS

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
        noise: what is wrong with the plan: ``none``, a kind of :func:`~tenure.bench.longsession.noise.noisy`, or ``all``.
        noise_rate: with which share of the definitions, over the seeds.
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
        """Plain values for result files. Runs under right plans have no ``noise_version``."""
        version = {"task_version": VERSION}
        if self.noise != "none":
            version["noise_version"] = NOISE_VERSION
        return {**version, **asdict(self)}

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
            with Checkpoint(
                store.checkpoint(seed, [arm.name for arm in left]), settings.config
            ) as checkpoint:
                if not resume:
                    checkpoint.forget()
                players = _players(engine, settings, left, seed)
                play(players, tell, separate=separate, checkpoint=checkpoint)
                shared = 1 if separate else len(players)
                found = {player.arm.name: _result(player, shared, settings) for player in players}
                store.write(seed, found, separate=separate)
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
    """The plan that planned arms are given: the right one, or one with noise."""
    if settings.noise == "none":
        return task.plan()
    return noisy(task, settings.noise, settings.noise_rate, settings.budget)


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


def check_lengths(settings: Settings) -> None:
    """Refuse lengths that no session can have, before a model is loaded.

    Raises:
        ConfigError: no tokens, or a distance that is no part of them.
    """
    tokens, distance = settings.tokens, settings.distance
    if tokens < 1:
        raise ConfigError(
            f"{tokens} tokens are no session", option="tokens", way_out="Give 50000, for example"
        )
    if distance is not None and not 0 < distance < tokens:
        raise ConfigError(
            f"{distance:,} of {tokens:,} tokens cannot lie behind the definitions",
            option="distance",
            way_out="Give a part of --tokens",
        )


def _result(player: Player, shared: int, settings: Settings) -> dict[str, Any]:
    arm, stats = player.arm, player.session.stats()
    read = sum(player.turn_s)
    result: dict[str, Any] = {
        "about": arm.about,
        "version": arm.version,
        "tokens": player.task.tokens,
        "kv_bytes": player.kv_bytes,
        "archive_bytes": player.archive_bytes,
        "archive_capacity": arm.host,
        "archive_lost": player.archive_lost,
        "wall_s": round(read + player.answer_s, 3),
        "answer_s": round(player.answer_s, 3),
        "turn_s": [round(seconds, 4) for seconds in player.turn_s],
        "time_shared_by": shared,
        "renumbers": stats.renumbers,
        "resident": stats.resident,
        "answers": [answer.to_json() for answer in player.answers],
    }
    if settings.noise != "none" and arm.told in ("plan", "text"):
        result["noise"] = damage(player.task.plan(), player.plan)
    return result
