"""``tenure bench window``: what a policy's scores lose by looking at the last queries of a chunk only.

One text is read by sessions that differ in nothing but how many queries of a chunk are counted; the one that counts all
is the reference. Recent slots and sinks are the same in all, so agreement is counted over the other kept slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tenure.bench.demo_session import build_demo, facts_found
from tenure.engine import Engine
from tenure.session import Session
from tenure.sessionfile import Probe

_ALL = 0


def run(
    model: str,
    *,
    windows: Sequence[int],
    tokens: int,
    budget: int,
    chunk: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Read the demo's session once for each window.

    Args:
        model: by name.
        windows: queries of a chunk that are counted; all of them is always among the arms.
        tokens: length of the session.
        budget: slots.
        chunk: tokens a forward.
        seed: of the session.
        note: told what is going on.

    Returns:
        For each window the mean share, over evictions and layers, of kept slots that the reference keeps too; what a
        random choice of as many would share; the seconds of reading; and the facts answered at the end.
    """
    engine = Engine.load(model)
    file = build_demo(engine.tokenizer, tokens, seed)
    arms = {
        window: engine.session(
            policy="h2o", policy_options={"window": window}, budget=budget, chunk=chunk, positions="bounded"
        )
        for window in dict.fromkeys([_ALL, *windows])
    }
    agreed: dict[int, list[float]] = {window: [] for window in arms}
    chance: list[float] = []
    seconds = dict.fromkeys(arms, 0.0)
    for number, message in enumerate(file.messages, 1):
        note(f"message {number} of {len(file.messages)}")
        for session in arms.values():
            session.queue([message])
        while arms[_ALL].memory.waiting:
            for window, session in arms.items():
                started = time.perf_counter()
                engine.step([session])
                seconds[window] += time.perf_counter() - started
            if arms[_ALL].memory.ledger.evicted_ever:
                sets = {window: _heavy(session, budget) for window, session in arms.items()}
                for window, kept in sets.items():
                    agreed[window].append(_shared(kept, sets[_ALL]))
                chance.append(sets[_ALL].shape[1] / (len(arms[_ALL]) - budget // 2))
    note("answers")
    return {
        "windows": {
            str(window or "all"): {
                "agreement": sum(agreed[window]) / max(1, len(agreed[window])),
                "agreement_at_the_end": agreed[window][-1] if agreed[window] else None,
                "seconds": seconds[window],
                "facts_found": _facts(session, file.probes),
            }
            for window, session in arms.items()
        },
        "chance": sum(chance) / max(1, len(chance)),
        "evictions": len(chance),
        "facts_total": sum(len(probe.expect) for probe in file.probes),
    }


def _heavy(session: Session, budget: int) -> Tensor:
    """Logical indices of the kept slots that are neither sinks nor recent, ``[layers, slots]``."""
    ledger = session.memory.ledger
    return ledger.logical[:, session.config.sinks : ledger.rows - budget // 2]


def _shared(kept: Tensor, reference: Tensor) -> float:
    pairs = zip(kept, reference, strict=True)
    return sum(torch.isin(a, b).double().mean().item() for a, b in pairs) / len(kept)


def _facts(session: Session, probes: Sequence[Probe]) -> int:
    forks = [session.fork() for _ in probes]
    for fork, probe in zip(forks, probes, strict=True):
        fork.queue([probe.message], reply=True)
    texts = session.engine.generate(forks, max_tokens=32)
    for fork in forks:
        fork.close()
    return sum(sum(facts_found(text, probe.expect)) for text, probe in zip(texts, probes, strict=True))
