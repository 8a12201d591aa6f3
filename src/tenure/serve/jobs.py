"""A request for answers, on its way through the engine's thread, and what it hears back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tenure.sampling import SamplingOptions

if TYPE_CHECKING:
    from tenure.conversation import Conversation
    from tenure.serve.errors import ApiError
    from tenure.serve.held import Held
    from tenure.serve.logprobs import LogStream, Placed
    from tenure.toolcalls import CallForm, ToolCall
    from tenure.turn import Turn


@dataclass(frozen=True)
class Started:
    """The prompt is about to be computed."""

    session: str
    prompt_tokens: int
    cached_tokens: int
    queued: float
    how: str
    hints: list[dict[str, Any]]


@dataclass(frozen=True)
class Text:
    """More of an answer."""

    index: int
    text: str
    choices: list[Placed]


@dataclass(frozen=True)
class Called:
    """An answer calls a tool; ``number`` counts its calls from 0."""

    index: int
    number: int
    call: ToolCall


@dataclass(frozen=True)
class Finished:
    """One answer is complete."""

    index: int
    reason: str
    tokens: int
    tenure: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The request ends with an error; nothing follows."""

    error: ApiError


Reply = Started | Text | Called | Finished | Failed


@dataclass(eq=False)
class Job:
    """A request for answers.

    Args:
        id: of the request.
        tenant: whose it is.
        conversation: all of it, rendered.
        chain: a digest of the messages up to each one; the last stands for all of them.
        options: of the sampling.
        emit: called on the engine's thread for each reply; must be quick.
        raw: a text without messages.
        n: answers wanted.
        session: the session that the client named, if any.
        salt: sessions with another one are never shared.
        key: names requests that belong together; decides between equally good sessions.
        priority: higher goes first.
        ttl: seconds that the session should stay in memory after the answer.
        calls: how calls of tools are written in the answers; None looks for none.
        hints: what became of them, for the response.
        deadline: when waiting for room ends, on the monotonic clock.
    """

    id: str
    tenant: str
    conversation: Conversation
    chain: list[bytes]
    options: SamplingOptions
    emit: Callable[[Reply], None]
    raw: bool = False
    n: int = 1
    session: str | None = None
    salt: str = ""
    key: str = ""
    priority: int = 0
    ttl: float = 0.0
    calls: CallForm | None = None
    hints: list[dict[str, Any]] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    deadline: float = float("inf")
    cancelled: bool = False
    tried: bool = False
    runs: list[Run] = field(default_factory=list)

    @cached_property
    def wanted(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The conversation's ids."""
        return np.asarray(self.conversation.ids, dtype=np.uint32)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be generated."""
        return bool(self.runs) and all(run.turn is None or run.closed for run in self.runs)


@dataclass(eq=False)
class Run:
    """One answer under way."""

    job: Job
    held: Held
    index: int
    turn: Turn
    prompt_tokens: int
    cached_tokens: int
    evicted: int
    restored: int
    reasons: dict[str, int]
    logs: LogStream | None = None
    closed: bool = False
    calls: int = 0
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
