"""``/v1/responses``: the Responses interface, on top of the same sessions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tenure.serve.ask import Ask
from tenure.serve.chat import HINTS, Gathered, about
from tenure.serve.completions import begin, stream, while_there
from tenure.serve.errors import ApiError, api_error
from tenure.serve.invalid import check_data
from tenure.serve.items import answer_message, call_item, message_item, messages_of, tools_of
from tenure.serve.jobs import Called, Reply, Started, Text
from tenure.serve.logprobs import spelt
from tenure.serve.responded import Given
from tenure.serve.routes import check_model, server_of, tenant_of
from tenure.serve.runner import new_id
from tenure.serve.sse import event
from tenure.serve.wire import ResponsesRequest

router = APIRouter(prefix="/v1/responses", tags=["answers"])
_LAST = (b"event: response.completed", b"event: response.incomplete")


def _ask_of(body: ResponsesRequest, history: list[dict[str, Any]], new: list[dict[str, Any]]) -> Ask:
    rules = [{"role": "system", "content": body.instructions}] if body.instructions else []
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise ApiError(400, "invalid_value", "text.format must be an object", param="text.format")
    choice = body.tool_choice
    return Ask(
        messages=[*rules, *history, *new],
        hints=body.model_dump(include=HINTS),
        tools=tools_of(body.tools or []),
        tool_choice=choice,
        many_calls=body.parallel_tool_calls is not False,
        response_format=form,
        format_param="text.format",
        template_options=body.chat_template_kwargs,
        sampling={
            "temperature": body.temperature,
            "top_p": body.top_p,
            "min_p": body.min_p,
            "seed": None if body.seed is None else body.seed % 2**63,
            "max_tokens": body.max_output_tokens,
            "logprobs": body.top_logprobs,
        },
    )


class _Answer:
    """Builds one response, whole or as events."""

    def __init__(self, body: ResponsesRequest, model: str, tokenizer: Any) -> None:
        self.id = new_id("resp").replace("-", "_")
        self._body = body
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._got = Gathered()
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    @property
    def session(self) -> str:
        """The session that answers."""
        return self._got.started.session

    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        return answer_message(self._got.texts[0], self._got.calls[0])

    async def whole(self, replies: AsyncIterator[Reply]) -> dict[str, Any]:
        """The response object, when everything has come."""
        async for reply in replies:
            for _ in self._take(reply):
                pass
        for _ in self._end_text():
            pass
        return self.object()

    async def events(self, started: Started, replies: AsyncIterator[Reply]) -> AsyncIterator[bytes]:
        """The stream's events."""
        for data in self._take(started):
            yield self._event(data)
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self.object("in_progress")})
        try:
            async for reply in replies:
                for data in self._take(reply):
                    yield self._event(data)
            for data in self._end_text():
                yield self._event(data)
        except Exception as error:
            refused = api_error(error)
            failed = {"code": "server_error", "message": refused.message}
            yield self._event(
                {"type": "response.failed", "response": {**self.object("failed"), "error": failed}}
            )
            return
        done = self.object()
        yield self._event({"type": f"response.{done['status']}", "response": done})

    def object(self, status: str | None = None) -> dict[str, Any]:
        """The response as it is now."""
        got, body = self._got, self._body
        cut = got.reasons[0] == "length"
        status = status or ("incomplete" if cut else "completed")
        counts = got.usage() if got.reasons[0] else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature or 0.0,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p or 1.0,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None if counts is None else _usage(counts),
            "tenure": about(got.started),
        }

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number - 1}, data["type"])

    def _take(self, reply: Reply) -> list[dict[str, Any]]:
        self._got.add(reply)
        if isinstance(reply, Text) and (reply.text or self._open is not None):
            return [*self._begin_text(), *self._more_text(reply)]
        if isinstance(reply, Called):
            return [*self._end_text(), *self._add_call(reply.call.to_openai())]
        return []

    def _begin_text(self) -> list[dict[str, Any]]:
        if self._open is not None:
            return []
        place = len(self._output)
        self._open = item = message_item(new_id("msg").replace("-", "_"), "", "in_progress", [])
        self._output.append(item)
        empty = {**item, "content": []}
        part = {**item["content"][0]}
        where = {"item_id": item["id"], "output_index": place, "content_index": 0}
        return [
            {"type": "response.output_item.added", "output_index": place, "item": empty},
            {"type": "response.content_part.added", **where, "part": part},
        ]

    def _more_text(self, reply: Text) -> list[dict[str, Any]]:
        item = self._open
        if item is None:
            return []
        logprobs = [spelt(self._tokenizer, one.choice) for one in reply.choices]
        item["content"][0]["text"] += reply.text
        item["content"][0]["logprobs"] += logprobs
        where = {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return [{"type": "response.output_text.delta", **where, "delta": reply.text, "logprobs": logprobs}]

    def _end_text(self) -> list[dict[str, Any]]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "incomplete" if self._got.reasons[0] == "length" else "completed"
        part, place = item["content"][0], len(self._output) - 1
        where = {"item_id": item["id"], "output_index": place, "content_index": 0}
        done = {
            "type": "response.output_text.done",
            **where,
            "text": part["text"],
            "logprobs": part["logprobs"],
        }
        return [
            done,
            {"type": "response.content_part.done", **where, "part": part},
            {"type": "response.output_item.done", "output_index": place, "item": item},
        ]

    def _add_call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        place, item = len(self._output), call_item(new_id("fc").replace("-", "_"), call)
        self._output.append(item)
        where = {"item_id": item["id"], "output_index": place}
        begun = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            {"type": "response.output_item.added", "output_index": place, "item": begun},
            {"type": f"{name}.delta", **where, "delta": item["arguments"]},
            {"type": f"{name}.done", **where, "name": item["name"], "arguments": item["arguments"]},
            {"type": "response.output_item.done", "output_index": place, "item": item},
        ]


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "tenure": counts.get("tenure"),
    }


@router.post("")
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer, going on from an earlier response if one is named."""
    server, tenant = server_of(request), tenant_of(request)
    check_model(server, body.model)
    for param in ("tools", "tool_choice", "text", "metadata"):
        check_data(getattr(body, param), param)  # they are given back
    new = messages_of(body.input)
    previous = body.previous_response_id
    history = [] if previous is None else server.responded.history(tenant, previous)
    fields = await server.runner.prepare(_ask_of(body, history, new), tenant)
    replies = server.runner.replies(**fields)
    answer = _Answer(body, server.engine.name, server.engine.tokenizer)

    async def keep(given: dict[str, Any]) -> None:
        if body.store is not False:
            added = [*new, answer.message()]
            done = Given(answer.id, tenant, previous, added, answer.session, given)
            await server.runner.off_loop(lambda: server.responded.add(done))

    if body.stream:
        started = await while_there(request, begin(replies))

        async def events() -> AsyncIterator[bytes]:
            async for data in answer.events(started, replies):
                if data.startswith(_LAST):
                    await keep(answer.object())  # before the client can name it
                yield data

        return stream(events(), started)
    given = await while_there(request, answer.whole(replies))
    await keep(given)
    return JSONResponse(given)


@router.get("/{response_id}")
async def show(response_id: str, request: Request) -> dict[str, Any]:
    """A response that was given."""
    return server_of(request).responded.get(tenant_of(request), response_id).body


@router.delete("/{response_id}")
async def forget(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a response; the session that gave it stays."""
    server, tenant = server_of(request), tenant_of(request)
    await server.runner.off_loop(lambda: server.responded.delete(tenant, response_id))
    return {"id": response_id, "object": "response", "deleted": True}
