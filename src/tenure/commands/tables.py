"""Where commands print their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE = 400
"""Columns of a table that another program reads: a row stays a line."""


def table_console() -> Console:
    """Stdout, as wide as the terminal; where there is none, so wide that nothing is cut or wrapped."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = _PIPE
    return console
