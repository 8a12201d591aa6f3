"""Where sessions go that are not in memory: files of a folder, one a session, named by a digest of its id.

A session's file is replaced as a whole or not at all. Beside it stands a small index entry (whose it is, its token ids
for finding it again); where the two differ after a crash, the session's file is right.
"""

from __future__ import annotations

import base64
import json
import logging
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tenure.files import remove_parts, replace_file
from tenure.serve.held import Held

if TYPE_CHECKING:
    from tenure.config import SessionConfig
    from tenure.engine import Engine
    from tenure.session import Session

_log = logging.getLogger("tenure.serve")
_FACTS = ("id", "tenant", "salt", "key", "count", "created", "used", "turns", "priority", "named")


class Parking(Protocol):
    """Stores sessions and gives them back exactly as they were."""

    def found(self) -> Iterable[Held]:
        """Sessions of an earlier run of the server."""
        ...

    def store(self, held: Held) -> int:
        """Store a session that is in memory; what was stored of it before is replaced, whole or not at all.

        Returns:
            Bytes written.
        """
        ...

    def load(self, held: Held) -> Session:
        """The session as it was stored.

        Raises:
            SaveError: it is not there, or not what was stored.
            ConfigError: another model made it, or there is no memory for it.
        """
        ...

    def forget(self, held: Held) -> None:
        """Remove what was stored of a session."""
        ...


class FileParking:
    """Sessions in a folder.

    Args:
        engine: makes the sessions again.
        folder: of this server alone.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_parts(folder)

    def found(self) -> Iterable[Held]:
        """Sessions that the folder has; entries that cannot be read are left out."""
        for index in sorted(self._folder.glob("*.json")):
            try:
                data = json.loads(index.read_text(encoding="utf-8"))
                held = Held(**{name: data[name] for name in _FACTS})
                held.chain = bytes.fromhex(data["chain"])
                held.ids = array("I", base64.b64decode(data["ids"]))
                held.raw = bool(data.get("raw"))
                held.options = None if data.get("options") is None else dict(data["options"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("an entry of the session folder cannot be read: %s", type(error).__name__)
                continue
            if index.stem == _name(held) and self._path(held).exists():
                yield held

    def store(self, held: Held) -> int:
        """See :class:`Parking`."""
        if held.session is None:
            return 0
        written = held.session.save(self._path(held))
        held.options = options_of(held.session.config)
        data: dict[str, Any] = {name: getattr(held, name) for name in _FACTS}
        data |= {
            "chain": held.chain.hex(),
            "options": held.options,
            "raw": held.raw,
            "ids": base64.b64encode(held.session.memory.ids.tobytes()).decode(),
        }
        text = json.dumps(data)
        replace_file(self._index(held), lambda part: _write(part, text))
        return written

    def load(self, held: Held) -> Session:
        """See :class:`Parking`."""
        return self._engine.restore(self._path(held))

    def forget(self, held: Held) -> None:
        """See :class:`Parking`."""
        self._index(held).unlink(missing_ok=True)
        self._path(held).unlink(missing_ok=True)

    def _path(self, held: Held) -> Path:
        return self._folder / f"{_name(held)}.session"

    def _index(self, held: Held) -> Path:
        return self._folder / f"{_name(held)}.json"


def options_of(config: SessionConfig) -> dict[str, Any]:
    """A session's options, the same for those that were written down and read again."""
    options: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return options


def _name(held: Held) -> str:
    """A file name that no id can escape from."""
    return blake2b(json.dumps([held.tenant, held.id]).encode(), digest_size=16).hexdigest()


def _write(part: Path, text: str) -> None:
    part.write_text(text, encoding="utf-8")
