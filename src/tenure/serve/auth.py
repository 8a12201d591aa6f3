"""API keys: made once and shown once; only a salted digest is kept.

A key holds 256 random bits, so no guessing helps against the digest, and a fast one (BLAKE2b) is as good as a slow
one. A key names its tenant; tenants see nothing of each other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tenure.errors import ConfigError
from tenure.files import replace_file
from tenure.serve.errors import ApiError

_KEY = re.compile(r"tenure-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class StoredKey:
    """What is kept of a key."""

    id: str
    tenant: str
    salt: str
    digest: str
    created: int


class Keys:
    """The keys of a file; a change of the file is seen at once.

    Args:
        path: of the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, StoredKey] = {}

    def list(self) -> list[StoredKey]:
        """All keys, without what would let anybody in."""
        self._refresh()
        return list(self._known.values())

    def add(self, tenant: str) -> str:
        """Make a key for a tenant and return it; it cannot be shown again.

        Raises:
            ConfigError: the tenant's name has other characters than letters, digits, ``_``, ``.`` and ``-``.
        """
        if not _TENANT.fullmatch(tenant):
            raise ConfigError(
                f"{tenant!r} cannot be a tenant's name",
                option="tenant",
                way_out="Use 1 to 64 letters, digits, '_', '.' and '-'",
            )
        self._refresh()
        name, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
        self._known[name] = StoredKey(name, tenant, salt, _digest(secret, salt), int(time.time()))
        self._write()
        return f"tenure-{name}-{secret}"

    def remove(self, name: str) -> None:
        """Let a key in no longer.

        Raises:
            ConfigError: there is no such key.
        """
        self._refresh()
        if self._known.pop(name, None) is None:
            raise ConfigError(
                f"there is no key {name!r}", option="id", way_out="See `tenure serve keys list`"
            )
        self._write()

    def tenant(self, header: str | None) -> str:
        """Who an ``Authorization`` header is.

        Raises:
            ApiError: 401.
        """
        scheme, _, token = (header or "").partition(" ")
        match = _KEY.fullmatch(token.strip()) if scheme.lower() == "bearer" else None
        self._refresh()
        known = self._known.get(match[1]) if match else None
        if match and known and hmac.compare_digest(_digest(match[2], known.salt), known.digest):
            return known.tenant
        raise ApiError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer tenure-...")

    def _refresh(self) -> None:
        try:
            facts = self.path.stat()
            if (stamp := (facts.st_mtime_ns, facts.st_ino)) == self._stamp:
                return
            data = json.loads(self.path.read_text(encoding="utf-8"))
            self._known = {item["id"]: StoredKey(**item) for item in data["keys"]}
            self._stamp = stamp
        except FileNotFoundError:
            self._known, self._stamp = {}, None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the file of keys cannot be read: {type(error).__name__}",
                option=str(self.path),
                way_out="Restore it, or remove it and make new keys",
            ) from error

    def _write(self) -> None:
        text = json.dumps({"keys": [asdict(key) for key in self._known.values()]}, indent=1) + "\n"

        def write(part: Path) -> None:
            os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
            part.chmod(0o600)
            part.write_text(text, encoding="utf-8")

        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, write)


def _digest(secret: str, salt: str) -> str:
    return hashlib.blake2b(secret.encode(), salt=bytes.fromhex(salt), digest_size=32).hexdigest()
