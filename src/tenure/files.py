"""Files that are whole or not there: a write never shows a half-written file under its name.

A file is written in a temporary folder beside its name, flushed to the disk, and renamed; the rename is flushed with
the folder. A process that is killed on the way leaves the old file and a temporary folder, which :func:`remove_parts`
takes away at the next start. A temporary folder is locked while it is in use, so that one that is still at work is
told from one that was left behind.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":  # which has no such locks
    import fcntl

_PART = ".tenure-part"
"""Ending of a temporary name; the name begins with a dot."""


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under its name as a whole.

    Args:
        path: its name; an older file there is replaced.
        write: writes the content to the path that it is given, in a folder that is its own.

    Raises:
        OSError: or whatever ``write`` raises; the older file is as it was.
    """
    with _part(path.parent) as folder:
        part = folder / "new"
        write(part)
        _flush(part)
        part.replace(path)
        _flush(path.parent)


def remove_parts(folder: Path) -> int:
    """Remove what killed processes have left of unfinished files in a folder.

    Returns:
        How many there were.
    """
    count = 0
    if sys.platform == "win32":
        return count
    for part in folder.glob(f".*{_PART}"):
        with suppress(OSError):  # in work, or gone already
            number = os.open(part, os.O_RDONLY)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(part)
                count += 1
            finally:
                os.close(number)
    return count


@contextmanager
def _part(parent: Path) -> Iterator[Path]:
    """A locked temporary folder, removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=".", suffix=_PART, dir=parent))
        if sys.platform == "win32":
            break
        with suppress(FileNotFoundError):  # taken for one left behind before it was locked
            number = os.open(folder, os.O_RDONLY)
            fcntl.flock(number, fcntl.LOCK_EX)
            if folder.exists():
                break
            os.close(number)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if sys.platform != "win32":
            os.close(number)


def _flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    folder = path.is_dir()
    if folder and sys.platform == "win32":
        return  # Windows cannot, and need not
    number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)
