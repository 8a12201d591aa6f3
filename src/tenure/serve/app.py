"""The ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from tenure.errors import TenureError
from tenure.serve import sessions
from tenure.serve.chat import Chat
from tenure.serve.config import ServeConfig
from tenure.serve.errors import ApiError, api_error
from tenure.serve.events import Bus
from tenure.serve.jobs import Failed
from tenure.serve.metrics import Metrics
from tenure.serve.page import page_router
from tenure.serve.parking import NoParking, Parking
from tenure.serve.runner import Runner
from tenure.serve.seen import memory_router, watch_router
from tenure.serve.store import Store
from tenure.serve.wire import ChatRequest
from tenure.serve.worker import Worker
from tenure.version import __version__

if TYPE_CHECKING:
    from tenure.engine import Engine


@dataclass
class Server:
    """What the routes share; found as ``request.app.state.server``."""

    engine: Engine
    config: ServeConfig
    bus: Bus
    store: Store
    worker: Worker
    runner: Runner
    started: float


def create_app(
    engine: Engine, config: ServeConfig | None = None, *, parking: Parking | None = None
) -> FastAPI:
    """An application that serves an engine.

    The engine's thread runs from the application's start to its end; nothing else may use the engine then.

    Args:
        engine: a loaded model with a tokenizer.
        config: options.
        parking: where sessions go that are not in memory.
    """
    config = config or ServeConfig()
    bus = Bus()
    metrics = Metrics(engine.name)
    bus.listen(metrics)
    store = Store(engine, config, parking or NoParking(), bus, config.resident)
    worker = Worker(engine, config, store, bus)
    server = Server(engine, config, bus, store, worker, Runner(engine, config, worker), time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop(config.grace)
        worker.join()
        server.runner.close()

    app = FastAPI(title="Tenure", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(TenureError, _refuse)
    app.add_exception_handler(Exception, _refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": engine.name, "object": "model", "created": int(server.started), "owned_by": "tenure"}
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        whole, digests = await server.runner.render(messages)
        options = server.runner.sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=body.seed,
            stop=None
            if body.stop is None
            else ((body.stop,) if isinstance(body.stop, str) else tuple(body.stop)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        n = body.n or 1
        replies = server.runner.replies(
            tenant="",
            conversation=whole,
            chain=digests,
            options=options,
            n=n,
            session=body.session_id if isinstance(body.session_id, str) else None,
        )
        usage = bool(body.stream_options and body.stream_options.include_usage)
        out = Chat(body.model, engine.tokenizer, n=n, include_usage=usage)
        if not body.stream:
            return JSONResponse(await out.whole(replies))
        first = await anext(replies)
        if isinstance(first, Failed):
            raise first.error
        return StreamingResponse(out.chunks(first, replies), media_type="text/event-stream")

    app.include_router(sessions.router)
    app.include_router(memory_router())
    app.include_router(watch_router(metrics))
    app.include_router(page_router())
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refused = api_error(error)
    return JSONResponse(refused.body(), refused.status, headers=refused.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    first: dict[str, Any] = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    place = ".".join(str(part) for part in first.get("loc", ())[1:])
    return await _refuse(
        request, ApiError(400, "invalid_request", f"{place}: {first.get('msg')}", param=place)
    )


async def _http(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return await _refuse(request, ApiError(status, f"http_{status}", str(getattr(error, "detail", ""))))
