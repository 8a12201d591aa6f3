"""``Held``: a session as the server knows it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.serve.jobs import Run
    from tenure.session import Session


@dataclass(eq=False)
class Held:
    """A session as the server knows it.

    Args:
        id: shown to clients.
        tenant: whose it is.
        salt: see :class:`~tenure.serve.jobs.Job`.
        key: the same.
        session: in memory, or None while it is parked.
        ids: its tokens, while it is parked.
        chain: digest of the client's messages that it has answered or was answering, and their number.
        dirty_since: when it first changed after it was last stored; None while what is stored is what it is.
        raw: it holds a text without messages.
        options: of the session when it was stored; None if they are not known.
        foreign: another model has made it, so it cannot be read here.
        failed: its turns when it could last not be stored; it is tried again after the next one.
    """

    id: str
    tenant: str
    salt: str = ""
    key: str = ""
    session: Session | None = None
    ids: array[int] = field(default_factory=lambda: array("I"))
    chain: bytes = b""
    count: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    turns: int = 0
    priority: int = 0
    keep_until: float = 0.0
    named: bool = False
    temporary: bool = False
    dirty_since: float | None = None
    failed: int | None = None
    raw: bool = False
    options: dict[str, Any] | None = None
    foreign: bool = False
    run: Run | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self.run is not None

    @property
    def dirty(self) -> bool:
        """Whether it has changed since it was stored."""
        return self.dirty_since is not None

    def changed(self) -> None:
        """Note that what is stored of it is no longer what it is."""
        if self.dirty_since is None:
            self.dirty_since = time.time()

    def stored(self) -> None:
        """Note that it has been stored as it is."""
        self.dirty_since = self.failed = None

    @property
    def tokens(self) -> array[int]:
        """Its token ids."""
        return self.ids if self.session is None else self.session.memory.ids
