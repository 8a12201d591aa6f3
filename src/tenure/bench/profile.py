"""``tenure bench profile``: where a fill chunk and a decode step spend their time.

A stopwatch is put around the functions that do the work; each is charged its own time, without that of the functions
it calls. What is left of the step is Python and small tensor operations.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tenure.cache.attend import Singles
from tenure.engine import Engine
from tenure.ledger import Ledger
from tenure.memory import Memory
from tenure.models.weights import Projection
from tenure.session import Session

_REPEATS = 3
_STEPS = 136
"""Decode steps: more than the slack, so that a burst of evictions is in the figure."""


class Stopwatch:
    """Own time of named functions, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed under a name."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                total = time.perf_counter() - start
                self.seconds[name] += total - self._inner.pop()
                if self._inner:
                    self._inner[-1] += total

        return timed

    @contextmanager
    def around(self, places: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Time attributes of objects while the block runs: (object, attribute, name)."""
        before = [(place, attribute, getattr(place, attribute)) for place, attribute, _ in places]
        try:
            for place, attribute, name in places:
                setattr(place, attribute, self.wrap(name, getattr(place, attribute)))
            yield
        finally:
            for place, attribute, function in before:
                setattr(place, attribute, function)


def _places(engine: Engine) -> list[tuple[Any, str, str]]:
    kernels = engine.kernels
    return [
        (Projection, "__call__", "linear layers"),
        (Projection, "few", "linear layers"),
        (Singles, "attend", "attention"),
        (kernels, "rotate", "rotation"),
        (kernels, "attend", "attention"),
        (kernels, "extend", "attention"),
        (kernels, "decode", "attention"),
        (kernels, "merge", "attention: merge"),
        (kernels, "attention_mass", "attention statistics"),
        (Memory, "_evict", "eviction: ranking"),
        (Memory, "_keep", "eviction: compaction"),
        (Memory, "commit", "ledger"),
        (Memory, "prepare", "ledger"),
        (Ledger, "keep", "ledger"),
        (Ledger, "renumber", "ledger"),
    ]


def run(
    model: str,
    *,
    budget: int,
    chunk: int,
    policy: str,
    dtype: str = "auto",
    weights: str = "auto",
    flame: Path | None = None,
) -> dict[str, Any]:
    """Profile one model.

    Args:
        model: by name.
        budget: slots of the session.
        chunk: tokens a fill.
        policy: retention policy.
        dtype: see :class:`~tenure.config.EngineConfig`.
        weights: see :class:`~tenure.config.EngineConfig`.
        flame: where to draw a flame graph (SVG or PNG); see :mod:`tenure.bench.flame`.

    Returns:
        For ``fill`` (a chunk) and ``decode`` (a step) the milliseconds in all and a part.
    """
    engine = Engine.load(model, dtype=dtype, weights=weights, executor="fused")
    session = engine.session(budget=budget, chunk=chunk, policy=policy)
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(100, engine.vocabulary, (count,), generator=generator).tolist()

    session.append_ids(ids(budget + chunk))
    fill = _measure(engine, session, lambda: session.append_ids(ids(chunk)), 1)
    decode = _measure(engine, session, lambda: session.force(ids(_STEPS)), _STEPS)
    if flame is not None:
        from tenure.bench.flame import record

        record(
            flame,
            {
                f"fill, two chunks of {chunk:,}": lambda: session.append_ids(ids(2 * chunk)),
                f"decode, {2 * _STEPS} steps": lambda: session.force(ids(2 * _STEPS)),
            },
        )
    return {"model": model, "fill": fill, "decode": decode}


def _measure(engine: Engine, session: Session, call: Callable[[], Any], steps: int) -> dict[str, float]:
    totals, parts = [], []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        totals.append(time.perf_counter() - start)
        watch = Stopwatch()
        with watch.around(_places(engine)):
            call()
        parts.append(watch.seconds)
    total = 1e3 * statistics.median(totals) / steps
    result = {
        name: 1e3 * statistics.median(part.get(name, 0.0) for part in parts) / steps
        for name in dict.fromkeys(name for part in parts for name in part)
    }
    return {
        "total_ms": total,
        **result,
        "python and small operations": max(0.0, total - sum(result.values())),
    }
