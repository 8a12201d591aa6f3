"""Routes that generate: chat and text completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tenure.serve.chat import HINTS, Chat, Gathered, ask_of, sampling_of
from tenure.serve.errors import ApiError
from tenure.serve.jobs import Failed, Reply, Started
from tenure.serve.rawtext import Completion, joined, prompts_of, raw_fields
from tenure.serve.routes import check_model, server_of, tenant_of
from tenure.serve.wire import ChatRequest, CompletionRequest

_T = TypeVar("_T")
router = APIRouter(prefix="/v1", tags=["answers"])


async def begin(replies: AsyncIterator[Reply]) -> Started:
    """Wait until a request has begun, so that what is wrong with it is told before a stream starts.

    Raises:
        ApiError: it has failed.
    """
    first = await anext(replies)
    if isinstance(first, Failed):
        raise first.error
    if not isinstance(first, Started):
        raise TypeError(f"a request began with {type(first).__name__}")
    return first


def stream(events: AsyncIterator[bytes], started: Started) -> Response:
    """A response of events."""
    headers = {
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
        "X-Tenure-Session": _ascii(started.session),
    }
    return _Events(events, media_type="text/event-stream", headers=headers)


class _Events(StreamingResponse):
    """Ends its iterator at once when the client leaves, so that the engine does not go on for nobody."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do something for as long as the client is there.

    Raises:
        ApiError: it left; the work has been cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "client_closed_request", "the client left")
        return await task
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _ascii(name: str) -> str:
    """As a header may say it, where text is ASCII and has no space at its ends."""
    text = name.encode("ascii", "backslashreplace").decode()
    return text if text == text.strip() else text.replace(" ", "\\x20")


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    check_model(server, body.model)
    fields = await server.runner.prepare(ask_of(body), tenant_of(request))
    n = body.n or 1
    replies = server.runner.replies(**fields, n=n)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    answer = Chat(server.engine.name, server.engine.tokenizer, n=n, include_usage=usage)
    if body.stream:
        started = await while_there(request, begin(replies))
        return stream(answer.chunks(started, replies), started)
    return JSONResponse(await while_there(request, answer.whole(replies)))


@router.post("/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Go on with a raw text, or several; no chat template."""
    server, tenant = server_of(request), tenant_of(request)
    check_model(server, body.model)
    n, prompts = body.n or 1, prompts_of(body.prompt)
    if body.stream and len(prompts) > 1:
        raise ApiError(400, "invalid_value", "a stream takes one prompt", param="prompt")
    hints = body.model_dump(include=HINTS)
    sampling = {**sampling_of(body), "max_tokens": body.max_tokens or 16, "logprobs": body.logprobs}
    ready = [
        await server.runner.off_loop(
            partial(raw_fields, prompt, hints, sampling, server.engine, server.config)
        )
        for prompt in prompts
    ]
    runs = [server.runner.replies(tenant=tenant, n=n, **fields) for fields in ready]
    usage = bool(body.stream_options and body.stream_options.include_usage)
    answers = [
        Completion(server.engine.name, server.engine.tokenizer, n=n, first=place * n, include_usage=usage)
        for place in range(len(runs))
    ]
    if body.stream:
        started = await while_there(request, begin(runs[0]))
        return stream(answers[0].chunks(started, runs[0]), started)

    async def all_of() -> list[Gathered]:
        return [await answer.gather(run) for answer, run in zip(answers, runs, strict=True)]

    got = await while_there(request, all_of())
    return JSONResponse(joined(answers, got))
