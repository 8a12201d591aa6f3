"""``/v1/sessions``: what there is, and what can be done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from tenure.serve.errors import ApiError
from tenure.serve.held import Held
from tenure.serve.hints import check_name
from tenure.serve.routes import server_of, tenant_of
from tenure.serve.store import Store
from tenure.serve.view import session_summary

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
_T = TypeVar("_T")


class ForkRequest(BaseModel):
    """``POST /v1/sessions/{id}/fork``."""

    model_config = ConfigDict(strict=True)
    session_id: str | None = None
    tokens: Annotated[int, Field(ge=0)] | None = None


def describe(held: Held) -> dict[str, Any]:
    """A session in a list. To be called on the engine's thread."""
    return {
        "id": held.id,
        "object": "session",
        "created": int(held.created),
        "used": int(held.used),
        "turns": held.turns,
        "priority": held.priority,
        "state": "parked" if held.session is None else "busy" if held.busy else "idle",
        "saved": not held.dirty,
        **({"tokens": len(held.ids)} if held.session is None else session_summary(held.session)),
    }


async def on_engine(request: Request, function: Callable[[Store, str], _T]) -> _T:
    """A function's result from the engine's thread, given the sessions and the tenant."""
    server, tenant = server_of(request), tenant_of(request)
    return await asyncio.wrap_future(server.worker.call(lambda: function(server.store, tenant)))


@router.get("")
async def list_sessions(request: Request) -> dict[str, Any]:
    """All sessions of the key, the last used first."""
    found = await on_engine(request, lambda store, tenant: [describe(held) for held in store.of(tenant)])
    return {"object": "list", "data": found}


@router.get("/{session_id}")
async def show(session_id: str, request: Request) -> dict[str, Any]:
    """One session."""
    return await on_engine(request, lambda store, tenant: describe(store.get(tenant, session_id)))


@router.post("/{session_id}/fork")
async def fork(session_id: str, request: Request, body: ForkRequest | None = None) -> dict[str, Any]:
    """A copy of a session, or of its first tokens; both go on independently."""
    wanted = body or ForkRequest()
    if wanted.session_id is not None:
        check_name(wanted.session_id, "session_id")

    def work(store: Store, tenant: str) -> dict[str, Any]:
        source = store.get(tenant, session_id)
        if wanted.tokens is not None and wanted.tokens > len(source.tokens):
            raise ApiError(
                400, "invalid_value", f"the session has {len(source.tokens)} tokens", param="tokens"
            )
        _room(store, 1 + (source.session is None), source)
        store.bring_back(source, again=False)
        held = store.fork(source, session=wanted.session_id)
        if wanted.tokens is not None and held.session is not None:
            held.session.keep_first(wanted.tokens)
            held.count = 0
        return describe(held)

    return await on_engine(request, work)


@router.post("/{session_id}/save")
async def save(session_id: str, request: Request) -> dict[str, Any]:
    """Store a session now; it stays in memory."""

    def work(store: Store, tenant: str) -> dict[str, Any]:
        held = _idle(store.get(tenant, session_id))
        if held.session is not None:
            store.save(held)
        return describe(held)

    return await on_engine(request, work)


@router.post("/{session_id}/park")
async def park(session_id: str, request: Request) -> dict[str, Any]:
    """Store a session and take it out of memory, until it is used again."""

    def work(store: Store, tenant: str) -> dict[str, Any]:
        held = _idle(store.get(tenant, session_id))
        store.park(held)
        return describe(held)

    return await on_engine(request, work)


@router.post("/{session_id}/restore")
async def restore(session_id: str, request: Request) -> dict[str, Any]:
    """Bring a parked session into memory."""

    def work(store: Store, tenant: str) -> dict[str, Any]:
        held = store.get(tenant, session_id)
        if held.session is None:
            _room(store, 1, held)
            store.bring_back(held, again=False)
        return describe(held)

    return await on_engine(request, work)


@router.delete("/{session_id}")
async def delete(session_id: str, request: Request) -> dict[str, Any]:
    """Forget a session, in memory and where it was stored."""

    def work(store: Store, tenant: str) -> dict[str, Any]:
        store.delete(_idle(store.get(tenant, session_id)))
        return {"id": session_id, "object": "session", "deleted": True}

    return await on_engine(request, work)


def _idle(held: Held) -> Held:
    if held.busy:
        raise ApiError(409, "session_busy", "an answer is under way in this session", retry_after=1)
    return held


def _room(store: Store, wanted: int, leave: Held) -> None:
    if not store.make_room(wanted, leave=leave):
        raise ApiError(503, "overloaded", "all sessions in memory are busy", retry_after=2)
