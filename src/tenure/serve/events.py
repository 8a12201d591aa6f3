"""What happens in the server, as events: metrics, traces and the page listen, nothing else keeps counts.

An event is reported on the thread where it happens, mostly the engine's; a listener must be quick and must not
raise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened.

    Args:
        tenant: whose session it was; "" for none.
        session: its id; "" for none.
        time: seconds since the epoch.
    """

    tenant: str = ""
    session: str = ""
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Queued(Event):
    """A request waits for its turn. ``waiting`` counts it in. Reported where the request is handled."""

    request: str
    waiting: int


@dataclass(frozen=True, kw_only=True)
class TurnStarted(Event):
    """A session has been found or made for a request, and its prompt is about to be computed."""

    request: str
    prompt_tokens: int
    cached_tokens: int
    queued: float
    how: str
    """``new``, ``continued`` or ``branched``."""


@dataclass(frozen=True, kw_only=True)
class TurnEnded(Event):
    """An answer is complete, or was cancelled or failed. Times are in seconds."""

    request: str
    reason: str
    """``stop``, ``length``, ``tool_calls``, ``cancel`` or ``error``."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token: float | None
    """From the arrival of the request."""
    seconds: float
    gaps: tuple[float, ...] = ()
    """Between tokens."""


@dataclass(frozen=True, kw_only=True)
class Stepped(Event):
    """One forward of the engine."""

    prefill: int
    decode: int
    seconds: float
    sessions: int
    waiting: int
    """Requests that wait for their turn."""


@dataclass(frozen=True, kw_only=True)
class Evicted(Event):
    """Slots left a session's cache, summed over its ledger's layers."""

    slots: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Traffic(Event):
    """Spans or a whole session went to a tier or came back."""

    tier: str
    direction: str
    """``out`` or ``in``."""
    outcome: str
    """``hit``, ``miss``, ``error`` or ``stored``."""
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionChanged(Event):
    """A session was ``opened``, ``parked``, ``restored``, ``forked`` or ``deleted``."""

    change: str


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """A request was refused."""

    status: int
    code: str


@dataclass(frozen=True, kw_only=True)
class Answered(Event):
    """An HTTP response began. ``route`` is the path's pattern, never the path."""

    method: str
    route: str
    status: int
    seconds: float


class Bus:
    """Hands each event to every listener."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[Event], None], ...] = ()
        self._lock = threading.Lock()

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call a function for every event from now on; returns what ends that."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end

    def report(self, event: Event) -> None:
        """Tell all listeners."""
        for listener in self._listeners:
            listener(event)
