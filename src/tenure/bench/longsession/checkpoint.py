"""Checkpoints inside a session, for those that take hours: all arms at the same turn, or the checkpoint before."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from tenure.bench import record
from tenure.errors import ConfigError, TenureError

if sys.platform != "win32":  # which has no such locks
    import fcntl

if TYPE_CHECKING:
    from tenure.bench.longsession.play import Player
    from tenure.session import Session

EVERY = 600.0
"""Seconds between two checkpoints."""


class Checkpoint:
    """The checkpoints of one session. As a context it is this process's alone.

    A checkpoint is a folder of session files; ``latest.json`` names the newest whole one and is replaced at once.
    Arms with a planner are not saved: their archives hold all that was evicted. A session with such an arm starts
    anew.

    Args:
        folder: of this session and these arms; removed when the session is over.
        config: of the run, plain values. A checkpoint of another config is not gone on from.

    Raises:
        ConfigError: on entering, another process is at this session.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = dict(config)
        self._saved = monotonic()
        self._lock: int | None = None

    def __enter__(self) -> Checkpoint:
        self.folder.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            return self
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise ConfigError(
                f"another process plays what is kept in {self.folder}",
                option="out",
                way_out="Wait for it, or give other seeds, other arms or another --name",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def due(self, players: Sequence[Player]) -> bool:
        """Whether it is time, and the arms can be saved."""
        return monotonic() - self._saved >= EVERY and all(player.config.planner is None for player in players)

    def save(self, players: Sequence[Player], turns: int) -> None:
        """Save all arms after ``turns`` turns.

        Raises:
            TenureError, OSError: it could not be written; the checkpoint before is as it was.
        """
        self._saved = monotonic()
        place = self.folder / f"turn-{turns:06d}"
        try:
            for player in players:
                player.session.save(place / f"{player.arm.name}.safetensors")
            times = {player.arm.name: player.turn_s for player in players}
            latest = {"turns": turns, "config": self.config, "turn_s": times}
            record.write(self.folder / "latest.json", latest)
        except (TenureError, OSError):
            shutil.rmtree(place, ignore_errors=True)
            raise
        for older in self.folder.glob("turn-*"):
            if older != place:
                shutil.rmtree(older, ignore_errors=True)

    def load(self, players: Sequence[Player]) -> int:
        """Put the arms where the newest checkpoint was.

        Returns:
            Turns that were read; 0 without a checkpoint of these arms and this config, or where it cannot be used any
            more: of another version, or damaged. Nothing is lost then but time.
        """
        restored: list[Session] = []
        try:
            found = json.loads((self.folder / "latest.json").read_text(encoding="utf-8"))
            turns, times = int(found["turns"]), found["turn_s"]
            if found["config"] != self.config or set(times) != {player.arm.name for player in players}:
                return 0
            place = self.folder / f"turn-{turns:06d}"
            for player in players:
                restored.append(player.engine.restore(place / f"{player.arm.name}.safetensors"))
                if restored[-1].config != player.config:
                    raise ConfigError("made with other options", option=player.arm.name)
        except (OSError, ValueError, KeyError, TypeError, TenureError):
            for session in restored:
                session.close()
            return 0
        for player, session in zip(players, restored, strict=True):
            player.session.close()
            player.session = session
            player.turn_s = list(times[player.arm.name])
        return turns

    def forget(self) -> None:
        """Begin at the start, whatever is there."""
        (self.folder / "latest.json").unlink(missing_ok=True)

    def remove(self) -> None:
        """The session is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
