"""``/v1/chat/completions``: replies as OpenAI's objects and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from tenure.sampling import TokenChoice
from tenure.serve.errors import ApiError, api_error
from tenure.serve.jobs import Failed, Finished, Reply, Started, Text
from tenure.serve.runner import new_id
from tenure.serve.sse import DONE, event


def usage(started: Started, completion: int, counters: dict[str, Any] | None = None) -> dict[str, Any]:
    """OpenAI's counts, with Tenure's own beside them."""
    return {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": started.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": started.cached_tokens},
        **({} if counters is None else {"tenure": counters}),
    }


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
        self.created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._texts = [""] * n
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._reasons = [""] * n
        self._tokens = 0
        self._started: Started | None = None
        self._counters: dict[str, Any] | None = None

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            raise reply.error
        if isinstance(reply, Started):
            self._started = reply
        elif isinstance(reply, Text):
            self._texts[reply.index] += reply.text
            self._logprobs[reply.index] += [self._spelt(choice) for choice in reply.choices]
        elif isinstance(reply, Finished):
            self._reasons[reply.index] = reply.reason
            self._tokens += reply.tokens
            if reply.index == 0:
                self._counters = reply.tenure

    async def whole(self, replies: AsyncIterator[Reply]) -> dict[str, Any]:
        """The response object, when everything has come."""
        async for reply in replies:
            self._note(reply)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": self._logprobs[index]} if self._logprobs[index] else None,
                "finish_reason": self._reasons[index],
            }
            for index, text in enumerate(self._texts)
        ]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage(),
        }

    async def chunks(self, first: Reply, replies: AsyncIterator[Reply]) -> AsyncIterator[bytes]:
        """The stream's events; an error inside it is an event, and then the end."""
        try:
            self._note(first)
            for index in range(len(self._texts)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for reply in replies:
                self._note(reply)
                if isinstance(reply, Text):
                    yield self._chunk(reply.index, {"content": reply.text}, logprobs=reply.choices)
                elif isinstance(reply, Finished):
                    yield self._chunk(reply.index, {}, reason=reply.reason)
            if self._include_usage:
                yield event({**self._head(), "choices": [], "usage": self._usage()})
        except Exception as error:
            yield event(api_error(error).body())
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self._model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: list[TokenChoice] | None = None,
    ) -> bytes:
        content = [self._spelt(choice) for choice in logprobs or []]
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": content} if content else None,
            "finish_reason": reason,
        }
        return event({**self._head(), "choices": [choice]})

    def _usage(self) -> dict[str, Any]:
        if self._started is None:
            raise ApiError(500, "internal_error", "the request ended before it began")
        return usage(self._started, self._tokens, self._counters)

    def _spelt(self, choice: TokenChoice) -> dict[str, Any]:
        return {
            **self._one(choice.token, choice.logprob),
            "top_logprobs": [self._one(token, value) for token, value in choice.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
