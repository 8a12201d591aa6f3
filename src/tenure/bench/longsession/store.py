"""Results on disk: a file a session and group of arms, so that a run can be stopped and resumed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tenure.bench import record
from tenure.bench.longsession.arms import ARMS
from tenure.errors import ConfigError


class Store:
    """The folder of one run. All its sessions share one config.

    Args:
        folder: is made when the first session is written.
        config: of the run, plain values.

    Raises:
        ConfigError: the folder holds sessions of another config, or a file that is none.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        for path, found in self._sessions():
            if found["config"] != config:
                changed = [
                    key for key in config | found["config"] if config.get(key) != found["config"].get(key)
                ]
                raise ConfigError(
                    f"{path} was made with another {', '.join(changed)}",
                    option="name",
                    way_out="Give the run another --name",
                )

    def _sessions(self) -> list[tuple[Path, dict[str, Any]]]:
        """Every file, without arms of an older version."""
        return [(path, _current(_read(path))) for path in sorted(self.folder.glob("seed-*.json"))]

    def done(self, seed: int) -> set[str]:
        """Arms that this seed has a result of."""
        return {name for _, found in self._sessions() if found["seed"] == seed for name in found["arms"]}

    def write(self, seed: int, arms: dict[str, Any], *, separate: bool) -> Path:
        """Write a session, whole or not at all."""
        entry = {
            "bench": "longsession",
            **record.origin(),
            "config": self.config,
            "seed": seed,
            "separate": separate,
            "arms": arms,
        }
        path = self.folder / f"seed-{_stem(seed, arms)}.json"
        record.write(path, entry)
        return path

    def checkpoint(self, seed: int, arms: Iterable[str]) -> Path:
        """Folder for the checkpoints of these arms of a session: others may be played at the same time."""
        return self.folder / f".checkpoint-{_stem(seed, arms)}"

    def load(self) -> list[dict[str, Any]]:
        """All sessions, by seed; of an arm that was played twice, the newest result counts."""
        found = [session for _, session in self._sessions() if session["arms"]]
        return sorted(found, key=lambda session: (session["seed"], session["date"]))


def _stem(seed: int, arms: Iterable[str]) -> str:
    return f"{seed:04d}.{'+'.join(arms)}"


def _read(path: Path) -> dict[str, Any]:
    fields = ("config", "seed", "arms", "date")
    return record.read(path, fields, "no stored session", "Remove it, and its session is played anew")


def _current(session: dict[str, Any]) -> dict[str, Any]:
    arms = {
        name: arm
        for name, arm in session["arms"].items()
        if name not in ARMS or arm.get("version", 1) == ARMS[name].version
    }
    return {**session, "arms": arms}
