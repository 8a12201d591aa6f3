"""What can be looked at from outside: a session's memory, metrics, readiness."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response

from tenure.serve.errors import ApiError
from tenure.serve.metrics import CONTENT_TYPE, Metrics, Reading
from tenure.serve.routes import server_of, tenant_of
from tenure.serve.view import MOST_BLOCKS, memory_view

if TYPE_CHECKING:
    from tenure.serve.held import Held
    from tenure.session import Session

_T = TypeVar("_T")
_PATIENCE = 5.0
"""Seconds within which a ready engine's thread answers; a chunk of a prompt takes less."""
_MOST = 2_000
"""Blocks that can be asked for."""


def memory_router() -> APIRouter:
    """What a session remembers and why."""
    router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"])

    @router.get("/memory")
    async def memory(
        request: Request,
        session_id: str,
        start: Annotated[int, Query(ge=0)] = 0,
        stop: Annotated[int | None, Query(ge=0)] = None,
        most: Annotated[int, Query(ge=1, le=_MOST)] = MOST_BLOCKS,
    ) -> Response:
        """A session's memory as blocks over its tokens; see ``docs/server.md``."""
        found = await _look(
            request, session_id, lambda session: memory_view(session, start=start, stop=stop, most=most)
        )
        body = json.dumps(found, separators=(",", ":")).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    @router.get("/explain")
    async def explain(request: Request, session_id: str, span: str) -> dict[str, Any]:
        """Where a span is and why, with its text."""
        return await _look(request, session_id, lambda session: session.explain(span).to_json())

    return router


def watch_router(metrics: Metrics) -> APIRouter:
    """Health, readiness and metrics; outside ``/v1``.

    Args:
        metrics: listens to the server's events.
    """
    router = APIRouter(tags=["operation"])

    @router.get("/readyz")
    async def readyz(request: Request) -> dict[str, Any]:
        """Whether requests are taken: the engine's thread answers, and the queue has room."""
        server = server_of(request)
        if server.worker.stopping:
            raise ApiError(503, "shutting_down", "the server is shutting down", retry_after=5)
        try:
            waiting = await _on_engine(request, lambda: server.worker.waiting)
        except TimeoutError:
            raise ApiError(503, "busy", "the engine does not answer", retry_after=2) from None
        if waiting >= server.config.waiting:
            raise ApiError(503, "overloaded", f"{waiting} requests are waiting", retry_after=2)
        return {"status": "ready", "model": server.engine.name, "waiting": waiting}

    @router.get("/metrics")
    async def scrape(request: Request) -> Response:
        """Counters in Prometheus' form; with API keys, those of the key's own sessions, or all for the operator."""
        server, tenant = server_of(request), tenant_of(request)
        shown = None if server.config.keys is None or tenant == server.config.operator else tenant
        try:
            readings = await _on_engine(request, lambda: [_reading(held) for held in server.store])
        except (TimeoutError, ApiError):
            readings = []  # a stopping server still shows what it has counted
        tiers = [] if server.engine.tiers is None else server.engine.tiers.stats()["tiers"]
        text = metrics.render(readings, waiting=server.worker.waiting, tiers=tiers, tenant=shown)
        return Response(text, headers={"Cache-Control": "no-store"}, media_type=CONTENT_TYPE)

    return router


async def _on_engine(request: Request, function: Callable[[], _T]) -> _T:
    """A function's result from the engine's thread, between two forwards."""
    future = server_of(request).worker.call(function)
    return await asyncio.wait_for(asyncio.wrap_future(future), _PATIENCE)


async def _look(
    request: Request, session_id: str, read: Callable[[Session], dict[str, Any]]
) -> dict[str, Any]:
    server, tenant = server_of(request), tenant_of(request)

    def look() -> dict[str, Any]:
        held = server.store.get(tenant, session_id)
        if held.session is None:
            raise ApiError(
                409, "session_parked", "The session is parked; its memory can be seen while it is in use."
            )
        return read(held.session)

    try:
        return await _on_engine(request, look)
    except TimeoutError:
        raise ApiError(503, "busy", "the engine does not answer", retry_after=2) from None


def _reading(held: Held) -> Reading:
    if held.session is None:
        return Reading(held.tenant, "parked")
    memory = held.session.memory
    state = "busy" if held.busy else "idle"
    return Reading(held.tenant, state, memory.ledger.rows, memory.config.budget, memory.rows.nbytes)
