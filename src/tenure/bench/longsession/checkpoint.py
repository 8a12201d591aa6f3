"""Checkpoints inside a session, for those that take hours: all arms at the same turn, or the checkpoint before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from tenure.bench import record
from tenure.errors import TenureError

if TYPE_CHECKING:
    from tenure.bench.longsession.play import Player

EVERY = 600.0
"""Seconds between two checkpoints."""


class Checkpoint:
    """The checkpoints of one session.

    A checkpoint is a folder of session files; ``latest.json`` names the newest whole one and is replaced at once.
    Arms with a planner are not saved: their archives hold all that was evicted. A session with such an arm starts
    anew.

    Args:
        folder: of this session; removed when the session is over.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved = monotonic()

    def due(self, players: Sequence[Player]) -> bool:
        """Whether it is time, and the arms can be saved."""
        return monotonic() - self._saved >= EVERY and all(player.config.planner is None for player in players)

    def save(self, players: Sequence[Player], turns: int) -> None:
        """Save all arms after ``turns`` turns."""
        place = self.folder / f"turn-{turns:06d}"
        for player in players:
            player.session.save(place / f"{player.arm.name}.safetensors")
        times = {player.arm.name: player.turn_s for player in players}
        record.write(self.folder / "latest.json", {"turns": turns, "turn_s": times})
        for older in self.folder.glob("turn-*"):
            if older != place:
                shutil.rmtree(older)
        self._saved = monotonic()

    def load(self, players: Sequence[Player]) -> int:
        """Put the arms where the newest checkpoint was.

        Returns:
            Turns that were read; 0 without a checkpoint of these arms, or where it cannot be used any more.
        """
        latest = self.folder / "latest.json"
        if not latest.is_file():
            return 0
        found = json.loads(latest.read_text(encoding="utf-8"))
        if set(found["turn_s"]) != {player.arm.name for player in players}:
            return 0
        place = self.folder / f"turn-{found['turns']:06d}"
        try:
            restored = [player.engine.restore(place / f"{player.arm.name}.safetensors") for player in players]
        except TenureError:
            return 0  # of another version, or damaged: nothing is lost but time
        for player, session in zip(players, restored, strict=True):
            player.session.close()
            player.session = session
            player.turn_s = list(found["turn_s"][player.arm.name])
        return int(found["turns"])

    def remove(self) -> None:
        """The session is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
