"""Where sessions go that are not in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tenure.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tenure.serve.store import Held
    from tenure.session import Session


class Parking(Protocol):
    """Stores sessions and gives them back exactly as they were."""

    def found(self) -> Iterable[Held]:
        """Sessions of an earlier run of the server."""
        ...

    def store(self, held: Held) -> None:
        """Store a session; what was stored of it before is replaced, whole or not at all."""
        ...

    def load(self, held: Held) -> Session:
        """The session as it was stored."""
        ...

    def forget(self, held: Held) -> None:
        """Remove what was stored of a session."""
        ...


class NoParking:
    """Keeps nothing: sessions stay in memory, and a request for which there is no room waits."""

    def found(self) -> Iterable[Held]:
        """None."""
        return ()

    def store(self, held: Held) -> None:
        """Refused."""
        raise ApiError(503, "no_parking", "sessions cannot be parked here", retry_after=5)

    def load(self, held: Held) -> Session:
        """Refused."""
        raise ApiError(404, "session_not_found", "the session was not stored", param="session_id")

    def forget(self, held: Held) -> None:
        """Nothing to do."""
