"""``/v1/sessions``: what there is, and what each of them remembers."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from tenure.serve.held import Held
from tenure.serve.routes import server_of, tenant_of
from tenure.serve.view import memory_view, session_summary

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


def describe(held: Held) -> dict[str, Any]:
    """A session in a list. To be called on the engine's thread."""
    return {
        "id": held.id,
        "object": "session",
        "created": int(held.created),
        "used": int(held.used),
        "turns": held.turns,
        "state": "parked" if held.session is None else "busy" if held.busy else "idle",
        **({"tokens": len(held.ids)} if held.session is None else session_summary(held.session)),
    }


@router.get("")
async def list_sessions(request: Request) -> dict[str, Any]:
    """All sessions of the key."""
    server, tenant = server_of(request), tenant_of(request)
    future = server.worker.call(lambda: [describe(held) for held in server.store.of(tenant)])
    return {"object": "list", "data": await asyncio.wrap_future(future)}


@router.get("/{session_id}")
async def show(session_id: str, request: Request) -> dict[str, Any]:
    """One session and its memory."""
    server, tenant = server_of(request), tenant_of(request)

    def read() -> dict[str, Any]:
        held = server.store.get(tenant, session_id)
        memory = None if held.session is None else memory_view(held.session)
        return {**describe(held), "memory": memory}

    return await asyncio.wrap_future(server.worker.call(read))


@router.get("/{session_id}/spans/{span_id}")
async def explain(session_id: str, span_id: str, request: Request) -> dict[str, Any]:
    """Where a span is and why."""
    server, tenant = server_of(request), tenant_of(request)

    def read() -> dict[str, Any]:
        held = server.store.get(tenant, session_id)
        if held.session is None:
            return {}
        return held.session.explain(span_id).to_json()

    return await asyncio.wrap_future(server.worker.call(read))
