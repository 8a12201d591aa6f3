"""The user's model cache: where things lie, what is complete, and the lock that keeps two processes apart.

``models/KEY`` appears by one rename of a finished folder, so whatever has that name is whole. Half-made
folders have names that begin with a dot, and only the holder of the lock of KEY makes or removes them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import ModelError
from tenure.models.folder import inspect_folder
from tenure.paths import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMAT = 1  # of converted folders; an older one is made again
MANIFEST = "tenure.json"


@dataclass(frozen=True, slots=True)
class Store:
    """The cache folder.

    Args:
        root: its path; it need not exist.
    """

    root: Path

    @classmethod
    def at(cls, cache_dir: Path | None = None) -> Store:
        """``cache_dir``, else ``$TENURE_CACHE``, else the platform's cache folder for the user."""
        return cls(cache_folder() if cache_dir is None else cache_dir.expanduser().absolute())

    def model(self, key: str) -> Path:
        """Where the finished folder of ``key`` is, or will be."""
        return self.root / "models" / key

    def downloads(self, key: str) -> Path:
        """Where the downloads of ``key`` wait for conversion."""
        return self.root / "downloads" / key

    def manifest(self, key: str) -> dict[str, Any] | None:
        """What is noted about a finished folder; None if there is none, or one that has to be made again."""
        folder = self.model(key)
        try:
            data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            sizes = {name: (folder / name).stat().st_size for name in data["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return data if data.get("format") == FORMAT and sizes == data["files"] else None

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of ``key``, which a killed process lets go; ``on_wait``: another process has it."""
        from filelock import FileLock, Timeout

        folder = self.root / "locks"
        with self.disk_errors():
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{key}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                on_wait()
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn a full disk, or a cache that cannot be written, into an error that a user can act on."""
        try:
            yield
        except OSError as error:
            if error.errno not in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EACCES,
                errno.EPERM,
                errno.EROFS,
                errno.ENOTDIR,
            ):
                raise
            raise ModelError(
                f"the model cache {self.root} cannot be written: {error.strerror}",
                option="TENURE_CACHE",
                way_out="Free some space, or set TENURE_CACHE to a folder that you can write",
            ) from error

    def build(self, key: str, source: dict[str, Any], make: Callable[[Path], None]) -> dict[str, Any]:
        """Let ``make`` fill a new folder, and name it when it is safe on disk. The caller holds the lock.

        Args:
            key: name of the finished folder.
            source: where the model came from, for the manifest.
            make: gets an empty folder to fill.

        Returns:
            The manifest of the finished folder.
        """
        final = self.model(key)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.clean(key)
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.tmp-", dir=final.parent))
        folder.chmod(0o755)  # mkdtemp gives 0700, which is wrong for a cache that users share
        try:
            make(folder)
            data = _write_manifest(folder, key, source)
            sync_folder(folder)
            self.drop(key)  # incomplete or of an older format, else nobody would build
            os.replace(folder, final)
            sync_folder(final.parent, files=False)
            return data
        finally:
            self.clean(key)

    def drop(self, key: str) -> None:
        """Take the finished folder of ``key`` out of sight at once; `clean` removes it."""
        final = self.model(key)
        if final.exists():
            os.replace(final, final.with_name(f".{key}.tmp-old-{os.getpid()}"))

    def remove(self, key: str) -> None:
        """Delete the model ``key`` and its downloads, waiting for whoever is making it."""
        with self.lock(key), self.disk_errors():
            self.drop(key)
            self.clean(key)
            if self.downloads(key).exists():
                shutil.rmtree(self.downloads(key))

    def clean(self, key: str) -> None:
        """Remove what killed calls left half-made. The caller holds the lock."""
        for stale in self.model(key).parent.glob(f".{key}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)


def _write_manifest(folder: Path, key: str, source: dict[str, Any]) -> dict[str, Any]:
    facts = inspect_folder(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    data = {
        "format": FORMAT,
        "name": key,
        "source": source,
        "fingerprint": facts.fingerprint,
        "weight_bytes": facts.weight_bytes,
        "parameters": facts.parameters,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return data


def sync_folder(folder: Path, *, files: bool = True) -> None:
    """Force ``folder``, and with ``files`` all its files, to disk."""
    if os.name == "nt":
        return  # folders cannot be opened there
    for path in (*(folder.iterdir() if files else ()), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def disk_bytes(path: Path) -> int:
    """Bytes of all files under ``path``; 0 if it does not exist."""
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file()) if path.exists() else 0


def require_disk(path: Path, needed: int) -> None:
    """Refuse what would not fit the disk of ``path``.

    Raises:
        ModelError: with both sizes.
    """
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if needed > free:
        raise ModelError(
            f"fetching and converting needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free",
            option="TENURE_CACHE",
            way_out="Free some, set TENURE_CACHE to a larger disk, or use a smaller model",
        )
