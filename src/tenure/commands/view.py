"""The live view of a session: what its budget holds, and whether the plan's spans are in it."""

from __future__ import annotations

import re
import sys
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tenure.commands.play import Player

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_INTERVAL = 0.3
_SHARE = 0.01
"""Of the time, at most, that drawing may take."""


class RunView:
    """Redraws itself a few times a second on stderr, if that is a terminal, and takes 1 % of the run at most.

    A context manager. Without a terminal, or when ``quiet``, it draws nothing.

    Args:
        title: first line.
        quiet: draw nothing.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self.active = self.console.is_terminal and not quiet
        self._title = title
        self._live: Live | None = None
        self._next = 0.0
        self._speed: deque[tuple[float, int]] = deque(maxlen=12)

    def __enter__(self) -> RunView:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        if self.active:
            # Answers go to the real stdout: rich must not redirect it to the terminal.
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None  # a stopped one would erase, when started again, what was printed since

    def tick(self, player: Player) -> None:
        """Draw if it is time to."""
        now = perf_counter()
        if self._live is None or now < self._next:
            return
        self._speed.append((now, player.computed))
        self._live.update(self._draw(player), refresh=True)
        self._next = now + max(_INTERVAL, (perf_counter() - now) / _SHARE)

    def write(self, text: str) -> None:
        """Print to stdout; the view gives way where both are one terminal."""
        shared = self._live is not None and sys.stdout.isatty()
        if shared:
            self._stop()
        say(text)
        if shared:
            self._start()

    def _draw(self, player: Player) -> RenderableType:
        stats = player.session.stats()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold")
        rows.add_column(width=24)
        rows.add_column(overflow="fold")
        entries = len(player.file)
        current = player.session.plan.current
        step = player.asking.step if player.asking else current.id if current else "-"
        rows.add_row(
            "file",
            _bar(player.progress, entries),
            Text(f"{int(player.progress)} of {entries} entries, step {step}"),
        )
        slots = (
            f"{stats.resident:,} slots"
            if stats.budget is None
            else f"{stats.resident:,} of {stats.budget:,} slots"
        )
        rows.add_row(
            "budget",
            _bar(stats.resident, stats.budget or stats.resident),
            f"{slots}, {stats.evicted:,} evicted, {stats.kv_bytes / 1e6:,.0f} MB",
        )
        if stats.planned_residency is None:
            rows.add_row("planned", _bar(0, 1), "no span is still to be read")
        else:
            gap = "" if stats.rotary_gap is None else f", rotary gap {stats.rotary_gap:,.0f}"
            rows.add_row(
                "planned", _bar(stats.planned_residency, 1), f"{stats.planned_residency:.0%} resident{gap}"
            )
        rows.add_row(
            "speed",
            f"{self._rate():,.0f} tokens/s",
            f"{stats.tokens:,} tokens in {player.seconds:,.0f} s, position {stats.next_position:,}"
            + (f" of {stats.limit:,}" if stats.limit else ""),
        )
        parts: list[RenderableType] = [Text(self._title, style="dim"), rows]
        if player.asking is not None:
            parts.append(Text(player.asking.question, style="bold", no_wrap=True, overflow="ellipsis"))
            if player.turn is not None:
                parts.append(Text(player.turn.text[-400:].strip()))
        return Group(*parts)

    def _rate(self) -> float:
        (start, before), (end, after) = self._speed[0], self._speed[-1]
        return (after - before) / (end - start) if end > start else 0.0


def say(text: str) -> None:
    """Write to stdout at once; a terminal gets no control characters that a model made up."""
    sys.stdout.write(_CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1e-9), completed=done, width=24)
