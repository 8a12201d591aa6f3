"""Responses that were given: what ``previous_response_id`` goes on from. Kept in files where the server has a folder."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tenure.files import remove_parts, replace_file
from tenure.serve.errors import ApiError

_log = logging.getLogger("tenure.serve")


@dataclass(frozen=True)
class Given:
    """A response.

    Args:
        id: of the response.
        tenant: whose it is.
        previous: the response that it went on from.
        messages: chat messages that it added: the new input, and the answer.
        session: that answered.
        body: the response object.
    """

    id: str
    tenant: str
    previous: str | None
    messages: list[dict[str, Any]]
    session: str
    body: dict[str, Any]


class Responded:
    """The responses of all tenants; the oldest are forgotten beyond a number.

    Args:
        folder: where they are kept; None keeps them in memory only.
        most: responses that are kept.
    """

    def __init__(self, folder: Path | None, most: int = 100_000) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Given] = OrderedDict()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_parts(folder)
            files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files:
                try:
                    given = Given(**json.loads(file.read_text(encoding="utf-8")))
                    self._known[given.tenant, given.id] = given
                except (OSError, ValueError, TypeError) as error:
                    _log.warning("a stored response cannot be read: %s", type(error).__name__)

    def add(self, given: Given) -> None:
        """Keep a response. Writes a file: not for the event loop.

        Where that fails, on a full disk for instance, the answer stands all the same, and is kept until the server ends.
        """
        with self._lock:
            self._known[given.tenant, given.id] = given
            gone = [self._known.popitem(last=False)[1] for _ in range(len(self._known) - self._most)]
        if self._folder is not None:
            text = json.dumps(asdict(given))
            try:
                replace_file(self._path(given), lambda part: _write(part, text))
            except OSError as error:
                _log.warning("response %s is kept in memory only: %s", given.id, error.strerror)
        for old in gone:
            self._unlink(old)

    def get(self, tenant: str, name: str, param: str | None = None) -> Given:
        """A tenant's response.

        Raises:
            ApiError: 404.
        """
        given = self._known.get((tenant, name))
        if given is None:
            raise ApiError(404, "response_not_found", "there is no such response", param=param)
        return given

    def history(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """All messages up to and with a response.

        Raises:
            ApiError: 404, also where a response before it was deleted.
        """
        chain = []
        at: str | None = name
        while at is not None:
            given = self.get(tenant, at, "previous_response_id")
            chain.append(given.messages)
            at = given.previous
        return [message for messages in reversed(chain) for message in messages]

    def delete(self, tenant: str, name: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404.
        """
        given = self.get(tenant, name)
        with self._lock:
            self._known.pop((tenant, name), None)
        self._unlink(given)

    def _unlink(self, given: Given) -> None:
        if self._folder is not None:
            self._path(given).unlink(missing_ok=True)

    def _path(self, given: Given) -> Path:
        name = blake2b(json.dumps([given.tenant, given.id]).encode(), digest_size=16).hexdigest()
        return Path(str(self._folder)) / f"{name}.json"


def _write(part: Path, text: str) -> None:
    part.write_text(text, encoding="utf-8")
