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
from typing import TYPE_CHECKING, Any, TypeVar

from tenure import timing
from tenure.serve.answers import Answers, brought_back, fail, session_of
from tenure.serve.errors import ApiError, api_error
from tenure.serve.events import Bus, Queued, Stepped, TurnStarted
from tenure.serve.held import Held
from tenure.serve.jobs import Job, Run, Started
from tenure.serve.pace import Pacer
from tenure.serve.store import Place, Store, adopt, useful

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
        self._answers = Answers(store, bus)
        self._stopping: float | None = None
        self._pacer = Pacer(config.session.chunk, config.smooth)

    # -- from other threads ----------------------------------------------------------------------

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the engine's thread, between two forwards."""
        future: Future[_T] = Future()
        with self._wake:
            if not self.is_alive() and self.ident is not None:
                future.set_exception(ApiError(503, "shutting_down", "the server is shutting down"))
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
            if self.stopping:
                raise ApiError(503, "shutting_down", "the server is shutting down", retry_after=5)
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
                for run in list(self._runs):
                    self._answers.close(run, error)

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
        due = [held for held in self.store if held.dirty and not held.busy and not held.temporary]
        due = [held for held in due if held.session is not None]
        if not due or not self.durable:
            return
        held = min(due, key=lambda held: held.used)
        if self._runs and time.time() - held.used < self.config.save_within:
            return
        try:
            self.store.save(held)
        except Exception as error:
            held.dirty = False  # told once; the next turn tries again
            _log.error("a session could not be saved: %s", type(error).__name__)

    def _patience(self) -> float | None:
        return 0.05 if self._jobs else None

    def _unsaved(self) -> bool:
        return self.durable and any(held.dirty and not held.busy for held in self.store)

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
                started = len(self._runs) + job.n <= max(self.config.streams, job.n) and self._start(job)
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

    def _start(self, job: Job) -> bool:
        """Find a session and start its turn; False if the request has to wait."""
        store = self.store
        place = store.place(job)
        if place.held is not None and place.how == "continued" and place.held.busy:
            return False
        if job.n > store.slots:
            raise ApiError(400, "invalid_value", f"n may be {store.slots} at most", param="n")
        held = self._session_for(job, place)
        if held is None:
            return False
        try:
            before = brought_back(held)
            keep = useful(session_of(held), place.keep) if place.how == "branched" else len(held.tokens)
            cached = adopt(held, job, keep)
        except BaseException:
            if place.how != "continued":
                store.delete(held)
            raise
        held.chain, held.count = job.chain[-1] if job.chain else b"", len(job.chain)
        held.priority, held.used, held.dirty = job.priority, time.time(), True
        held.keep_until = max(held.keep_until, time.time() + job.ttl)
        held.key = job.key or held.key
        prompt = len(job.conversation.ids)
        queued = time.monotonic() - job.arrival
        self._answers.begin(job, held, 0, prompt, cached, before)
        job.emit(Started(held.id, prompt, cached, queued, place.how, job.hints))
        self.bus.report(
            TurnStarted(
                tenant=job.tenant,
                session=held.id,
                request=job.id,
                prompt_tokens=prompt,
                cached_tokens=cached,
                queued=queued,
                how=place.how,
            )
        )
        return True

    def _session_for(self, job: Job, place: Place) -> Held | None:
        store, held = self.store, place.held
        if held is not None and place.how == "continued":
            if not store.make_room(job.n - (held.session is not None), leave=held):
                return None
            store.bring_back(held)
            return held
        if held is None:
            return store.open(job) if store.make_room(job.n) else None
        if not store.make_room(job.n + (held.session is None), leave=held):
            return None
        store.bring_back(held)
        return store.fork(held, session=job.session)

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
            for run in list(self._runs):
                self._answers.close(run, error)
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
        for run in list(self._runs):
            self._answers.close(run, ApiError(503, "shutting_down", "the server is shutting down"))
        for held in self.store:
            if held.session is None or not self.durable:
                continue
            try:
                self.store.park(held)
            except Exception as error:
                _log.error("a session could not be saved: %s", api_error(error).code)
        with self._wake:
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            future.cancel()
        return True
