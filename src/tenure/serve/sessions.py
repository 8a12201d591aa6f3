"""``/v1/sessions``: what there is, and what each of them remembers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from tenure.serve.store import Held
from tenure.serve.view import memory_view, session_summary

if TYPE_CHECKING:
    from tenure.serve.app import Server

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


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
    server = _server(request)
    future = server.worker.call(lambda: [describe(held) for held in server.store.of("")])
    return {"object": "list", "data": await asyncio.wrap_future(future)}


@router.get("/{session_id}")
async def show(session_id: str, request: Request) -> dict[str, Any]:
    """One session and its memory."""
    server = _server(request)

    def read() -> dict[str, Any]:
        held = server.store.get("", session_id)
        memory = None if held.session is None else memory_view(held.session)
        return {**describe(held), "memory": memory}

    return await asyncio.wrap_future(server.worker.call(read))


@router.get("/{session_id}/spans/{span_id}")
async def explain(session_id: str, span_id: str, request: Request) -> dict[str, Any]:
    """Where a span is and why."""
    server = _server(request)

    def read() -> dict[str, Any]:
        held = server.store.get("", session_id)
        if held.session is None:
            return {}
        return held.session.explain(span_id).to_json()

    return await asyncio.wrap_future(server.worker.call(read))
