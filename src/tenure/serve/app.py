"""The ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tenure.compress.base import check_alike
from tenure.errors import ConfigError, TenureError
from tenure.kernels.threads import give_up_helpers
from tenure.serve import completions, responses, sessions
from tenure.serve.answers import count
from tenure.serve.auth import Keys
from tenure.serve.config import ServeConfig
from tenure.serve.errors import ApiError, api_error
from tenure.serve.events import Bus
from tenure.serve.guard import Guard
from tenure.serve.invalid import refusal_of
from tenure.serve.metrics import Metrics
from tenure.serve.openapi import document
from tenure.serve.page import page_router
from tenure.serve.parking import FileParking, Parking
from tenure.serve.responded import Responded
from tenure.serve.routes import check_model, server_of
from tenure.serve.runner import Runner
from tenure.serve.seen import memory_router, watch_router
from tenure.serve.store import Store
from tenure.serve.traces import Traces
from tenure.serve.worker import Worker
from tenure.version import __version__

if TYPE_CHECKING:
    from tenure.engine import Engine


_LAST = 2.0
"""Seconds for what is left when all connections are closed."""


@dataclass
class Server:
    """What the routes share; found as ``request.app.state.server``."""

    engine: Engine
    config: ServeConfig
    bus: Bus
    store: Store
    worker: Worker
    runner: Runner
    responded: Responded
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

    Raises:
        ConfigError: no session can be as it is asked for.
    """
    config = config or ServeConfig()
    if config.session.compress:
        check_alike(engine.layout, "compress")
    bus = Bus()
    metrics = Metrics(engine.name)
    bus.listen(metrics)
    traces = Traces.exporting(engine.name) if config.traces else None
    own = TemporaryDirectory(prefix="tenure-") if config.state is None else None
    folder = Path(own.name if own is not None else str(config.state))
    durable = own is None or parking is not None
    parking = parking or FileParking(engine, folder / "sessions")
    responded = Responded(None if own is not None else folder / "responses")
    store = Store(engine, config, parking, bus, slots_of(engine, config))
    worker = Worker(engine, config, store, bus, durable=durable)
    runner = Runner(engine, config, worker)
    server = Server(engine, config, bus, store, worker, runner, responded, time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        give_up_helpers()  # only the worker computes
        worker.start()
        yield
        worker.stop(_LAST)
        await asyncio.to_thread(worker.join)
        runner.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        if own is not None:
            own.cleanup()

    app = FastAPI(title="Tenure", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    keys = None if config.keys is None else Keys(config.keys)
    app.add_middleware(Guard, keys=keys, max_body=config.max_body, bus=bus)
    if traces is not None:
        bus.listen(traces)
        app.add_middleware(traces.middleware)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(TenureError, _refuse)
    app.add_exception_handler(Exception, _refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Whether the engine's thread lives."""
        alive = worker.is_alive()
        body = {"status": "ok" if alive else "failed", "version": __version__}
        return JSONResponse(body, 200 if alive else 503)

    card = {"id": engine.name, "object": "model", "created": int(server.started), "owned_by": "tenure"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(server, name)
        return card

    app.include_router(completions.router)
    app.include_router(responses.router)
    app.include_router(sessions.router)
    app.include_router(memory_router())
    app.include_router(watch_router(metrics))
    app.include_router(page_router())
    app.openapi = document(app, engine.name)  # type: ignore[method-assign]
    return app


def slots_of(engine: Engine, config: ServeConfig) -> int:
    """Sessions that may be in memory at once, from the exact size of a session's slab.

    Raises:
        ConfigError: not even one fits.
    """
    from tenure.models.folder import free_memory

    copies = 3 if engine.config.rotate == "copy" else 2
    slab = (config.session.capacity or 0) * engine.layout.token_bytes * copies // 2
    memory = config.memory or free_memory(str(engine.layout.device)) // 2
    slots = min(config.resident, memory // slab)
    if slots < 1:
        raise ConfigError(
            f"one session takes {slab:,} bytes, {memory:,} are allowed",
            option="memory",
            way_out="Give more, or a smaller budget or chunk",
        )
    return slots


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refused = api_error(error)
    if refused.status != 499:
        count(server_of(request).bus, getattr(request.state, "tenant", ""), refused)
    return JSONResponse(refused.body(), refused.status, headers=refused.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    return await _refuse(request, refusal_of(error) if isinstance(error, RequestValidationError) else error)


async def _http(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = "invalid_request" if status == 400 else f"http_{status}"
    text = str(getattr(error, "detail", ""))
    if isinstance(error.__cause__, UnicodeDecodeError):
        text = f"the body is not UTF-8 at byte {error.__cause__.start}"
    elif status == 404:
        text = "no such route; OpenAI's are under /v1, and /openapi.json lists all"
    reply = await _refuse(request, ApiError(status, code, text))
    reply.headers.update(getattr(error, "headers", None) or {})  # Allow, for a method that is not
    return reply
