"""References that have become span ids, remembered: where such a span is taken back, they stand open again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tenure.steps import Read, Reference, Step


class Unsettled(NamedTuple):
    """A read whose span could not be told: its step, what it says, and the spans that fit it (none or several)."""

    step: str
    read: Reference
    spans: tuple[str, ...]

    def __str__(self) -> str:
        fits = "no span" if not self.spans else f"{len(self.spans)} spans: {', '.join(self.spans[:5])}"
        return f"step {self.step!r} reads {self.read}, which fits {fits}"


class Settled:
    """For references of a plan's steps, the span that each is settled on.

    Args:
        spans: by step id and reference; None where the span was taken back and no other was found yet.
    """

    def __init__(self, spans: Mapping[tuple[str, Reference], str | None] | None = None) -> None:
        self._spans = dict(spans or {})

    def settle(
        self, step: Step, find: Callable[[Reference], Sequence[str]]
    ) -> tuple[tuple[Read, ...], list[Unsettled], dict[Read, list[Read]]]:
        """Put span ids in the place of a step's references.

        Args:
            step: of the plan.
            find: gives the ids of the spans that a reference fits, in order. Exactly one settles it; where it was settled
                before, the first does, since a text that could be told apart once is only repeated behind it.

        Returns:
            The step's reads now, what stays open among them, and what the others have become.
        """
        reads: list[Read] = []
        left: list[Unsettled] = []
        became: dict[Read, list[Read]] = {}
        for read in step.reads:
            if isinstance(read, str):
                reads.append(read)
                continue
            fits, key = tuple(find(read)), (step.id, read)
            if len(fits) == 1 or (fits and key in self._spans):
                reads.append(fits[0])
                became[read] = [fits[0]]
                if fits[0] not in step.reads:  # an id that the step was given stays one
                    self._spans[key] = fits[0]
            else:
                reads.append(read)
                left.append(Unsettled(step.id, read, fits))
        return tuple(dict.fromkeys(reads)), left, became

    def span(self, step_id: str, read: Read) -> Read | None:
        """The span that a reference of a step is settled on; None for one that is not, and for an id."""
        return None if isinstance(read, str) else self._spans.get((step_id, read))

    def reopen(self, kept: Collection[str]) -> dict[str, dict[Read, list[Read]]]:
        """Forget the spans that are not among ``kept``: step id, then span, to the references that were settled on it."""
        lost: dict[str, dict[Read, list[Read]]] = {}
        for (step_id, reference), span in self._spans.items():
            if span is not None and span not in kept:
                lost.setdefault(step_id, {}).setdefault(span, []).append(reference)
                self._spans[step_id, reference] = None
        return lost

    def prune(self, step: Step) -> None:
        """Forget what a step does not read any more."""
        for step_id, reference in [key for key in self._spans if key[0] == step.id]:
            if reference not in step.reads and self._spans[step_id, reference] not in step.reads:
                del self._spans[step_id, reference]

    def copy(self) -> Settled:
        """An independent one."""
        return Settled(self._spans)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, in the form of the plan's JSON."""
        return [
            {"step": step_id, "read": reference.to_json(), "span": span}
            for (step_id, reference), span in self._spans.items()
        ]
