"""Answers under way: begun in their sessions, handed out piece by piece, closed in whatever way they end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tenure.errors import MessageError
from tenure.serve.errors import ApiError, api_error
from tenure.serve.events import Bus, Evicted, Refused, TurnEnded
from tenure.serve.held import Held
from tenure.serve.jobs import Called, Failed, Finished, Job, Run, Text
from tenure.serve.logprobs import LogStream
from tenure.serve.store import Store
from tenure.tiers.archive import span_archive
from tenure.toolcalls import ToolCall

if TYPE_CHECKING:
    from tenure.session import Session

_log = logging.getLogger("tenure.serve")


class Answers:
    """The answers that an engine works on, used on its thread alone.

    Args:
        store: of the sessions.
        bus: told of what was evicted and of every turn's end.
    """

    def __init__(self, store: Store, bus: Bus) -> None:
        self.store = store
        self.bus = bus
        self.runs: list[Run] = []
        self.freed = False
        """Whether there may be more room since requests that wait were tried."""

    def begin(self, job: Job, held: Held, index: int, prompt: int, cached: int, restored: int) -> None:
        """Start a turn.

        Args:
            job: the request.
            held: the session that answers.
            index: of the answer among those of the request.
            prompt: tokens of the conversation.
            cached: how many of them the session had.
            restored: spans that had come back to the session before.
        """
        session = session_of(held)
        options = job.options
        if index and options.seed is not None:
            options = replace(options, seed=(options.seed + index) % 2**63)
        turn = session.start_turn(options, calls=job.calls)
        ledger = session.memory.ledger
        run = Run(job, held, index, turn, prompt, cached, ledger.evicted_ever, restored, _losses(session))
        if options.logprobs is not None:
            run.logs = LogStream(session.engine.tokenizer)
        held.run = run
        job.runs.append(run)
        self.runs.append(run)

    def hand_out(self, run: Run, now: float) -> None:
        """Give the client what a forward has added, and close what is done; ``now`` is on the monotonic clock."""
        turn = run.turn
        if run.index == 0 and len(run.job.runs) < run.job.n and (turn.ids or turn.done):
            self._branch_out(run)
        if len(turn.ids) > run.tokens:
            run.tokens = len(turn.ids)
            if run.last is None:
                run.first = now - run.job.arrival
            else:
                run.gaps.append(now - run.last)
            run.last = now
        if run.closed:
            return
        if turn.done:
            self.close(run, turn.error)
        else:
            self._emit_parts(run)

    def _branch_out(self, run: Run) -> None:
        """Begin the further answers of a request, now that their prompt has been read once."""
        try:
            for index in range(1, run.job.n):
                held = self.store.fork(run.held, temporary=True)
                session = session_of(held)
                session.memory.drop_backlog()  # the first answer's first token
                self.begin(run.job, held, index, run.prompt_tokens, run.prompt_tokens, brought_back(held))
        except Exception as error:
            self.close(run, error)

    def _emit_parts(self, run: Run, *, last: bool = False) -> None:
        for part in run.turn.take_parts():
            if isinstance(part, str):
                self._emit_text(run, part)
            else:
                run.job.emit(Called(run.index, run.calls, readable(part)))
                run.calls += 1
        if last and run.logs is not None and (rest := run.logs.take(run.turn, last=True)):
            run.job.emit(Text(run.index, "", rest))

    def _emit_text(self, run: Run, text: str) -> None:
        choices = [] if run.logs is None else run.logs.take(run.turn)
        run.job.emit(Text(run.index, text, choices))

    def close(self, run: Run, error: Exception | None = None) -> None:
        """End an answer in whatever way; the session is free afterwards. Safe to call twice."""
        if run.closed:
            return
        turn, held, job = run.turn, run.held, run.job
        self.runs.remove(run)
        self.freed = True
        run.closed, held.run = True, None
        held.used = time.time()
        turn.calls[:] = [readable(call) for call in turn.calls]  # a template takes texts only
        try:
            turn.close()
        except MessageError as refused:
            _log.warning("the template does not take what a turn has called: %s", refused)
        except Exception as broken:
            error = error or broken
        held.turns += 1
        held.changed()
        session = session_of(held)
        reason = "error" if error is not None else str(turn.reason)
        if reason == "stop" and turn.calls:
            reason = "tool_calls"
        self._report(run, session, reason)
        if error is not None:
            fail(self.bus, job, error)
        elif not job.cancelled:
            self._emit_parts(run, last=True)
            job.emit(Finished(run.index, reason, len(turn.ids), self._counters(run, session)))
        if held.temporary:
            self.store.delete(held)
        if error is not None:
            for other in [other for other in self.runs if other.job is job]:
                self.close(other)

    def _counters(self, run: Run, session: Session) -> dict[str, Any]:
        ledger = session.memory.ledger
        return {
            "session_id": run.held.id,
            "resident": ledger.rows,
            "budget": session.config.budget,
            "evicted": max(0, ledger.evicted_ever - run.evicted),
            "restored": max(0, brought_back(run.held) - run.restored),
        }

    def _report(self, run: Run, session: Session, reason: str) -> None:
        who: dict[str, Any] = {"tenant": run.job.tenant, "session": run.held.id}
        for why, slots in (_losses(session) - Counter(run.reasons)).items():
            self.bus.report(Evicted(**who, slots=slots, reason=why))
        self.bus.report(
            TurnEnded(
                **who,
                request=run.job.id,
                reason=reason,
                prompt_tokens=run.prompt_tokens,
                cached_tokens=run.cached_tokens,
                completion_tokens=len(run.turn.ids),
                first_token=run.first,
                seconds=time.monotonic() - run.job.arrival,
                gaps=tuple(run.gaps),
            )
        )


def fail(bus: Bus, job: Job, error: Exception) -> None:
    """End a request with an error."""
    refused = api_error(error)
    if refused.status >= 500 and not isinstance(error, ApiError):
        _log.error("request %s failed: %s", job.id, type(error).__name__, exc_info=error)
    count(bus, job.tenant, refused)
    job.emit(Failed(refused))
    job.cancelled = True


def count(bus: Bus, tenant: str, refused: ApiError) -> None:
    """Report a refusal, once however many hands it passes through."""
    if not refused.counted:
        refused.counted = True
        bus.report(Refused(tenant=tenant, status=refused.status, code=refused.code))


def readable(call: ToolCall) -> ToolCall:
    """A call as text; a model may write half a surrogate pair, which JSON allows and no encoding takes."""
    name, arguments = (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for text in (call.name, call.arguments)
    )
    return replace(call, name=name, arguments=arguments)


def session_of(held: Held) -> Session:
    """The session, which must be in memory."""
    if held.session is None:
        raise ApiError(500, "internal_error", "a parked session was used")
    return held.session


def brought_back(held: Held) -> int:
    """Spans that have come back to a session from the tiers since it is in memory."""
    archive = span_archive(session_of(held).memory.archive)
    return 0 if archive is None else int(archive.counters.to_json().get("hits", 0))


def _losses(session: Session) -> Counter[str]:
    total: Counter[str] = Counter()
    for span in session.memory.ledger.spans:
        total.update(span.evicted)
    return total
