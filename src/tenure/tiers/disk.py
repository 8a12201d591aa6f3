"""Entries as files of one folder, which several processes and later ones may share."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

import numpy as np

from tenure.errors import ConfigError, TierError
from tenure.files import remove_parts, replace_file
from tenure.tiers.base import SESSIONS, SOON, Entry, Tier
from tenure.tiers.blob import (
    PREFIX_BYTES,
    Blob,
    BrokenError,
    RefusedError,
    TooLargeError,
    body_length,
    check_part,
    header_length,
    read_header,
)
from tenure.tiers.spec import TierSpec

_ENDING = ".tier"
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a folder says that can be read and not written."""

_LOOK = 5.0
"""Seconds after which files of other processes are looked for; longer where looking takes long."""


class DiskTier(Tier):
    """A folder of files, each whole or not there. Reading a file makes it the most recently used.

    Args:
        spec: its options; ``where`` is the folder, made if it is missing.
    """

    kind: ClassVar[str] = "disk"

    def __init__(self, spec: TierSpec) -> None:
        super().__init__(spec)
        self.folder = Path(spec.where)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Files by key, the least recently used first."""
        self._lock = threading.Lock()
        self._look = 0.0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_parts(self.folder)
            self._learn()
        except (OSError, TierError) as error:
            raise ConfigError(
                f"the folder {spec.where} cannot be used: {error}",
                option="tiers",
                way_out="Give a folder that can be written",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are known."""
        with self._lock:
            return sum(self._sizes.values())

    def write(self, key: str, blob: Blob) -> None:
        """See :class:`Tier`. Saved sessions may take the whole capacity, and no more."""
        path = self._path(key)
        prefix = blob.prefix()
        size = len(prefix) + blob.nbytes
        if key.startswith(SESSIONS):
            self._check_sessions(key, size)
        elif size > (self.spec.capacity or 0):
            raise TooLargeError(f"{size:,} bytes are more than its {self.spec.capacity:,}", option=self.name)

        def fill(part: Path) -> None:
            with part.open("wb", buffering=0) as file:
                for data in (memoryview(prefix), blob.body.data):
                    _write_all(file.fileno(), data)

        try:
            replace_file(path, fill)
        except OSError as error:
            kind = RefusedError if error.errno in _REFUSED else TierError
            raise kind(f"{path}: {error.strerror or error}", option=self.name) from error
        with self._lock:
            self._sizes[key] = size
            self._sizes.move_to_end(key)

    def read(self, key: str) -> Blob | None:
        """See :class:`Tier`."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                known = os.fstat(file.fileno())
                if self._expired(key, time.time() - known.st_mtime):
                    self._clear(key)
                    return None
                prefix = file.read(PREFIX_BYTES)
                header = read_header(prefix + file.read(header_length(prefix)))
                if file.tell() + body_length(header) != known.st_size:
                    raise BrokenError("its parts are not as long as its header tells")
                body = np.empty(body_length(header), np.uint8)
                blob = Blob(header, body)
                for number, (start, stop) in enumerate(blob.ranges):
                    _read_all(file.fileno(), body[start:stop].data)
                    check_part(header, number, body[start:stop])
            with suppress(OSError):  # removed meanwhile, or another user's: it was read all the same
                os.utime(path)
        except FileNotFoundError:
            self._lose(key)
            return None
        except OSError as error:
            raise TierError(f"{path}: {error.strerror or error}", option=self.name) from error
        except BrokenError:
            if not key.startswith(
                SESSIONS
            ):  # somebody may still read something off what was asked to be kept
                self._clear(key)
            raise
        with self._lock:
            self._sizes.setdefault(key, known.st_size)
            self._sizes.move_to_end(key)
        return blob

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Tier`."""
        for key in keys:
            self._lose(key)
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError as error:
                raise TierError(f"{key}: {error.strerror or error}", option=self.name) from error

    def has(self, key: str) -> bool:
        """See :class:`Tier`."""
        with self._lock:
            return key in self._sizes

    def holds(self, key: str) -> bool:
        """See :class:`Tier`. What is about to expire counts as gone: writing it again makes it young."""
        try:
            age = time.time() - self._path(key).stat().st_mtime
        except FileNotFoundError:
            self._lose(key)
            return False
        except OSError as error:
            raise TierError(f"{key}: {error.strerror or error}", option=self.name) from error
        return not self._expired(key, age / (1 - SOON))

    def expect(self, keys: Iterable[str]) -> None:
        """See :class:`Tier`."""
        for key in keys:
            with suppress(OSError):
                size = self._path(key).stat().st_size
                with self._lock:
                    self._sizes[key] = size

    def entries(self) -> list[Entry]:
        """See :class:`Tier`."""
        now, found = time.time(), []
        try:
            for path in self.folder.glob(f"*{_ENDING}"):
                with suppress(FileNotFoundError):  # another process has removed it
                    known = path.stat()
                    key = unquote(path.name.removesuffix(_ENDING))
                    found.append(Entry(key, known.st_size, max(0.0, now - known.st_mtime)))
        except OSError as error:
            raise TierError(str(error), option=self.name) from error
        return sorted(found, key=lambda entry: -entry.age)

    def collect(self) -> int:
        """See :class:`Tier`. Files of other processes become known."""
        count = remove_parts(self.folder)
        old = [entry.key for entry in self._learn() if self._expired(entry.key, entry.age)]
        self.delete(old)
        return count + len(old)

    def overflow(self) -> list[str]:
        """See :class:`Tier`. The capacity is the folder's, however many processes share it."""
        if time.monotonic() >= self._look:
            with suppress(TierError):  # what is known already tells enough
                self._learn()
        over, keys = self.nbytes - (self.spec.capacity or 0), []
        with self._lock:
            for key, size in self._sizes.items():
                if over <= 0:
                    break
                if not key.startswith(SESSIONS):
                    keys.append(key)
                    over -= size
        return keys

    def _learn(self) -> list[Entry]:
        """All entries, which are known from now on, those of other processes too."""
        with self._lock:
            before = set(self._sizes)
        start = time.monotonic()
        entries = self.entries()
        end = time.monotonic()
        self._look = end + max(_LOOK, 20 * (end - start))
        with self._lock:
            # What was written or removed while the folder was listed is as this process knows it.
            gone, new = before - set(self._sizes), self._sizes.keys() - before
            later = [(key, self._sizes[key]) for key in self._sizes if key in new]
            listed = [(entry.key, entry.nbytes) for entry in entries if entry.key not in gone]
            self._sizes = OrderedDict([*(one for one in listed if one[0] not in new), *later])
        return entries

    def _expired(self, key: str, age: float) -> bool:
        return self.spec.ttl is not None and age > self.spec.ttl and not key.startswith(SESSIONS)

    def _check_sessions(self, key: str, size: int) -> None:
        held = sum(
            entry.nbytes
            for entry in self.entries()  # other processes save sessions too
            if entry.key.startswith(SESSIONS) and entry.key != key
        )
        if held + size > (self.spec.capacity or 0):
            raise TierError(
                f"{held:,} bytes of saved sessions and {size:,} more pass its {self.spec.capacity:,}",
                option=self.name,
            )

    def _clear(self, key: str) -> None:
        """Remove what nobody can use; what cannot be removed is only forgotten."""
        with suppress(TierError):
            self.delete([key])

    def _lose(self, key: str) -> None:
        with self._lock:
            self._sizes.pop(key, None)

    def _path(self, key: str) -> Path:
        return self.folder / (quote(key, safe="") + _ENDING)


def _write_all(number: int, data: memoryview) -> None:
    while data:
        data = data[os.write(number, data) :]


def _read_all(number: int, out: memoryview) -> None:
    while out:
        count = os.readv(number, [out])
        if not count:
            raise BrokenError("the file ends too early")
        out = out[count:]
