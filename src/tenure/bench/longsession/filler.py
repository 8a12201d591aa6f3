"""Filler: Python sources of the machine, in parts of about 2,000 tokens, none twice.

First the standard library (2.3 million tokens of Qwen's tokenizer for Python 3.11), then, where that is not enough,
the sources of torch, which every installation of Tenure has. Files are shuffled by the session's seed; the parts of
a file stay in order, as an agent reads them.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

    def messages(self, step: str | None = None, count: int | None = None) -> list[Message]:
        """How an agent reads it: an announcement and the tool's output, cut to ``count`` lines."""
        lines = self.lines[:count]
        last = self.first + len(lines) - 1
        return [
            Message("assistant", f"Next I read {self.name}, lines {self.first} to {last}.", step=step),
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


def parts(tokenizer: Any, rng: random.Random, size: int) -> Iterator[Part]:
    """Parts of about ``size`` tokens, the messages around them included; none occurs twice."""
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
                yield from _split(
                    tokenizer, f"{name}/{path.relative_to(folder).as_posix()}", text, size - _OVERHEAD
                )


def _split(tokenizer: Any, name: str, text: str, size: int) -> Iterator[Part]:
    lines = text.splitlines(keepends=True)
    # Counted line by line: a token across two lines is counted twice, so parts are a little short of the size.
    counts = [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
    first = used = 0
    for number, count in enumerate(counts):
        if used and used + count > size:
            yield Part(name, first + 1, tuple(lines[first:number]))
            first, used = number, 0
        used += count
    yield Part(name, first + 1, tuple(lines[first:]))


def read_filler(transcript: Transcript, source: Iterator[Part], tokens: int) -> list[list[Message]]:
    """Turns of filler that add up to ``tokens``, met to within one line.

    Args:
        transcript: where the turns are to come; it is moved behind them.
        source: of parts; those that are used are taken from it.
        tokens: in all, in the model's own rendering.

    Raises:
        ConfigError: the source has less text.
    """
    left = tokens
    turns: list[list[Message]] = []
    while left > 0:
        part = next(source, None)
        if part is None:
            raise ConfigError(
                f"{tokens:,} tokens of filler are {left:,} more than the sources of this machine hold",
                option="tokens",
                way_out="Give fewer",
            )
        messages = part.messages()
        after = transcript.fork()
        count = sum(len(piece.ids) for piece in after.open(messages))
        if count > left:
            fitting = cut(transcript, part.messages, len(part.lines), left)
            if fitting is None:
                break
            messages = fitting[0]
            count = left
            after = transcript.fork()
            after.open(messages)
        transcript.restore(after.snapshot())
        turns.append(messages)
        left -= count
    return turns


def cut(
    transcript: Transcript, make: Callable[..., list[Message]], lines: int, room: int
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
        messages = make(count=middle)
        used = sum(len(piece.ids) for piece in transcript.fork().open(messages))
        if used <= room:
            best, low = (messages, used), middle + 1
        else:
            high = middle - 1
    return best
