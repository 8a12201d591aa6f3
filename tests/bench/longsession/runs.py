"""Made-up runs for tests of plots and pages."""

from __future__ import annotations

from typing import Any

from tenure.bench.longsession.run import Settings
from tenure.bench.longsession.summary import summarise

MACHINE = {"cpu": "c", "cores": 2, "bf16": "none", "gpu": None, "torch": "2"}


def stored(
    seed: int,
    right: dict[str, int],
    gap: float = 100.0,
    shared: int = 1,
    turns: int = 3,
    spoilt: int | None = None,
    archive: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A stored session: ``right`` tests of five passed by each arm, in one probe.

    With noise, ``spoilt`` of three definitions have lost their readers; None is noise of single edges. ``archive`` bytes
    are held by every arm; None is a session that was stored before they were measured.
    """
    settings = Settings(**{"model": "fake", "tokens": 1000, **options})
    config = settings.config
    more: dict[str, Any] = {}
    if spoilt is None:
        config.pop("noise_version", None)
    else:
        more["noise"] = {"spans": ["a", "b", "c"], "spoilt": ["a", "b"][:spoilt], "lost": ["a"][:spoilt]}
    if archive is not None:
        more |= {"archive_bytes": archive, "archive_lost": 2}
    arms = {
        name: {
            "tokens": settings.tokens,
            "kv_bytes": 7,
            "wall_s": 4.0,
            "answer_s": 1.0,
            "turn_s": [float(turn + 1) for turn in range(turns)],
            "time_shared_by": shared,
            **(more if name != "h2o" else {}),
            "answers": [
                {
                    "probe": "module",
                    "checks": [number < count for number in range(5)],
                    "facts": ["a", "b", "c", "d"][:count],
                    "wanted": ["a", "b", "c", "d", "e"],
                    "residency": 0.2 if name == "h2o" else 1.0,
                    "rotary_gap": gap,
                }
            ],
        }
        for name, count in right.items()
    }
    return {
        "bench": "longsession",
        "date": "2026-01-02T00:00:00+00:00",
        "commit": "abc",
        "machine": MACHINE,
        "config": config,
        "seed": seed,
        "separate": shared == 1,
        "arms": arms,
    }


def run(*sessions: dict[str, Any], name: str = "run") -> dict[str, Any]:
    """The summary of sessions, with the name that a page gives it."""
    return {**summarise(sessions), "name": name}
