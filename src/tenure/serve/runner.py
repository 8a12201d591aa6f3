"""From a request's data to replies: renders off the event loop, submits to the engine's thread, yields replies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tenure.serve.ask import Ask, Ready, make_ready
from tenure.serve.errors import ApiError
from tenure.serve.hints import MARKS
from tenure.serve.invalid import check_data
from tenure.serve.jobs import Failed, Finished, Job, Reply

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.serve.config import ServeConfig
    from tenure.serve.worker import Worker

_log = logging.getLogger("tenure.serve")
_RENDERERS = 4
_T = TypeVar("_T")


class Runner:
    """Runs requests of the HTTP side on a worker.

    Args:
        engine: read for its tokenizer and template only.
        config: of the server.
        worker: the engine's thread.
    """

    def __init__(self, engine: Engine, config: ServeConfig, worker: Worker) -> None:
        self.engine = engine
        self.config = config
        self.worker = worker
        self._open: Counter[str] = Counter()
        # A pool of its own: tokenizing megabytes must not take the threads that others need.
        self._pool = ThreadPoolExecutor(_RENDERERS, thread_name_prefix="tenure-render")

    async def prepare(self, ask: Ask, tenant: str) -> dict[str, Any]:
        """Fields of a job for :meth:`replies`; what takes long runs on another thread.

        Raises:
            ApiError: the request cannot be done.
            TenureError: a message or an option is wrong.
        """
        if len(ask.messages) > self.config.max_messages:
            raise ApiError(
                400,
                "too_many_messages",
                f"{len(ask.messages)} messages, the limit is {self.config.max_messages}",
                param="messages",
            )

        if self.config.log_text:
            _log.info("%s asks %s", tenant or "somebody", json.dumps(list(ask.messages), ensure_ascii=False))

        def work() -> tuple[Ready, list[bytes]]:
            _check(ask)
            setting = [list(ask.tools), dict(ask.template_options or {}), ask.tool_choice == "none"]
            try:
                return make_ready(ask, self.engine, self.config), chain(ask.messages, setting)
            except RecursionError:  # arguments of calls are JSON in a text
                raise ApiError(
                    400,
                    "invalid_value",
                    "messages: arguments of a call are nested too deep",
                    param="messages",
                ) from None

        ready, digests = await self.off_loop(work)
        hints = ready.hints
        return {
            "tenant": tenant,
            "conversation": ready.conversation,
            "chain": digests,
            "options": ready.options,
            "calls": ready.calls,
            "session": hints.session,
            "salt": hints.salt,
            "key": hints.key,
            "priority": hints.priority,
            "ttl": hints.ttl,
            "hints": hints.report,
        }

    async def off_loop(self, work: Callable[[], _T]) -> _T:
        """Run a function on a rendering thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def replies(self, **fields: Any) -> AsyncIterator[Reply]:
        """Submit a job and yield its replies; leaving the iterator early cancels it.

        Args:
            fields: of :class:`~tenure.serve.jobs.Job`, without ``id`` and ``emit``.

        Raises:
            ApiError: 429 or 503, before the first reply.
        """
        tenant = fields["tenant"]
        if self._open[tenant] >= self.config.streams_per_key:
            raise ApiError(
                429,
                "too_many_requests",
                f"this key has {self._open[tenant]} requests under way, the limit is "
                f"{self.config.streams_per_key}",
                retry_after=1,
            )
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Reply] = asyncio.Queue()

        def emit(reply: Reply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(queue.put_nowait, reply)

        job = Job(id=new_id("req"), emit=emit, deadline=time.monotonic() + self.config.wait, **fields)
        self._open[tenant] += 1
        left = job.n
        try:
            self.worker.submit(job)
            while left:
                reply = await queue.get()
                yield reply
                left = 0 if isinstance(reply, Failed) else left - isinstance(reply, Finished)
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
            if left:
                self.worker.cancel(job)

    def close(self) -> None:
        """Stop the rendering threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _check(ask: Ask) -> None:
    for param, value in (
        ("tools", ask.tools),
        ("tool_choice", ask.tool_choice),
        ("response_format", ask.response_format),
        ("chat_template_kwargs", ask.template_options),
    ):
        check_data(value, param)
    for number, message in enumerate(ask.messages):
        rest = {name: value for name, value in message.items() if name not in MARKS}
        check_data(rest, f"messages[{number}]", texts=False)  # the rendering looks at them


def chain(messages: Sequence[Mapping[str, Any]], setting: object) -> list[bytes]:
    """For each message a digest of all up to it, without marks; ``setting`` is what else shapes the prompt."""
    state = hashlib.blake2b(json.dumps(setting, sort_keys=True).encode(), digest_size=16)
    digests = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in MARKS and value is not None}
        state.update(json.dumps(plain, sort_keys=True).encode() + b"\n")
        digests.append(state.digest())
    return digests


def new_id(kind: str) -> str:
    """A fresh id, such as ``chatcmpl-...``."""
    return f"{kind}-{secrets.token_hex(12)}"
