"""Filler: Python sources of the machine, in turns of about 2,000 tokens, no line twice.

First the standard library (2.3 million tokens of Qwen's tokenizer for Python 3.11), then, where that is not enough,
the sources of torch, which every installation of Tenure has. Files are shuffled by the session's seed and read
from start to end; short ones share a turn.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError
from tenure.messages import Message

if TYPE_CHECKING:
    from tenure.transcript import Transcript

_LEFT_OUT = frozenset(
    # Tests and tables: much of them repeats, or is no code.
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
)
_SMALL = 400
"""Characters below which a file is no filler."""

_OVERHEAD = 60
"""Tokens left in a part for the announcement and the template's markers."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines of a file."""

    name: str
    first: int
    lines: tuple[str, ...]

    def messages(self, count: int) -> list[Message]:
        """How an agent reads it: an announcement and the tool's output, cut to ``count`` lines."""
        lines = self.lines[:count]
        last = self.first + len(lines) - 1
        return [
            Message("assistant", f"Next I read {self.name}, lines {self.first} to {last}."),
            Message("tool", f"$ sed -n {self.first},{last}p {self.name}\n{''.join(lines)}"),
        ]


def folders() -> list[tuple[str, Path]]:
    """Where filler comes from, in this order, each with the name that paths are shown under."""
    found = [("lib", Path(sysconfig.get_paths()["stdlib"]))]
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        found.append(("torch", Path(spec.origin).parent))
    return found


def files(folder: Path) -> list[Path]:
    """Source files of a folder, sorted by path."""
    found: list[Path] = []
    for place, inside, names in os.walk(folder):
        inside[:] = sorted(set(inside) - _LEFT_OUT)  # os.walk goes into what is left of it
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found)


def turns(tokenizer: Any, rng: random.Random, size: int) -> Iterator[list[Part]]:
    """What an agent reads turn by turn: about ``size`` tokens, the messages around them included; no line twice."""
    turn: list[Part] = []
    room = size - _OVERHEAD
    for name, text in _texts(rng):
        lines = text.splitlines(keepends=True)
        # Counted line by line: a token across two lines is counted twice, so turns are a little short of the size.
        counts = [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
        first = used = 0
        for number, count in enumerate(counts):
            if used + count > room and (used or turn):
                if used:
                    turn.append(Part(name, first + 1, tuple(lines[first:number])))
                yield turn
                turn, room, first, used = [], size - _OVERHEAD, number, 0
            used += count
        turn.append(Part(name, first + 1, tuple(lines[first:])))
        room -= used + _OVERHEAD
        if room < size // 4:  # a shorter piece of the next file is not worth a command
            yield turn
            turn, room = [], size - _OVERHEAD
    if turn:
        yield turn


def _texts(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Files in the order that the seed gives, each with the name it is shown under; none of the same text twice."""
    seen: set[str] = set()
    for name, folder in folders():
        paths = files(folder)
        rng.shuffle(paths)
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if len(text) >= _SMALL and text not in seen:
                seen.add(text)
                yield f"{name}/{path.relative_to(folder).as_posix()}", text


def read(parts: Sequence[Part], count: int | None = None) -> list[Message]:
    """Messages of a turn, cut to its first ``count`` lines."""
    messages: list[Message] = []
    left = sum(len(part.lines) for part in parts) if count is None else count
    for part in parts:
        if left > 0:
            messages += part.messages(left)
        left -= len(part.lines)
    return messages


def read_filler(transcript: Transcript, source: Iterator[list[Part]], tokens: int) -> list[list[Message]]:
    """Messages of turns of filler that add up to ``tokens``, met to within one line.

    Args:
        transcript: where the turns are to come; it is moved behind them.
        source: of turns; those that are used are taken from it.
        tokens: in all, in the model's own rendering.

    Raises:
        ConfigError: the source has less text.
    """
    left = tokens
    made: list[list[Message]] = []
    while left > 0:
        parts = next(source, None)
        if parts is None:
            raise ConfigError(
                f"{tokens:,} tokens of filler are {left:,} more than the sources of this machine hold",
                option="tokens",
                way_out="Give fewer",
            )
        messages = read(parts)
        after = transcript.fork()
        count = sum(len(piece.ids) for piece in after.open(messages))
        if count > left:
            fitting = cut(transcript, partial(read, parts), sum(len(part.lines) for part in parts), left)
            if fitting is None:
                break
            messages, count = fitting[0], left
            after = transcript.fork()
            after.open(messages)
        transcript.restore(after.snapshot())
        made.append(messages)
        left -= count
    return made


def cut(
    transcript: Transcript, make: Callable[[int], list[Message]], lines: int, room: int
) -> tuple[list[Message], int] | None:
    """The most lines whose messages fit ``room`` tokens behind a transcript, and their tokens; None if none do.

    Args:
        transcript: unchanged.
        make: messages of the first ``count`` lines.
        lines: there are.
        room: in tokens.
    """
    low, high, best = 1, lines, None
    while low <= high:
        middle = (low + high) // 2
        messages = make(middle)
        used = sum(len(piece.ids) for piece in transcript.fork().open(messages))
        if used <= room:
            best, low = (messages, used), middle + 1
        else:
            high = middle - 1
    return best
