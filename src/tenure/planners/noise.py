"""Wrong plans on purpose: a share of a plan's edges is spoilt, to measure how much a policy hangs on its plan.

An edge is one read of one step. For one seed, the edges spoilt at a low rate are among those spoilt at a higher one,
and each in the same way, so that results over the rate are paired.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tenure.errors import ConfigError
from tenure.plan import Plan, Read, Step

Kind = Literal["dropped", "stale", "contradictory", "wrong"]
KINDS: tuple[Kind, ...] = get_args(Kind)

GONE = " (gone)"
"""Behind the id of a span that no longer exists."""


@dataclass(frozen=True)
class Spoilt:
    """One edge and what became of it.

    Args:
        step: that read the span.
        read: the span.
        kind: how the edge was spoilt.
        what: in words.
    """

    step: str
    read: Read
    kind: Kind
    what: str


def perturb(
    plan: Plan,
    rate: float,
    *,
    seed: int,
    kinds: Sequence[str] = KINDS,
    spans: Sequence[str] = (),
) -> tuple[Plan, list[Spoilt]]:
    """A copy of a plan with a share of its edges spoilt.

    - ``dropped``: the edge is missing.
    - ``stale``: the edge is of an older version of the plan: an earlier step reads the span, the one that needs it
      does not. The first step's edges name a span that no longer exists.
    - ``contradictory``: the edge is there, and another that cannot be right as well: the step is said to read a wrong
      span, too, and a wrong step the right span.
    - ``wrong``: the step is said to read another span.

    Args:
        plan: stays as it is.
        rate: share of the edges, 0 to 1; the number is rounded.
        seed: the same seed spoils the same edges.
        kinds: drawn from, one an edge.
        spans: wrong spans are drawn from these; from those that the plan names if empty.

    Returns:
        The spoilt plan, and what was done, in plan order.

    Raises:
        ConfigError: the rate is out of range, or a kind is not known.
    """
    if not 0 <= rate <= 1:
        raise ConfigError(f"{rate} is no share", option="rate", way_out="Give 0 to 1")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(
            f"{unknown or 'no kind'} is not known", option="kinds", way_out=f"Known: {', '.join(KINDS)}"
        )
    rng = random.Random(f"plan noise {seed}")
    steps = plan.steps
    edges = [(place, read) for place, step in enumerate(steps) for read in step.reads]
    order = list(range(len(edges)))
    rng.shuffle(order)
    # One generator an edge: what happens to it does not hang on the rate.
    seeds = {number: rng.getrandbits(64) for number in order}
    pool = list(dict.fromkeys(spans or (read for _, read in edges if isinstance(read, str))))
    reads: list[list[Read]] = [[] for _ in steps]
    extra: list[tuple[int, Read]] = []
    drawn = [kind for kind in KINDS if kind in kinds]
    chosen = set(order[: round(rate * len(edges))])
    done = []
    for number, (place, read) in enumerate(edges):
        if number not in chosen:
            reads[place].append(read)
            continue
        own = random.Random(seeds[number])
        kind = own.choice(drawn)
        kept, added, what = _spoil(kind, place, read, steps, pool, own)
        reads[place] += kept
        extra += added
        done.append(Spoilt(steps[place].id, read, kind, what))
    for place, read in extra:
        reads[place].append(read)
    twin = plan.copy()
    for step, new in zip(steps, reads, strict=True):
        twin.set_reads(step.id, new)
    return twin, done


def _spoil(
    kind: Kind, place: int, read: Read, steps: Sequence[Step], pool: Sequence[str], rng: random.Random
) -> tuple[list[Read], list[tuple[int, Read]], str]:
    """What the step reads in the edge's place, further edges ``(step, read)``, and words for both."""
    if kind == "dropped":
        return [], [], "missing"
    if kind == "stale":
        if place == 0:
            return [f"{read}{GONE}"], [], "names a span that is gone"
        earlier = rng.randrange(place)
        return [], [(earlier, read)], f"bound to the earlier step {steps[earlier].id!r}"
    others = [span for span in pool if span not in steps[place].reads]
    wrong = rng.choice(others) if others else f"{read}{GONE}"
    if kind == "wrong":
        return [wrong], [], f"names {wrong!r} instead"
    rivals = [other for other, step in enumerate(steps) if read not in step.reads]
    rival = rng.choice(rivals) if rivals else place
    return (
        [read, wrong],
        [(rival, read)],
        f"names {wrong!r}, too; {steps[rival].id!r} is said to read it as well",
    )
