"""``/v1/chat/completions``: OpenAI's objects and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tenure.serve.ask import Ask
from tenure.serve.errors import ApiError, api_error
from tenure.serve.jobs import Called, Failed, Finished, Reply, Started, Text
from tenure.serve.logprobs import Placed, spelt
from tenure.serve.runner import new_id
from tenure.serve.sse import DONE, event
from tenure.serve.wire import ChatRequest


def ask_of(body: ChatRequest) -> Ask:
    """What a chat request wants."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "invalid_value", "top_logprobs needs logprobs: true", param="top_logprobs")
    choice = body.tool_choice
    return Ask(
        messages=[message.model_dump(exclude_none=True) for message in body.messages],
        hints=body.model_dump(include=HINTS),
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []],
        tool_choice=choice,
        many_calls=body.parallel_tool_calls is not False,
        response_format=body.response_format,
        template_options=body.chat_template_kwargs,
        sampling={
            **sampling_of(body),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "logprobs": logprobs,
        },
    )


HINTS = {
    "session_id",
    "priority",
    "cache_salt",
    "prompt_cache_key",
    "cache_control",
    "nvext",
    "hints",
}


def sampling_of(body: Any) -> dict[str, Any]:
    """The options that all requests share."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    seed = None if body.seed is None else body.seed % 2**63
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": body.ignore_eos,
    }


def usage(started: Started, completion: int, counters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """OpenAI's counts, with Tenure's own beside them."""
    return {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": started.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": started.cached_tokens},
        **({} if counters is None else {"tenure": dict(counters)}),
    }


def about(started: Started) -> dict[str, Any]:
    """Which session answered, and what became of the hints."""
    return {"session_id": started.session, "how": started.how, "hints": started.hints}


class Gathered:
    """What the replies of one request add up to."""

    def __init__(self, n: int = 1) -> None:
        self.texts = [""] * n
        self.calls: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self.choices: list[list[Placed]] = [[] for _ in range(n)]
        self.reasons = [""] * n
        self.tokens = 0
        self.counters: dict[str, Any] | None = None
        self._started: Started | None = None

    @property
    def started(self) -> Started:
        """How the request began."""
        if self._started is None:
            raise ApiError(500, "internal_error", "the request ended before it began")
        return self._started

    def add(self, reply: Reply) -> None:
        """Take a reply in.

        Raises:
            ApiError: the request has failed.
        """
        if isinstance(reply, Failed):
            raise reply.error
        if isinstance(reply, Started):
            self._started = reply
        elif isinstance(reply, Text):
            self.texts[reply.index] += reply.text
            self.choices[reply.index] += reply.choices
        elif isinstance(reply, Called):
            self.calls[reply.index].append(reply.call.to_openai())
        else:
            self.reasons[reply.index] = reply.reason
            self.tokens += reply.tokens
            if reply.index == 0:
                self.counters = reply.tenure

    def usage(self) -> dict[str, Any]:
        """The counts."""
        return usage(self.started, self.tokens, self.counters)


class Chat:
    """Builds one response, whole or in chunks.

    Args:
        model: name that is answered with.
        tokenizer: spells tokens for log-probabilities.
        n: answers.
        include_usage: whether a stream ends with the counts.
    """

    def __init__(self, model: str, tokenizer: Any, *, n: int = 1, include_usage: bool = False) -> None:
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._got = Gathered(n)

    async def whole(self, replies: AsyncIterator[Reply]) -> dict[str, Any]:
        """The response object, when everything has come."""
        got = self._got
        async for reply in replies:
            got.add(reply)
        choices = [
            {
                "index": index,
                "message": _message(text, got.calls[index]),
                "logprobs": self._logprobs(got.choices[index]),
                "finish_reason": got.reasons[index],
            }
            for index, text in enumerate(got.texts)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": got.usage(), "tenure": about(got.started)}

    async def chunks(self, first: Started, replies: AsyncIterator[Reply]) -> AsyncIterator[bytes]:
        """The stream's events; an error inside it is an event, and then the end."""
        got = self._got
        try:
            got.add(first)
            for index in range(len(got.texts)):
                yield self._chunk(
                    index, {"role": "assistant", "content": ""}, tenure=None if index else about(first)
                )
            async for reply in replies:
                got.add(reply)
                if isinstance(reply, Text):
                    yield self._chunk(reply.index, {"content": reply.text}, logprobs=reply.choices)
                elif isinstance(reply, Called):
                    call = {"index": reply.number, **reply.call.to_openai()}
                    yield self._chunk(reply.index, {"tool_calls": [call]})
                elif isinstance(reply, Finished):
                    yield self._chunk(reply.index, {}, reason=reply.reason)
            if self._include_usage:
                yield event({**self._head(), "choices": [], "usage": got.usage()})
        except Exception as error:
            yield event(api_error(error).body())
        yield DONE

    def _head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: list[Placed] | None = None,
        tenure: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs or []),
            "finish_reason": reason,
        }
        return event({**self._head(), "choices": [choice], **({} if tenure is None else {"tenure": tenure})})

    def _logprobs(self, choices: list[Placed]) -> dict[str, Any] | None:
        return {"content": [spelt(self._tokenizer, one.choice) for one in choices]} if choices else None


def _message(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    return {**message, "tool_calls": calls} if calls else message
