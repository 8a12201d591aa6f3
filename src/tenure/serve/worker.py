"""The engine's thread: takes requests in, steps all sessions together, hands text out.

Everything that touches a session runs here, between two forwards. Other threads call :meth:`Worker.call` for a
result or :meth:`Worker.submit` for a stream of replies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tenure import timing
from tenure.serve.answers import Answers, fail
from tenure.serve.errors import ApiError, api_error
from tenure.serve.events import Bus, Queued, Stepped
from tenure.serve.held import Held
from tenure.serve.jobs import Job, Run
from tenure.serve.pace import Pacer
from tenure.serve.starting import Starter
from tenure.serve.store import Store

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig

_log = logging.getLogger("tenure.serve")
_T = TypeVar("_T")
_CALLS = 16
"""Calls that are run between two forwards at most."""


class Worker(threading.Thread):
    """Runs an engine for many requests.

    Args:
        engine: used by this thread alone from now on.
        config: of the server.
        store: of its sessions.
        bus: told of every turn and every step.
        durable: sessions outlive the server, so what has changed is stored while nobody waits, and at the end.
    """

    def __init__(
        self, engine: Engine, config: ServeConfig, store: Store, bus: Bus, *, durable: bool = True
    ) -> None:
        super().__init__(name="tenure-engine", daemon=True)
        self.engine = engine
        self.config = config
        self.store = store
        self.bus = bus
        self.durable = durable
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._incoming: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._wake = threading.Condition()
        self._refusing = False
        self._left = False
        self._answers = Answers(store, bus)
        self._starter = Starter(store, self._answers, bus)
        self._stopping: float | None = None
        self._pacer = Pacer(config.session.chunk, config.smooth)

    # -- from other threads ----------------------------------------------------------------------

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the engine's thread, between two forwards."""
        future: Future[_T] = Future()
        with self._wake:
            if self._dead:
                future.set_exception(self._ended())
                return future
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def submit(self, job: Job) -> None:
        """Take a request in.

        Raises:
            ApiError: 429 or 503; the queue is full, or the server is shutting down.
        """
        with self._wake:
            if self.stopping or self._dead:
                raise self._ended()
            waiting = len(self._incoming) + len(self._jobs)
            if waiting >= self.config.waiting:
                raise ApiError(503, "overloaded", f"{waiting} requests are waiting already", retry_after=2)
            self._incoming.append(job)
            self._wake.notify()
        self.bus.report(Queued(tenant=job.tenant, request=job.id, waiting=waiting + 1))

    def cancel(self, job: Job) -> None:
        """End a request: its client is gone, or has enough. Safe at any time, also twice."""
        job.cancelled = True
        with self._wake:
            self._wake.notify()

    def refuse(self) -> None:
        """Take no more requests; those under way and waiting go on."""
        self._refusing = True

    def stop(self, grace: float) -> None:
        """Take no more requests, give those under way ``grace`` seconds, save the sessions, end the thread."""
        with self._wake:
            self._stopping = time.monotonic() + grace
            self._wake.notify()

    @property
    def stopping(self) -> bool:
        """Whether no more requests are taken."""
        return self._refusing or self._stopping is not None

    @property
    def _dead(self) -> bool:
        return self._left or (self.ident is not None and not self.is_alive())

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._incoming) + len(self._jobs)

    @property
    def running(self) -> int:
        """Answers under way."""
        return len(self._runs)

    @property
    def _runs(self) -> list[Run]:
        return self._answers.runs

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body."""
        try:
            self._loop()
        finally:
            self._leave()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (
                    self._calls
                    or self._incoming
                    or self._runs
                    or self._stopping is not None
                    or self._unsaved()
                ):
                    if not self._wake.wait(timeout=self._patience()):
                        break
            try:
                if self._round():
                    return
            except Exception as error:
                _log.exception("the engine's thread failed on something; the answers under way end with it")
                self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        """End all answers under way, each whatever the end of another one raises."""
        for run in list(self._runs):
            try:
                self._answers.close(run, error)
            except Exception as broken:
                _log.exception("an answer could not be ended as it should")
                fail(self.bus, run.job, broken)

    def _round(self) -> bool:
        """One turn of the loop; True at the end."""
        self._run_calls()
        self._take_in()
        self._admit()
        if self._runs:
            self._step()
        elif self._jobs and self._stopping is None:
            time.sleep(0.005)  # they wait for something that no forward brings
        self._save_some()
        return self._stopping is not None and self._finish()

    def _save_some(self) -> None:
        """Store what has changed, one session at a time: at once while nobody waits, else when it has waited long."""
        due = self._unsaved()
        if not due:
            return
        since, held = min(due, key=lambda one: one[0])
        if self._runs and time.time() - since < self.config.save_within:
            return
        with suppress(ApiError):  # the log has it, and the session is tried again after its next turn
            self.store.save(held)

    def _patience(self) -> float | None:
        return 0.05 if self._jobs else None

    def _unsaved(self) -> list[tuple[float, Held]]:
        """Sessions that have to be stored, each with the time of its first change."""
        if not self.durable:
            return []
        return [
            (held.dirty_since, held)
            for held in self.store
            if held.dirty_since is not None
            and held.session is not None
            and not (held.busy or held.temporary or held.failed == held.turns)
        ]

    def _run_calls(self) -> None:
        for _ in range(_CALLS):
            with self._wake:
                if not self._calls:
                    return
                function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._answers.freed = True
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _take_in(self) -> None:
        with self._wake:
            while self._incoming:
                self._jobs.append(self._incoming.popleft())

    # -- admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start what can be started: by priority, then whoever has least under way, then in order."""
        if not self._jobs:
            return
        now = time.monotonic()
        freed, self._answers.freed = self._answers.freed, False
        load = Counter(run.job.tenant for run in self._runs)
        for job in sorted(self._jobs, key=lambda job: (-job.priority, load[job.tenant], job.arrival)):
            if job.cancelled:
                self._jobs.remove(job)
                continue
            if job.tried and not freed and now <= job.deadline and not self.stopping:
                continue  # nothing has changed since it was tried
            job.tried = True
            self.store.reserved = self._still_to_branch()
            try:
                started = len(self._runs) + job.n <= max(self.config.streams, job.n) and self._starter.start(
                    job
                )
            except Exception as error:
                self._jobs.remove(job)
                fail(self.bus, job, error)
                continue
            if started:
                self._jobs.remove(job)
                load[job.tenant] += job.n
            elif now > job.deadline or self._stopping is not None:
                self._jobs.remove(job)
                code = "overloaded" if self._stopping is None else "shutting_down"
                fail(self.bus, job, ApiError(503, code, "there was no room in time", retry_after=5))

    def _still_to_branch(self) -> int:
        """Sessions that requests for several answers will need yet."""
        return sum(run.job.n - len(run.job.runs) for run in self._runs if run.index == 0)

    # -- one forward -----------------------------------------------------------------------------

    def _step(self) -> None:
        for run in [run for run in self._runs if run.job.cancelled]:
            self._answers.close(run)
        if not self._runs:
            return
        ready = [run for run in self._runs if run.turn.session.memory.waiting]
        streams = [run for run in ready if run.turn.session.memory.waiting == 1]
        prompts = sorted(
            (run for run in ready if run.turn.session.memory.waiting > 1),
            key=lambda run: (-run.job.priority, run.job.arrival, run.index),
        )
        shares = self._pacer.shares(
            [run.turn.session.memory.waiting for run in prompts], streams=len(streams)
        )
        limits = {run.turn.session: share for run, share in zip(prompts, shares, strict=True) if share}
        device = self.engine.layout.device
        try:
            begun = timing.now(device)
            self.engine.step([*(run.turn.session for run in streams), *limits], limits=limits)
            seconds = timing.now(device) - begun  # here a device tells of what failed in it
        except Exception as error:
            _log.exception("a forward failed; %d answers end with it", len(self._runs))
            self._end_all(error)
            return
        prefill = sum(limits.values())
        self._pacer.observe(seconds, prefill=prefill, streams=len(streams))
        self.bus.report(
            Stepped(
                prefill=prefill,
                decode=len(streams),
                seconds=seconds,
                sessions=len(streams) + len(limits),
                waiting=self.waiting,
            )
        )
        now = time.monotonic()
        for run in list(self._runs):
            if not run.closed:
                self._answers.hand_out(run, now)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self) -> bool:
        """Whether everything is done after :meth:`stop`."""
        late = self._stopping is not None and time.monotonic() > self._stopping
        if (self._runs or self._jobs) and not late:
            return False
        self._end_all(ApiError(503, "shutting_down", "the server is shutting down"))
        for held in self.store:
            if held.session is None or not self.durable:
                continue
            try:
                self.store.park(held)
            except Exception as error:
                _log.error("a session could not be saved: %s", api_error(error).code)
        return True

    def _leave(self) -> None:
        """Let nobody wait for a thread that has ended, nor for one that is about to."""
        with self._wake:
            self._left = True
        self._take_in()
        for job in dict.fromkeys([*(run.job for run in self._runs), *self._jobs]):
            fail(self.bus, job, self._ended())
        with self._wake:
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            future.cancel()

    def _ended(self) -> ApiError:
        if self.stopping:
            return ApiError(503, "shutting_down", "the server is shutting down", retry_after=5)
        return ApiError(503, "engine_stopped", "the engine has stopped; the server has to be started again")
