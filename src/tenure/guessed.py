"""Reads of a plan's steps that planners have added and nobody else has named: they give way where there is no room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tenure.steps import Read, Step, parse_read


class Guessed:
    """Which reads are guesses, in the order in which they were made.

    Args:
        reads: by step id and read; who guessed it.
    """

    def __init__(self, reads: Mapping[tuple[str, Read], str] | None = None) -> None:
        self._reads = dict(reads or {})

    def note(self, step_id: str, reads: Iterable[Read], who: str) -> None:
        """These are guesses."""
        self._reads.update(((step_id, read), who) for read in reads)

    def claim(self, step_id: str, reads: Iterable[Read] | None = None) -> bool:
        """These reads of a step, or all, are guesses no longer. Says whether any was one."""
        keys = [(step_id, read) for read in (self.of(step_id) if reads is None else reads)]
        found = [self._reads.pop(key, None) for key in keys]
        return any(who is not None for who in found)

    def of(self, step_id: str) -> tuple[Read, ...]:
        """The guesses among a step's reads."""
        return tuple(read for one, read in self._reads if one == step_id)

    def by(self, who: str) -> list[tuple[str, Read]]:
        """Somebody's guesses: step id and read."""
        return [key for key, guesser in self._reads.items() if guesser == who]

    def follow(self, step: Step, became: Mapping[Read, Iterable[Read]]) -> None:
        """Reads of a step have become others: a guess stays one, unless it is now what somebody has named, in any words.

        Args:
            step: as it was before.
            became: what each read has become.
        """
        guessed = {read: self._reads.pop((step.id, read), None) for read in became}
        # What somebody has named comes last, and stays named.
        for read in sorted(became, key=lambda read: guessed[read] is None):
            for key in ((step.id, other) for other in became[read]):
                who = guessed[read]
                if who is None:
                    self._reads.pop(key, None)
                elif key[1] not in step.reads:
                    self._reads.setdefault(key, who)

    def copy(self) -> Guessed:
        """An independent one."""
        return Guessed(self._reads)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, complete with :meth:`from_json`."""
        return [
            {"step": step_id, "read": read if isinstance(read, str) else read.to_json(), "by": who}
            for (step_id, read), who in self._reads.items()
        ]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> Guessed:
        """What :meth:`to_json` gave."""
        return cls({(one["step"], parse_read(one["read"], "read")): str(one["by"]) for one in data})
