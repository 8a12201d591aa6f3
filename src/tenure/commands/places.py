"""Places that a command writes to at its end, looked at before it begins: a session takes long to play."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.errors import ConfigError, SaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tenure.engine import Engine

_ELSEWHERE = "Name another place"


def check_save(place: str | None, engine: Engine | None = None) -> None:
    """Refuse a place that no session can be saved to.

    Args:
        place: a file or ``tier:NAME``; None for none.
        engine: where it is loaded, its tiers are looked at too.

    Raises:
        ConfigError: the place cannot be written, or no tier outlives the engine.
    """
    if place is None:
        return
    from tenure import sessiontier

    if not place.startswith(sessiontier.SCHEME):
        check_file(Path(place), "save")
    elif engine is not None:
        sessiontier.check(engine, place.removeprefix(sessiontier.SCHEME))


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        ConfigError: its format is unknown, the place cannot be written, or matplotlib is not there.
    """
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed", option="plot", way_out="Install tenure with the extra 'bench'"
        ) from error
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(
            f"{path.suffix or path.name!r} is no format of pictures",
            option="plot",
            way_out="Known: " + ", ".join(known),
        )
    check_file(path, "plot")


def check_file(path: Path, option: str) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: it is a folder, or the folder that it would be in cannot be made or written.
    """
    cause = None
    try:
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if path.is_dir():
            cause = f"{path} is a folder"
        elif not folder.is_dir():
            cause = f"{folder} is no folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            cause = f"the folder {folder} may not be written"
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
    if cause is not None:
        raise ConfigError(f"could not be written: {cause}", option=option, way_out=_ELSEWHERE)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Errors of what is written are those of an option.

    Raises:
        SaveError: with the cause.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise SaveError(f"could not be written: {cause}", option=option, way_out=_ELSEWHERE) from error
