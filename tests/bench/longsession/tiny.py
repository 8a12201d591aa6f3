"""Settings of short sessions with a random model, and their players."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tenure.bench.longsession.arms import chosen
from tenure.bench.longsession.play import Player
from tenure.bench.longsession.run import Settings, told_plan
from tenure.sampling import SamplingOptions

SETTINGS = Settings(model="tiny", tokens=3600, budget=1100, limit=4096, chunk=1024, dtype="fp32")


def players(engine, task, names: str, **changes: Any) -> list[Player]:
    """Arms by name; ``changes`` are of ``SETTINGS``."""
    settings = replace(SETTINGS, **changes)
    return [
        Player(
            engine,
            arm,
            task,
            arm.config(budget=settings.budget, chunk=settings.chunk, limit=settings.limit, seed=0),
            told_plan(task, settings),
            settings.budget,
        )
        for arm in chosen(names)
    ]


def quick(monkeypatch) -> None:
    """Answers of 4 tokens."""
    monkeypatch.setattr(
        "tenure.bench.longsession.play.SamplingOptions", lambda max_tokens: SamplingOptions(max_tokens=4)
    )
