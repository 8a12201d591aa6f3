"""How fetching and converting report that they are alive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import types

    import rich.progress


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """State of one task.

    Attributes:
        task: stable name; a task begins with its first event.
        label: what is happening now, for people.
        done, total: in ``unit``; ``total`` is None if unknown. The task has ended when they are equal.
        unit: "bytes" or "steps".
    """

    task: str
    label: str
    done: int
    total: int | None
    unit: str = "bytes"


Progress = Callable[[ProgressEvent], None]
"""Receives every event. Called from the calling thread, a few times a second at most."""


def quiet(event: ProgressEvent) -> None:
    """Report nothing."""


class TerminalProgress:
    """Bars on stderr if it is a terminal, else one line a label. A context manager, and a `Progress`.

    Args:
        file: where to draw. It is kept, so that redirecting ``sys.stderr`` meanwhile does not move the bars.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file or sys.stderr
        self._bars = _bars(self._file) if self._file.isatty() else None
        self._ids: dict[str, rich.progress.TaskID] = {}
        self._label = ""

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, event: ProgressEvent) -> None:
        if self._bars is None:
            if event.label != self._label:
                print(event.label, file=self._file, flush=True)
                self._label = event.label
            return
        amount = _amount(event)
        if event.task not in self._ids:
            self._bars.start()  # only now: a call with nothing to do draws nothing
            self._ids[event.task] = self._bars.add_task(event.label, total=event.total, amount=amount)
        self._bars.update(
            self._ids[event.task],
            description=event.label,
            completed=event.done,
            total=event.total,
            amount=amount,
        )


def _bars(file: IO[str]) -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),  # names of files and models
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=Console(file=file),
        redirect_stderr=False,
        redirect_stdout=False,
    )


def _amount(event: ProgressEvent) -> str:
    if event.unit != "bytes":
        return f"{event.done}/{event.total}" if event.total else str(event.done)
    from rich.filesize import decimal

    return f"{decimal(event.done)} of {decimal(event.total)}" if event.total else decimal(event.done)
