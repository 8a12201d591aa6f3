"""Plans that are wrong in a given share of their edges, to see what a plan is worth that an agent got half right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

from tenure.errors import ConfigError
from tenure.plan import Plan, Step

Noise = Literal["none", "drop", "stale", "contradict", "wrong"]


def disturb(plan: Plan, noise: str, rate: float, rng: random.Random, spans: Sequence[str]) -> Plan:
    """A copy of a plan in which each edge (a step and a span that it reads) is disturbed with probability ``rate``.

    - ``drop``: the edge is missing.
    - ``stale``: the plan believes that an earlier step reads the span, one that is over when the probes come.
    - ``contradict``: the edge is told of another late step than the one that needs it.
    - ``wrong``: the step is said to read a span that nobody needs.

    Args:
        plan: right and complete.
        noise: one of these, or ``none``.
        rate: 0 to 0.5.
        rng: decides.
        spans: ids of spans that nobody needs.

    Raises:
        ConfigError: unknown noise, or a rate out of range.
    """
    if noise not in get_args(Noise):
        raise ConfigError(
            f"{noise!r} is not known", option="noise", way_out="Give one of " + ", ".join(get_args(Noise))
        )
    if not 0 <= rate <= 0.5:
        raise ConfigError(f"{rate} is not in 0..0.5", option="noise-rate", way_out="Give a share up to 0.5")
    late = [step.id for step in plan.steps if step.reads]
    over = [step.id for step in plan.steps if not step.reads]
    reads: dict[str, list[str]] = {step.id: [] for step in plan.steps}
    for step in plan.steps:
        for span in step.reads:
            if noise == "none" or rng.random() >= rate:
                reads[step.id].append(span)
            elif noise == "stale":
                reads[over[-1]].append(span)
            elif noise == "contradict":
                reads[rng.choice([other for other in late if other != step.id])].append(span)
            elif noise == "wrong":
                reads[step.id].append(rng.choice(spans))
    return Plan(Step(step, tuple(spans)) for step, spans in reads.items())
